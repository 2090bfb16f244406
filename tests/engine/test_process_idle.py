"""What an engine process does while nothing is to be computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

from batond.daemon.engine import SamplingParams
from batond.daemon.engine.process import EngineProcess
from batond.daemon.scheduler.planner import PlannerLimits
from batond.daemon.wire.messages import Stop
from batond.offload.copies import InlineCopier

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.wire.messages import Command
    from batond.offload.copies import Transfer
    from batond.offload.pool import Reservation
    from batond.offload.slice import KVSlice

LONG = SamplingParams(max_tokens=20, ignore_eos=True)


class Late:
    """Copies to the host that are over when the test says so."""

    def __init__(self) -> None:
        self.over = False

    def done(self) -> bool:
        """Whether it has happened."""
        return self.over

    def wait(self) -> None:
        """Nobody waits for a slice that is not wanted any more."""
        raise AssertionError("an idle engine waited for a copy")


class LateCopier(InlineCopier):
    """Begins, and no more."""

    def __init__(self, transfer: Late) -> None:
        self._transfer = transfer

    def store(self, kv: KVSlice, reservation: Reservation) -> Transfer:
        """Begin."""
        return self._transfer


class Channel:
    """A front that says nothing until it says stop; meanwhile a copy comes to its end."""

    def __init__(self, transfer: Late) -> None:
        self._transfer = transfer
        self.polls = 0

    def poll(self, timeout_s: float) -> list[Command]:
        """What the front says; the engine is idle, and would wait for it."""
        assert timeout_s > 0
        self.polls += 1
        self._transfer.over = self.polls > 1
        return [Stop()] if self.polls > 2 else []

    def send(self, event: Any) -> None:
        """Take what it says."""


def test_an_engine_asks_the_channel_before_it_begins_a_step_ahead(
    llama: Any, make_engine: Callable[..., Any]
) -> None:
    """A command that has come is heard first."""
    engine = make_engine(llama, rows=1)
    channel = Mock()
    EngineProcess(engine, channel)
    for waits in (True, False):
        channel.waiting.return_value = waits
        assert engine.arrivals() is waits
    assert not channel.poll.called


def test_an_idle_engine_takes_in_what_copies_have_come_to(
    llama: Any, make_engine: Callable[..., Any]
) -> None:
    """M5: of a cancelled query's copy that ends when no step follows, the host memory comes back."""
    engine = make_engine(llama, rows=1, limits=PlannerLimits(quantum_tokens=1))
    transfer = Late()
    engine.residency.store._copier = LateCopier(transfer)
    query = engine.submit([5, 6, 7], LONG)
    while not query.output_token_ids:
        engine.step()
    engine.park(query)
    engine.cancel(query)
    assert not engine.busy
    pool = engine.residency.store.pool
    assert pool.used_bytes > 0, "the copy still writes there"
    channel: Any = Channel(transfer)
    EngineProcess(engine, channel).run()
    assert channel.polls == 3
    assert pool.used_bytes == 0
