"""Copies to the device that nobody waits for any more keep neither its memory nor the host's room."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from batond.daemon.engine import SamplingParams
from batond.daemon.scheduler.planner import PlannerLimits
from batond.offload.copies import InlineCopier

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.engine import LocalEngine
    from batond.daemon.engine.queries.query import Query
    from batond.offload.copies import Transfer
    from batond.offload.pool import Reservation
    from batond.offload.slice import KVSlice

    Make = Callable[..., LocalEngine]

PROMPT = [5, 6, 7, 8]
RECORD_BYTES = 384
LONG = SamplingParams(max_tokens=40, ignore_eos=True)
SHORT = SamplingParams(max_tokens=5, ignore_eos=True)


class SlowTransfer:
    """A copy to the device that is over when somebody waits for it."""

    over = False

    def done(self) -> bool:
        """Whether somebody has waited."""
        return self.over

    def wait(self) -> None:
        """It is over now."""
        self.over = True


class SlowCopier(InlineCopier):
    """Copies to the device end when they must."""

    def __init__(self) -> None:
        self.transfers: list[SlowTransfer] = []

    def load(self, reservation: Reservation, kv: KVSlice) -> Transfer:
        """Do it, and say that it takes longer."""
        super().load(reservation, kv)
        self.transfers.append(SlowTransfer())
        return self.transfers[-1]


@pytest.fixture
def bus() -> SlowCopier:
    return SlowCopier()


def engine_on(bus: SlowCopier, make_engine: Make, model: Any, **kw: Any) -> LocalEngine:
    engine = make_engine(model, rows=2, limits=PlannerLimits(quantum_tokens=1), **kw)
    engine.residency.store._copier = bus
    return engine


def running(engine: LocalEngine, place: int) -> Query:
    """One more query that decodes."""
    query = engine.submit([*PROMPT, place], LONG)
    while query.row is None or len(query.output_token_ids) < 2:
        engine.step()
    return query


def talked(engine: LocalEngine, session_id: str) -> list[int]:
    """A turn of a session has ended; returns the next one's prompt."""
    first = engine.submit([*PROMPT, *session_id.encode()], SHORT, session_id=session_id)
    while first.live:
        engine.step()
    return [*first.prompt_token_ids, *first.output_token_ids, 9]


def test_an_idle_engine_gives_up_who_is_held_again(llama: Any, make_engine: Make, bus: SlowCopier) -> None:
    """R9: else its slice would lie on the card as long as nobody comes."""
    engine = engine_on(bus, make_engine, llama)
    gone, held = running(engine, 0), running(engine, 1)
    engine.park(held)
    engine.step()
    engine.resume(held)
    engine.step()
    engine.park(held)
    engine.cancel(gone)
    bus.transfers[0].wait()
    assert not engine.busy
    engine.tend()
    engine.check_integrity()
    assert held.query_id not in engine.residency._arriving
    assert not engine.residency.store._copying


@pytest.mark.parametrize("short", [False, True])
def test_an_idle_engine_gives_up_sessions_whose_turn_is_gone(
    llama: Any, make_engine: Make, bus: SlowCopier, *, short: bool
) -> None:
    """C3: nothing comes any more; nor is what ran out of memory then remembered for the next turn."""
    engine = engine_on(bus, make_engine, llama, session_bytes=1 << 20)
    other = running(engine, 0)
    turn = engine.submit(talked(engine, "chat"), LONG, session_id="chat")
    engine.step()
    if short:
        engine.residency.give_back()
    engine.cancel(turn)
    engine.cancel(other)
    bus.transfers[0].wait()
    assert not engine.busy
    engine.tend()
    engine.check_integrity()
    sessions = engine.residency.sessions
    assert sessions.count == 1
    assert not sessions._coming
    assert not sessions._given_up
    assert not engine.residency.store._copying


@pytest.mark.parametrize("aborted", [False, True])
def test_a_park_has_the_room_of_a_session_that_is_being_read(
    llama: Any, make_engine: Make, bus: SlowCopier, *, aborted: bool
) -> None:
    """R9: one evicted session is room enough, though a copy reads it; the other stays, and no KV is lost."""
    engine = engine_on(
        bus, make_engine, llama, host_pool_bytes=26 * RECORD_BYTES, session_bytes=26 * RECORD_BYTES
    )
    stays = running(engine, 1)
    turns = {name: talked(engine, name) for name in "ab"}
    residency = engine.residency
    while (
        residency.batch.layout.nbytes(residency.batch.lengths[stays.row or 0]) <= residency.store.room_bytes
    ):
        engine.step()
    for name, turn in turns.items():
        engine.submit(turn, LONG, session_id=name)
    engine.step()
    assert residency.sessions.count == len(residency.sessions._coming) == 2
    if aborted:
        residency.give_back()
    engine.park(stays)
    engine.check_integrity()
    assert stays.on_host_tokens > 0
    assert engine.counters["parks_dropped"] == 0
    assert residency.sessions.count == 1
