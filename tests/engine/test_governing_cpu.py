"""M8 on a CPU, where parked KV lies in the memory that rows want: none is parked for those before it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from batond.daemon.engine.governing import Governing
from batond.daemon.memory.governor import Governor, OwnUse
from batond.daemon.memory.readings import MemoryReading
from batond.daemon.memory.use import ArenaUse
from batond.daemon.wire.messages import GovernorState

GIB = 1 << 30
TOTAL = 64 * GIB
ROW = GIB  # All queries are as long.
STANDING = 2 * GIB  # The model.


@dataclass
class Host:
    """A host's memory with a neighbour, and an engine of rows of 1 GiB that parks into the same memory.

    Attributes:
        rows: Queries in rows.
        parked: Queries in the host pool.
        waiting: Queries that hold nothing yet.
        others: Bytes of the neighbour.
    """

    rows: int = 0
    parked: int = 0
    waiting: int = 40
    others: int = 0
    now_s: float = 100.0
    parks: int = 0
    name: str = "a host"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        self.governing = Governing(
            self, Governor(), threaded=False, own_use=self.own_use, clock=lambda: self.now_s
        )
        batch: Any = Batch(self)
        self.governing.attach(batch, ROW, lambda: self.parked * ROW)

    @property
    def used(self) -> int:
        return STANDING + (self.rows + self.parked) * ROW + self.others

    def own_use(self, _: Any) -> OwnUse:
        return OwnUse(self.rows * ROW, outside_bytes=STANDING + self.parked * ROW)

    def read(self) -> MemoryReading:
        return MemoryReading(TOTAL, TOTAL - self.used, self.now_s)

    def close(self) -> None: ...

    def step(self) -> GovernorState:
        """Obey the limits as the planner does: over the budget rows are parked, within it they come back."""
        self.now_s += 0.3
        limits = self.governing.limits(self.rows, lambda: ROW if self.rows else 0, self.rows * ROW)
        assert limits is not None
        assert limits.kv_budget_bytes is not None
        while self.rows * ROW > limits.kv_budget_bytes:
            self.rows, self.parked, self.parks = self.rows - 1, self.parked + 1, self.parks + 1
        while (self.rows + 1) * ROW <= max(limits.kv_budget_bytes, 0 if self.rows else ROW):
            if self.rows >= limits.rows or not (self.parked or self.waiting):
                break
            self.rows += 1
            if self.parked:
                self.parked -= 1
            else:
                self.waiting -= 1
        return limits.state

    def neighbour(self, wants: int) -> None:
        self.others = min(wants, TOTAL - (self.used - self.others))


@dataclass
class Batch:
    """Of a host."""

    host: Host
    rows: int = 64
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def memory(self) -> ArenaUse:
        return ArenaUse(self.host.rows * ROW, 0, TOTAL, elastic=True)


@pytest.mark.parametrize(("wants", "parks"), [(16, 1), (30, 7)])
def test_a_neighbour_comes_and_goes(wants: int, parks: int) -> None:
    """M8: rows make room for what the neighbour took, once; not for each other's parked KV."""
    host = Host()
    for _ in range(10):
        host.step()
    assert (host.rows, host.parked) == (40, 0)
    host.neighbour(wants * GIB)
    for _ in range(100):
        host.step()
    assert host.parks <= parks
    assert host.rows + host.parked == 40
    # Parking has freed nothing; queries that end do, and nobody takes their place before that is enough.
    host.waiting = 5
    for _ in range(10):
        host.rows -= 1
        host.step()
        assert host.waiting == 5 or host.used <= 0.92 * TOTAL
    assert host.used <= 0.92 * TOTAL
    held = host.rows + host.parked + host.waiting
    host.neighbour(0)
    for _ in range(100):
        host.step()
    assert (host.rows, host.parked, host.waiting) == (held, 0, 0)
    assert host.step() is GovernorState.STEADY
    assert host.parks <= parks


def test_what_is_parked_keeps_newcomers_out() -> None:
    """M8: rows and the pool together stay under high, however many wait."""
    host = Host(parked=20, waiting=0)
    host.governing.limits(0, lambda: 0)
    host.waiting = 60
    for _ in range(200):
        host.step()
        assert host.used <= 0.92 * TOTAL
    assert host.rows > 50, "the parked ones came back first, and left their room"


def test_a_spiral_of_parks_does_not_begin() -> None:
    """M8: with nothing left at all, and the pool as large as the rows, no step parks another row."""
    host = Host()
    for _ in range(10):
        host.step()
    host.neighbour(TOTAL)
    host.step()
    after = host.rows
    assert after == 33
    for _ in range(100):
        host.step()
    assert host.rows == after
