"""Rows are given when the bytes have come: the batch steps on meanwhile, and no token is ever another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from batond.daemon.engine import SamplingParams
from batond.daemon.engine.queries import arriving
from batond.daemon.scheduler.plan import ParkMode, ParkOrder, Plan
from batond.daemon.scheduler.planner import PlannerLimits
from batond.daemon.wire.messages import QueryState
from batond.offload.copies import InlineCopier

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.engine import LocalEngine
    from batond.daemon.engine.queries.query import Query
    from batond.offload.copies import Transfer
    from batond.offload.pool import Reservation
    from batond.offload.slice import KVSlice

    Make = Callable[..., LocalEngine]
    Solo = Callable[..., list[int]]

PROMPT = [5, 6, 7]
LONG = SamplingParams(max_tokens=24, ignore_eos=True)
WAITING_STEPS = 3


class SlowTransfer:
    """A copy to the device that is over when the test says so, or when somebody waits for it."""

    def __init__(self, reservation: Reservation, kv: KVSlice) -> None:
        self.reservation, self.kv = reservation, kv
        self.over = False
        self.waited = 0

    def complete(self) -> None:
        """Let it happen."""
        if not self.over:
            InlineCopier().load(self.reservation, self.kv)
        self.over = True

    def done(self) -> bool:
        """Whether it has happened."""
        return self.over

    def wait(self) -> None:
        """Let it happen now."""
        self.waited += not self.over
        self.complete()


class SlowCopier(InlineCopier):
    """Copies to the device take as long as the test wants."""

    def __init__(self) -> None:
        self.transfers: list[SlowTransfer] = []

    def load(self, reservation: Reservation, kv: KVSlice) -> Transfer:
        """Begin, and no more."""
        self.transfers.append(SlowTransfer(reservation, kv))
        return self.transfers[-1]

    @property
    def waited(self) -> int:
        """Copies that somebody stood still for."""
        return sum(transfer.waited for transfer in self.transfers)


@pytest.fixture
def bus() -> SlowCopier:
    return SlowCopier()


def engine_on(bus: SlowCopier, make_engine: Make, model: Any, **kw: Any) -> LocalEngine:
    engine = make_engine(model, limits=PlannerLimits(quantum_tokens=1), **kw)
    engine.residency.store._copier = bus
    return engine


def running(engine: LocalEngine, place: int, sla_class: str = "standard") -> Query:
    """One more query that decodes."""
    query = engine.submit([*PROMPT, place], LONG, sla_class=sla_class)
    while query.row is None or len(query.output_token_ids) < 2:
        step(engine)
    return query


def step(engine: LocalEngine) -> None:
    assert engine.counters["steps"] < 200
    engine.step()
    engine.check_integrity()


def finish(engine: LocalEngine, bus: SlowCopier, solo: Solo, model: Any, *queries: Query) -> None:
    """Let all end, each copy in the step after the one in which it was begun."""
    while engine.busy:
        step(engine)
        for transfer in bus.transfers:
            transfer.complete()
    for query in queries:
        assert query.output_token_ids == solo(model, query.prompt_token_ids, LONG.max_tokens)
    assert engine.counters["recomputed_tokens"] == 0


def test_others_decode_while_one_is_brought_back(
    llama: Any, make_engine: Make, solo: Solo, bus: SlowCopier
) -> None:
    """R1, R5: resumed by hand, with a free row and no copy begun before."""
    engine = engine_on(bus, make_engine, llama, rows=2)
    stays, comes = running(engine, 0), running(engine, 1)
    engine.park(comes)
    step(engine)
    engine.resume(comes)
    before = len(stays.output_token_ids)
    for _ in range(WAITING_STEPS):
        step(engine)
        assert comes.state is QueryState.PARKED
    assert len(stays.output_token_ids) == before + WAITING_STEPS
    (transfer,) = bus.transfers
    transfer.complete()
    step(engine)
    assert comes.row is not None
    assert bus.waited == 0
    assert engine.counters["waits_for_copy"] == WAITING_STEPS
    finish(engine, bus, solo, llama, stays, comes)


def test_a_row_stays_with_its_owner_until_the_bytes_of_who_takes_it_are_there(
    llama: Any, make_engine: Make, solo: Solo, bus: SlowCopier
) -> None:
    """S4: a victim works on while the copy is under way; then it is parked, once."""
    engine = engine_on(bus, make_engine, llama, rows=1)
    urgent = running(engine, 0, "interactive")
    engine.park(urgent)
    victim = running(engine, 1, "batch")
    parks = engine.counters["parks"]
    engine.resume(urgent)
    before = len(victim.output_token_ids)
    for _ in range(WAITING_STEPS):
        step(engine)
        assert victim.row is not None
    assert len(victim.output_token_ids) == before + WAITING_STEPS
    assert engine.counters["parks"] == parks
    bus.transfers[0].complete()
    step(engine)
    assert (urgent.row, victim.state) == (0, QueryState.PARKED)
    assert engine.counters["parks"] == parks + 1
    finish(engine, bus, solo, llama, urgent, victim)


def test_nobody_overtakes_who_waits_for_its_copy(
    llama: Any, make_engine: Make, solo: Solo, bus: SlowCopier
) -> None:
    """S3: the free row is for the head of the line, though its equal behind could have it now."""
    engine = engine_on(bus, make_engine, llama, rows=2)
    stays, comes = running(engine, 0), running(engine, 1)
    engine.park(comes)
    step(engine)
    engine.resume(comes)
    behind = engine.submit([*PROMPT, 2], LONG)
    for _ in range(WAITING_STEPS):
        step(engine)
    assert (comes.row, behind.row) == (None, None)
    bus.transfers[0].complete()
    step(engine)
    assert comes.row is not None
    finish(engine, bus, solo, llama, stays, comes, behind)


def test_while_nobody_has_a_row_a_copy_is_waited_for(
    llama: Any, make_engine: Make, solo: Solo, bus: SlowCopier
) -> None:
    """Nobody is held up: better than running idle."""
    engine = engine_on(bus, make_engine, llama, rows=2)
    query = running(engine, 0)
    engine.park(query)
    engine.resume(query)
    step(engine)
    assert query.row is not None
    assert bus.waited == 1
    finish(engine, bus, solo, llama, query)


def test_several_copies_are_under_way_as_far_as_there_is_room(
    llama: Any, make_engine: Make, solo: Solo, bus: SlowCopier, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_on(bus, make_engine, llama, rows=4)
    queries = [running(engine, place) for place in range(4)]
    for query in queries[1:]:
        engine.park(query)
    step(engine)
    sizes = [engine.residency.store.parked_bytes(query.query_id) for query in queries[1:]]
    monkeypatch.setattr(arriving, "MOST_BYTES", sum(sizes[:2]))
    for query in queries[1:]:
        engine.resume(query)
    step(engine)
    assert len(bus.transfers) == 2
    bus.transfers[1].complete()
    step(engine)
    assert [query.row is not None for query in queries[1:]] == [False, True, False]
    step(engine)
    assert len(bus.transfers) == 3
    assert bus.waited == 0
    finish(engine, bus, solo, llama, *queries)


def test_who_may_get_a_row_gives_way_to_whose_row_is_due(
    llama: Any, make_engine: Make, bus: SlowCopier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3: copies begun on a guess leave their room to those that are wanted now."""
    monkeypatch.setattr(arriving, "MOST_BYTES", 1)
    engine = engine_on(bus, make_engine, llama, rows=3)
    due, likely, other = (running(engine, place) for place in range(3))
    for query in (due, likely, other):
        engine.park(query)
    residency = engine.residency
    residency.bring([], [likely])
    assert (residency.landed(likely), residency.arriving) == (False, False)
    residency.bring([], [likely, other])
    assert len(bus.transfers) == 1
    residency.bring([due], [likely])
    engine.check_integrity()
    assert len(bus.transfers) == 2
    assert residency.arriving
    assert residency.store.stats.aborted == 1
    assert not residency.landed(likely), "it waits for room, nobody for it"


def test_a_copy_whose_memory_was_needed_is_waited_for_the_next_time(
    llama: Any, make_engine: Make, solo: Solo, bus: SlowCopier
) -> None:
    """M6: beside others that run short of memory again and again it would never come."""
    engine = engine_on(bus, make_engine, llama, rows=2)
    stays, comes = running(engine, 0), running(engine, 1)
    engine.park(comes)
    step(engine)
    engine.resume(comes)
    step(engine)
    engine.residency.give_back()
    engine.check_integrity()
    step(engine)
    assert comes.row is not None
    assert engine.residency.store.stats.aborted == 1
    assert bus.transfers[1].waited == 1
    finish(engine, bus, solo, llama, stays, comes)


def test_cancelled_or_held_again_on_its_way(
    llama: Any, make_engine: Make, solo: Solo, bus: SlowCopier
) -> None:
    """C3, R9: what was begun is given up, and nothing is left of it once the copy is over."""
    engine = engine_on(bus, make_engine, llama, rows=3)
    stays, held, gone = (running(engine, place) for place in range(3))
    for query in (held, gone):
        engine.park(query)
    step(engine)
    for query in (held, gone):
        engine.resume(query)
    step(engine)
    engine.park(held)
    engine.cancel(gone)
    step(engine)
    assert engine.residency.store.owners == (held.query_id,)
    assert not engine.residency.arriving
    for transfer in bus.transfers:
        transfer.complete()
    engine.resume(held)
    finish(engine, bus, solo, llama, stays, held)
    assert engine.residency.store.pool.used_bytes == 0


@pytest.mark.parametrize("larger", [False, True])
def test_bytes_of_a_victim_that_stays_for_now_are_given_to_nobody(
    llama: Any, make_engine: Make, bus: SlowCopier, *, larger: bool
) -> None:
    """Whoever stands behind may have counted on what the victim has more than is needed: it waits a step."""
    engine = engine_on(bus, make_engine, llama, rows=3)
    late, behind = running(engine, 0), running(engine, 1)
    for query in (late, behind):
        engine.park(query)
    victim = engine.submit([*PROMPT, 2], SamplingParams(max_tokens=30 if larger else 12, ignore_eos=True))
    while victim.row is None:
        step(engine)
    for query in (late, behind):
        engine.resume(query)
    order = ParkOrder(victim.query_id, ParkMode.OFFLOAD, "kv_bytes", late.query_id)
    resumed = (late.query_id, behind.query_id)
    plan = Plan(park=(order,), resume=resumed, reasons=dict.fromkeys(resumed, "row_taken"))
    engine._roster.refresh()
    engine._rows.prepare(plan)
    bus.transfers[1].complete()
    engine._rows.run(plan)
    assert victim.row is not None
    assert late.row is None
    assert (behind.row is None) is larger


def test_half_a_prompt_is_brought_back_beside_the_decode(
    llama: Any, make_engine: Make, solo: Solo, bus: SlowCopier
) -> None:
    """R2: its next chunk waits for the first half, and the batch does not."""
    engine = engine_on(bus, make_engine, llama, rows=2, chunk_tokens=2)
    stays = running(engine, 0)
    prompt = [9, 8, 7, 6, 5, 4, 3, 2]
    comes = engine.submit(prompt, LONG)
    while comes.prefilled_tokens < 4:
        step(engine)
    engine.park(comes)
    step(engine)
    assert comes.on_host_tokens >= 4
    engine.resume(comes)
    before = len(stays.output_token_ids)
    for _ in range(WAITING_STEPS):
        step(engine)
        assert comes.prefill is None
    assert len(stays.output_token_ids) == before + WAITING_STEPS
    assert bus.waited == 0
    finish(engine, bus, solo, llama, stays, comes)


def talked(bus: SlowCopier, make_engine: Make, model: Any) -> tuple[LocalEngine, Query, list[int]]:
    """Somebody decodes, and a turn of a session has ended; returns the next one's prompt, too."""
    engine = engine_on(bus, make_engine, model, rows=2, session_bytes=1 << 20)
    stays = running(engine, 0)
    first = engine.submit(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True), session_id="chat")
    while first.live:
        step(engine)
    return engine, stays, [*PROMPT, *first.output_token_ids, 9]


def test_the_next_turn_of_a_session_holds_up_nobody(
    llama: Any, make_engine: Make, solo: Solo, bus: SlowCopier
) -> None:
    """Its prompt is computed when what was kept has come; others decode meanwhile."""
    engine, stays, turn = talked(bus, make_engine, llama)
    second = engine.submit(turn, LONG, session_id="chat")
    before = len(stays.output_token_ids)
    for _ in range(WAITING_STEPS):
        step(engine)
        assert second.prefill is None
    assert len(stays.output_token_ids) == before + WAITING_STEPS
    bus.transfers[0].complete()
    step(engine)
    assert second.output_token_ids
    assert bus.waited == 0
    finish(engine, bus, solo, llama, stays, second)
    assert second.cached_prompt_tokens > 0


def test_a_session_whose_memory_was_needed_is_waited_for_the_next_time(
    llama: Any, make_engine: Make, solo: Solo, bus: SlowCopier
) -> None:
    """M6."""
    engine, stays, turn = talked(bus, make_engine, llama)
    second = engine.submit(turn, LONG, session_id="chat")
    step(engine)
    engine.residency.give_back()
    engine.check_integrity()
    step(engine)
    assert second.output_token_ids
    assert bus.transfers[1].waited == 1
    finish(engine, bus, solo, llama, stays, second)
    assert second.cached_prompt_tokens > 0


def test_a_session_that_goes_while_it_comes_costs_computing_alone(
    llama: Any, make_engine: Make, solo: Solo, bus: SlowCopier
) -> None:
    """C3: evicted, or its turn cancelled; bytes are given back once the copy is over."""
    engine, stays, turn = talked(bus, make_engine, llama)
    for cancelled in (True, False):
        second = engine.submit(turn, LONG, session_id="chat")
        step(engine)
        assert second.prefill is None
        if cancelled:
            engine.cancel(second)
        else:
            engine.residency.sessions.clear()
        step(engine)
    assert second.output_token_ids
    finish(engine, bus, solo, llama, stays, second)
    assert second.cached_prompt_tokens == 0
