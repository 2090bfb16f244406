"""Rows are given away before their bytes are on the host: nobody waits, and no token is ever another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from batond.daemon.engine import SamplingParams
from batond.daemon.engine.queries import outgoing
from batond.daemon.engine.queries.outgoing import MOST_UNDER_WAY
from batond.daemon.scheduler.planner import PlannerLimits
from batond.daemon.wire.messages import QueryState
from batond.offload.copies import InlineCopier
from batond.offload.errors import HostPoolFullError

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.engine import LocalEngine
    from batond.daemon.engine.queries.query import Query
    from batond.offload.copies import Transfer
    from batond.offload.pool import Reservation
    from batond.offload.slice import KVSlice

PROMPT = [5, 6, 7]
LONG = SamplingParams(max_tokens=20, ignore_eos=True)
SHORT = SamplingParams(max_tokens=3, ignore_eos=True)


class SlowTransfer:
    """A copy to the host that is over when the test says so, or when somebody waits for it."""

    def __init__(self, kv: KVSlice, reservation: Reservation, *, fails: bool) -> None:
        self.kv, self.reservation, self.fails = kv, reservation, fails
        self.over = False
        self.waited = 0

    def complete(self) -> None:
        """Let it happen."""
        if not self.over and not self.fails:
            InlineCopier().store(self.kv, self.reservation)
        self.over = True

    def done(self) -> bool:
        """Whether it has happened."""
        return self.over

    def wait(self) -> None:
        """Let it happen now."""
        self.waited += 1
        self.complete()
        if self.fails:
            raise RuntimeError("the bus is on fire")


class SlowCopier(InlineCopier):
    """Copies to the host take as long as the test wants."""

    def __init__(self) -> None:
        self.transfers: list[SlowTransfer] = []
        self.fails = False

    def store(self, kv: KVSlice, reservation: Reservation) -> Transfer:
        """Begin, and no more."""
        self.transfers.append(SlowTransfer(kv, reservation, fails=self.fails))
        return self.transfers[-1]


@pytest.fixture
def bus() -> SlowCopier:
    return SlowCopier()


def engine_on(bus: SlowCopier, make_engine: Callable[..., Any], model: Any, **kw: Any) -> LocalEngine:
    engine: LocalEngine = make_engine(model, limits=PlannerLimits(quantum_tokens=1), **kw)
    engine.residency.store._copier = bus
    return engine


def parked(
    engine: LocalEngine, urgent: SamplingParams = SHORT, *, checked: bool = True
) -> tuple[Query, Query]:
    """One row: the patient query gives it to the urgent one."""
    patient = engine.submit(PROMPT, LONG, sla_class="batch")
    for _ in range(4):
        engine.step()
    pressing = engine.submit([8, 9], urgent, sla_class="interactive")
    while pressing.row is None:
        assert engine.counters["steps"] < 30
        engine.step()
        if checked:
            engine.check_integrity()
    assert patient.state is QueryState.PARKED
    return patient, pressing


def finish(engine: LocalEngine) -> None:
    while engine.busy:
        engine.step()
        engine.check_integrity()


def test_the_urgent_one_runs_while_the_copy_is_under_way(
    llama: Any, make_engine: Callable[..., Any], solo: Callable[..., list[int]], bus: SlowCopier
) -> None:
    """R5: the row is there at once; it does not wait for the victim's bytes."""
    engine = engine_on(bus, make_engine, llama, rows=1)
    patient, pressing = parked(engine, SamplingParams(max_tokens=6, ignore_eos=True))
    engine.step()
    assert len(pressing.output_token_ids) >= 1
    (transfer,) = bus.transfers
    assert transfer.waited == 0
    transfer.complete()
    engine.step()
    assert engine.residency.store.stats.stores == 1
    finish(engine)
    assert transfer.waited <= 1  # The finish, once it was over.
    assert patient.output_token_ids == solo(llama, PROMPT, 20)
    assert engine.counters["resumes_from_device"] == 0


def test_who_comes_back_before_its_bytes_have_left_needs_no_copy(
    llama: Any, make_engine: Callable[..., Any], solo: Callable[..., list[int]], bus: SlowCopier
) -> None:
    engine = engine_on(bus, make_engine, llama, rows=1)
    patient, _ = parked(engine)
    finish(engine)
    assert patient.output_token_ids == solo(llama, PROMPT, 20)
    assert engine.counters["resumes_from_device"] == 1
    assert (engine.residency.store.stats.stores, engine.residency.store.stats.loads) == (0, 0)
    assert patient.recomputed_tokens == 0
    assert engine.residency.store.retiring_bytes > 0, "the copy still writes there"
    bus.transfers[0].complete()
    engine.residency.settle()
    assert engine.residency.store.pool.used_bytes == 0


def test_who_comes_back_to_a_full_device_and_a_full_pool_is_not_lost(
    llama: Any,
    make_engine: Callable[..., Any],
    solo: Callable[..., list[int]],
    bus: SlowCopier,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """M6: its bytes had not left; there is no memory for the row, nor does the host take them: they stay."""
    engine = engine_on(bus, make_engine, llama, rows=1)
    patient, _ = parked(engine)
    batch, store, refused = engine.residency.batch, engine.residency.store, 0
    embed, begin_store = batch.embed, store.begin_store

    def embed_later(row: int, kv: KVSlice) -> None:
        nonlocal refused
        if refused < 2 and kv.n_tokens > len(PROMPT):
            refused += 1
            monkeypatch.setattr(store, "begin_store", full)
            raise torch.OutOfMemoryError("full")
        monkeypatch.setattr(store, "begin_store", begin_store)
        embed(row, kv)

    def full(*_: Any) -> Any:
        raise HostPoolFullError("full")

    monkeypatch.setattr(batch, "embed", embed_later)
    finish(engine)
    assert refused == 2
    assert patient.output_token_ids == solo(llama, PROMPT, 20)
    assert patient.recomputed_tokens == 0


def test_who_comes_back_to_a_full_device_and_whose_copy_then_fails_is_computed_again(
    llama: Any,
    make_engine: Callable[..., Any],
    solo: Callable[..., list[int]],
    bus: SlowCopier,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """M6: between two tries of an embed all copies are waited for, its own among them."""
    engine = engine_on(bus, make_engine, llama, rows=1)
    patient, _ = parked(engine)
    embed, refused = engine.residency.batch.embed, 0

    def embed_later(row: int, kv: KVSlice) -> None:
        nonlocal refused
        if not refused and kv.n_tokens > len(PROMPT):
            refused += 1
            bus.fails = True
            raise torch.OutOfMemoryError("full")
        embed(row, kv)

    monkeypatch.setattr(engine.residency.batch, "embed", embed_later)
    finish(engine)
    assert refused
    assert patient.output_token_ids == solo(llama, PROMPT, 20)
    assert engine.counters["parks_lost"] == 1
    assert patient.recomputed_tokens > 0


def test_a_copy_that_fails_afterwards_costs_computing_and_no_token(
    llama: Any, make_engine: Callable[..., Any], solo: Callable[..., list[int]], bus: SlowCopier
) -> None:
    """The row is long given away: the query is computed again, as one whose host copy is damaged."""
    engine = engine_on(bus, make_engine, llama, rows=1)
    bus.fails = True
    patient, _ = parked(engine, SamplingParams(max_tokens=6, ignore_eos=True))
    bus.transfers[0].complete()
    finish(engine)
    assert engine.counters["parks_lost"] == 1
    assert patient.recomputed_tokens > 0
    assert patient.output_token_ids == solo(llama, PROMPT, 20)


def test_cancelled_while_its_copy_is_under_way(
    llama: Any, make_engine: Callable[..., Any], bus: SlowCopier
) -> None:
    """M5: nothing is left, and bytes are given back only when nobody writes there any more."""
    engine = engine_on(bus, make_engine, llama, rows=1)
    patient, _ = parked(engine)
    engine.cancel(patient)
    finish(engine)
    assert engine.residency.store.retiring_bytes > 0
    bus.transfers[0].complete()
    engine.residency.settle()
    assert engine.residency.store.pool.used_bytes == 0


@pytest.mark.parametrize(("most_bytes", "most"), [(0, MOST_UNDER_WAY), (1 << 20, 4)])
def test_slices_on_the_device_are_bounded(
    llama: Any,
    make_engine: Callable[..., Any],
    solo: Callable[..., list[int]],
    bus: SlowCopier,
    monkeypatch: pytest.MonkeyPatch,
    *,
    most_bytes: int,
    most: int,
) -> None:
    """A burst of urgent work parks many rows; so many slices beside the batch may not fit."""
    monkeypatch.setattr(outgoing, "MOST_BYTES", most_bytes)
    engine = engine_on(bus, make_engine, llama, rows=4)
    patient = [engine.submit([*PROMPT, place], LONG, sla_class="batch") for place in range(4)]
    for _ in range(8):
        engine.step()
    for place in range(4):
        engine.submit([8, 9, place], SamplingParams(max_tokens=12, ignore_eos=True), sla_class="interactive")
    while len(bus.transfers) < 4:
        assert engine.counters["steps"] < 40
        engine.step()
        engine.check_integrity()
        assert sum(not transfer.over for transfer in bus.transfers) <= most
    assert sum(not transfer.over for transfer in bus.transfers) == most
    finish(engine)
    assert [query.output_token_ids for query in patient] == [
        solo(llama, [*PROMPT, place], 20) for place in range(4)
    ]


def test_closed_while_copies_are_under_way(
    llama: Any, make_engine: Callable[..., Any], bus: SlowCopier
) -> None:
    engine = engine_on(bus, make_engine, llama, rows=1)
    parked(engine)
    engine.close()
    assert engine.residency.store.pool.used_bytes == 0


def test_a_session_is_there_for_the_next_turn_before_its_copy_is(
    llama: Any, make_engine: Callable[..., Any], solo: Callable[..., list[int]], bus: SlowCopier
) -> None:
    """The end of a turn holds nobody up, and the next one waits for its own slice alone."""
    engine = engine_on(bus, make_engine, llama, rows=1, session_bytes=1 << 20)
    first = engine.submit(PROMPT, SHORT, session_id="chat")
    finish(engine)
    (transfer,) = bus.transfers
    assert not transfer.over
    turn = [*PROMPT, *first.output_token_ids, 9]
    second = engine.submit(turn, SHORT, session_id="chat")
    finish(engine)
    assert transfer.over
    assert second.output_token_ids == solo(llama, turn, 3)
    assert second.cached_prompt_tokens > 0


def test_a_session_whose_copy_fails_is_as_good_as_none(
    llama: Any, make_engine: Callable[..., Any], solo: Callable[..., list[int]], bus: SlowCopier
) -> None:
    engine = engine_on(bus, make_engine, llama, rows=1, session_bytes=1 << 20)
    bus.fails = True
    first = engine.submit(PROMPT, SHORT, session_id="chat")
    finish(engine)
    turn = [*PROMPT, *first.output_token_ids, 9]
    second = engine.submit(turn, SHORT, session_id="chat")
    finish(engine)
    assert second.output_token_ids == solo(llama, turn, 3)
    assert second.cached_prompt_tokens == 0


def test_a_park_gets_the_room_of_a_session_that_is_still_being_copied(
    llama: Any, make_engine: Callable[..., Any], solo: Callable[..., list[int]], bus: SlowCopier
) -> None:
    """R9: idle sessions make room at once, also one whose bytes are still written: nothing is recomputed."""
    engine = engine_on(bus, make_engine, llama, rows=1, session_bytes=1 << 20)
    engine.submit([4, 4, *PROMPT], SHORT, session_id="chat")
    finish(engine)
    pool = engine.residency.store.pool
    taken = pool.reserve(pool.free_bytes)  # The session has all that is left.
    try:
        patient, _ = parked(engine, checked=False)  # The pool has bytes that are nobody's.
        assert engine.counters["sessions_evicted"] == 1
        assert engine.counters["parks_dropped"] == 0
        engine.run_until_idle()
    finally:
        pool.release(taken)
    engine.check_integrity()
    assert patient.recomputed_tokens == 0
    assert patient.output_token_ids == solo(llama, PROMPT, 20)


def test_slices_under_way_give_way_on_the_device(
    llama: Any, make_engine: Callable[..., Any], bus: SlowCopier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M6: no room for another slice beside the batch: those that leave it leave first."""
    engine = engine_on(bus, make_engine, llama, rows=1)
    patient, _ = parked(engine, SamplingParams(max_tokens=8, ignore_eos=True))
    batch, extract, refused = engine.residency.batch, engine.residency.batch.extract, []

    def tight(row: int) -> KVSlice:
        if not bus.transfers[0].over:
            refused.append(row)
            raise torch.OutOfMemoryError
        return extract(row)

    monkeypatch.setattr(batch, "extract", tight)
    engine.park(next(query for query in engine.queries.values() if query.row is not None))
    assert refused
    assert bus.transfers[0].over
    assert engine.residency.store.stats.stores == 1
    assert engine.residency.store.parked_bytes(patient.query_id) > 0
