"""Random lives of an arena against a model of which columns are whose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from batond.daemon.engine.batch.arenas.arena import ArenaShape
from batond.daemon.engine.batch.arenas.card import CardArena
from batond.daemon.engine.batch.arenas.driver import DriverError
from batond.daemon.engine.batch.arenas.host import HostArena

SHAPE = ArenaShape(rows=3, capacity=40, record_bytes=1000)
ROWS = st.integers(0, SHAPE.rows - 1)
COLUMNS = st.integers(0, SHAPE.capacity - 1)


class Machine(RuleBasedStateMachine):
    """Commits, releases, trims; on a card with a driver that is busy or says no now and then."""

    driver: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.arena = self.new_arena()
        self.owned: list[dict[int, int]] = [{} for _ in range(SHAPE.rows)]  # What was written, by column.
        self.writes = 0

    def new_arena(self) -> Any:
        return HostArena(SHAPE)

    @rule(row=ROWS, first=COLUMNS, count=st.integers(1, 20))
    def commit(self, row: int, first: int, count: int) -> None:
        last = min(first + count, SHAPE.capacity)
        before = self.arena.use.committed_bytes
        try:
            behind = self.arena.commit(row, first, last)
        except (torch.OutOfMemoryError, DriverError):
            assert self.arena.use.committed_bytes == before
            return
        self.writes += 1
        for column in range(first, last + behind):
            self.owned[row][column] = self.writes % 250 + 1
        self.arena.tensor[row, first : last + behind] = self.writes % 250 + 1

    @rule(row=ROWS)
    def release(self, row: int) -> None:
        self.arena.release(row, [(column, column + 1) for column in self.owned[row]])
        self.owned[row].clear()
        assert self.arena.row_bytes(row) == 0

    @rule(row=ROWS, column=COLUMNS)
    def expect(self, row: int, column: int) -> None:
        self.arena.expect(row, column)

    @rule(keep=st.integers(0, 40000))
    def trim(self, keep: int) -> None:
        pooled = self.arena.use.pooled_bytes
        given = self.arena.trim(keep)
        assert self.arena.use.pooled_bytes == pooled - given
        assert self.arena.use.pooled_bytes <= keep

    @invariant()
    def what_is_owned_is_there(self) -> None:
        self.arena.check_integrity()
        live = 0
        for row, columns in enumerate(self.owned):
            for column, value in columns.items():
                assert self.arena.holds(row, column, column + 1)
                assert int(self.arena.tensor[row, column, 0]) == value
                assert int(self.arena.tensor[row, column, -1]) == value
            live += len(columns) * SHAPE.record_bytes
            assert bool(self.arena.row_bytes(row)) == bool(columns)
        assert live <= self.arena.use.committed_bytes <= self.arena.use.reserved_bytes

    def teardown(self) -> None:
        self.arena.close()


class CardMachine(Machine):
    """On a driver that is full at half of what the rows could hold, and fails on cue."""

    make_driver: Any

    def new_arena(self) -> Any:
        self.driver = self.make_driver(card_bytes=16 * 4096)
        return CardArena(SHAPE, self.driver, background=False)

    @rule(busy=st.booleans())
    def work(self, busy: bool) -> None:  # noqa: FBT001 - drawn by name
        self.driver.busy = busy
        if not busy:
            self.driver.finish()

    @rule(call=st.sampled_from(["create", "map", "set_access"]), after=st.integers(0, 3), full=st.booleans())
    def fail(self, call: str, after: int, full: bool) -> None:  # noqa: FBT001 - drawn by name
        self.driver.cue(call, torch.OutOfMemoryError() if full else DriverError(), after=after)

    @invariant()
    def memory_is_accounted_for(self) -> None:
        use = self.arena.use
        assert self.driver.used_bytes == use.committed_bytes + use.pooled_bytes
        assert self.driver.stray_bytes() == 0


@pytest.mark.parametrize("kind", [Machine, CardMachine])
def test_any_life_of_an_arena(kind: type[Machine], fake_driver: Any) -> None:
    """M5: commits, releases and trims in any order, with a driver that fails."""
    CardMachine.make_driver = fake_driver
    run_state_machine_as_test(kind, settings=settings(max_examples=25, stateful_step_count=25, deadline=None))
