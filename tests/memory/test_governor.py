"""The governor's decisions: what holds for all memories, neighbours and histories."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batond.daemon.memory.governor import (
    GROW_AFTER_S,
    GROW_EVERY_S,
    GROW_FRACTION,
    PEAK_WINDOW_S,
    Demand,
    Governor,
    MemoryLimits,
    OwnUse,
    Watermarks,
    other_bytes,
)
from batond.daemon.memory.readings import MemoryReading
from batond.daemon.wire.messages import GovernorState

if TYPE_CHECKING:
    from collections.abc import Sequence

GIB = 1 << 30
TOTAL = 100 * GIB
TICK_S = 0.05
IDLE = Demand(rows=8)


class Memory:
    """A memory with neighbours and one governed batch, which takes what it is given."""

    def __init__(self, governor: Governor | None = None, *, total_bytes: int = TOTAL) -> None:
        self.governor = governor or Governor()
        self.total_bytes = total_bytes
        self.others_bytes = 0
        self.own = OwnUse(outside_bytes=10 * GIB, context_bytes=GIB // 2)
        self.demand = IDLE
        self.now_s = 1000.0

    @property
    def free_bytes(self) -> int:
        return max(0, self.total_bytes - self.others_bytes - self.own.total_bytes)

    def tick(self, *, lost: bool = False) -> MemoryLimits:
        self.now_s += TICK_S
        reading = None if lost else MemoryReading(self.total_bytes, self.free_bytes, self.now_s)
        return self.governor.decide(reading, self.own, self.demand, self.now_s, "lost" if lost else "")

    def settle(self, ticks: int = 400) -> MemoryLimits:
        return [self.tick() for _ in range(ticks)][-1]

    def neighbours_want(self, nbytes: int) -> None:
        """They give back at once, and take no more than there is."""
        self.others_bytes = min(nbytes, self.others_bytes + self.free_bytes)

    def fill(self, nbytes: int) -> None:
        self.own = replace(self.own, committed_bytes=nbytes)


def budget(limits: MemoryLimits) -> int:
    assert limits.kv_budget_bytes is not None
    return limits.kv_budget_bytes


# -- arithmetic -------------------------------------------------------------------------------------------


def test_others_use_is_what_is_left() -> None:
    """M9: no process is asked for: what is neither free nor ours is others', driver and all."""
    own = OwnUse(committed_bytes=20, pooled_bytes=5, outside_bytes=7, context_bytes=1, parked_bytes=3)
    assert own.total_bytes == 36
    assert other_bytes(MemoryReading(100, 30, 0.0), own) == 34
    assert other_bytes(MemoryReading(100, 90, 0.0), own) == 0, "never below nothing"


def test_the_budget_is_what_fits_under_the_mark_beside_everything_else() -> None:
    memory = Memory()
    memory.others_bytes = 20 * GIB
    first = memory.tick()
    assert budget(first) == int(0.87 * TOTAL) - 20 * GIB - 10 * GIB - GIB // 2
    assert (first.state, first.rows) == (GovernorState.STEADY, 8)
    memory.fill(budget(first))
    assert memory.total_bytes - memory.free_bytes == int(0.87 * TOTAL), "taken in full it is at low"
    assert memory.settle() == replace(first, keep_pooled_bytes=0)


def test_our_own_load_does_not_move_the_budget() -> None:
    memory = Memory()
    first = budget(memory.tick())
    for nbytes in (0, 30 * GIB, 70 * GIB, 5 * GIB):
        memory.fill(nbytes)
        assert budget(memory.settle(10)) == first


def test_reserve_is_learned_from_peaks_and_forgotten() -> None:
    memory = Memory()
    before = budget(memory.tick())
    memory.own = replace(memory.own, outside_bytes=18 * GIB)
    low = budget(memory.tick())
    assert low < before
    memory.own = replace(memory.own, outside_bytes=10 * GIB)
    assert budget(memory.settle()) <= before - 4 * GIB, "the next prompt may need as much"
    memory.now_s += PEAK_WINDOW_S
    memory.tick()
    memory.now_s += PEAK_WINDOW_S
    assert budget(memory.settle()) == before


def test_a_configured_reserve_is_kept_over_what_stands() -> None:
    memory = Memory(Governor(Watermarks(reserve_bytes=8 * GIB)))
    first = budget(memory.tick())
    assert first == int(0.87 * TOTAL) - 18 * GIB - GIB // 2
    memory.own = replace(memory.own, outside_bytes=18 * GIB)
    assert budget(memory.settle()) == first, "that is what it was kept for"
    memory.own = replace(memory.own, outside_bytes=30 * GIB)
    assert budget(memory.settle()) < first


def test_pages_that_no_token_fills_are_not_promised_again() -> None:
    """M8: tokens take pages: a batch that fills its budget is under high all the same."""
    memory = Memory()
    first = budget(memory.tick())
    memory.own = replace(memory.own, committed_bytes=first + 8 * GIB, slack_bytes=8 * GIB)
    for _ in range(2):
        limits = memory.tick()
    assert limits.state is GovernorState.SHRINKING
    memory.own = replace(memory.own, committed_bytes=budget(limits) + 8 * GIB)
    assert memory.total_bytes - memory.free_bytes <= 0.92 * TOTAL
    memory = Memory()
    memory.tick()
    memory.own = replace(memory.own, committed_bytes=8 * GIB, slack_bytes=8 * GIB)
    assert budget(memory.tick()) == first, "a row that is being embedded"


# -- reactions --------------------------------------------------------------------------------------------


def test_above_high_one_decision_brings_free_memory_back() -> None:
    """M8: not step by step: the neighbour's memory is there as soon as the batch obeys."""
    memory = Memory()
    memory.fill(budget(memory.tick()))
    memory.neighbours_want(12 * GIB)
    limits = memory.tick()
    assert limits.state is GovernorState.CRITICAL
    memory.fill(budget(limits))
    assert memory.total_bytes - memory.free_bytes <= 0.92 * TOTAL
    assert memory.settle(10).kv_budget_bytes == limits.kv_budget_bytes, "and nothing more is asked"


def test_a_neighbour_gets_what_it_wants_step_by_step() -> None:
    """M8: 60 % of the memory, although hardly any was free when it came."""
    memory = Memory()
    memory.fill(budget(memory.tick()))
    for _ in range(40):
        memory.neighbours_want(60 * GIB)
        memory.fill(budget(memory.tick()))
    assert memory.others_bytes == 60 * GIB
    assert 0.87 * TOTAL <= memory.total_bytes - memory.free_bytes <= 0.92 * TOTAL


def test_pools_go_first_and_at_once() -> None:
    memory = Memory()
    memory.tick()
    memory.own = replace(memory.own, committed_bytes=10 * GIB, pooled_bytes=65 * GIB)
    limits = memory.tick()
    assert budget(limits) - 10 * GIB == limits.keep_pooled_bytes, "over the budget, but not over high"
    memory.others_bytes = 10 * GIB
    limits = memory.tick()
    assert limits.state is GovernorState.SHRINKING
    assert limits.keep_pooled_bytes == 0
    assert budget(limits) > 10 * GIB, "nobody is parked for it"


def test_nothing_new_begins_while_it_is_critical() -> None:
    memory = Memory()
    memory.fill(40 * GIB)
    memory.demand = Demand(rows=8, running=3)
    memory.others_bytes = 48 * GIB
    limits = memory.tick()
    assert (limits.state, limits.rows, limits.keep_pooled_bytes) == (GovernorState.CRITICAL, 3, 0)
    assert "48.0 GiB by others" in limits.reason
    memory.fill(30 * GIB)
    assert memory.tick().rows == 8


def test_it_grows_in_bounded_steps_and_not_at_once() -> None:
    """M8: a neighbour that saws is not followed."""
    memory = Memory()
    full = budget(memory.tick())
    memory.others_bytes = 60 * GIB
    low = budget(memory.tick())
    lowered_s = memory.now_s
    memory.others_bytes = 0
    seen = [low]
    while budget(limits := memory.tick()) == low:
        assert limits.state is GovernorState.GROWING
    assert memory.now_s - lowered_s >= GROW_AFTER_S
    last_s = memory.now_s
    seen.append(budget(limits))
    for _ in range(400):
        now = budget(memory.tick())
        if now != seen[-1]:
            assert 0 < now - seen[-1] <= TOTAL * GROW_FRACTION
            assert memory.now_s - last_s >= GROW_EVERY_S - 1e-9
            last_s = memory.now_s
            seen.append(now)
    assert seen[-1] == full
    assert memory.tick().state is GovernorState.STEADY
    steps = -(-(full - low) // int(TOTAL * GROW_FRACTION))
    assert len(seen) - 1 <= steps + 1, "back within seconds"


def test_without_readings_limits_are_held_and_never_raised() -> None:
    """M9: shrink-only."""
    memory = Memory()
    memory.others_bytes = 60 * GIB
    held = budget(memory.tick())
    memory.others_bytes = 0
    for _ in range(200):
        limits = memory.tick(lost=True)
        assert (limits.state, budget(limits), limits.rows) == (GovernorState.LOST, held, 8)
    assert "limits are held" in limits.reason
    memory.own = replace(memory.own, outside_bytes=25 * GIB)
    less = budget(memory.tick(lost=True))
    assert less < held, "our own growth counts, blind or not"
    memory.own = replace(memory.own, outside_bytes=10 * GIB)
    assert budget(memory.tick(lost=True)) == less
    assert memory.settle().state is GovernorState.STEADY


def test_who_finds_no_memory_while_blind_lowers_the_limits() -> None:
    """M6, M9: others have taken what the last reading had seen; the batch may hold a step less than now."""
    memory = Memory()
    memory.demand = replace(IDLE, shortages=3)
    held = budget(memory.tick())
    assert budget(memory.tick(lost=True)) == held, "what was short before counts for nothing"
    memory.own = replace(memory.own, committed_bytes=20 * GIB, slack_bytes=GIB)
    memory.demand = replace(memory.demand, shortages=4)
    limits = memory.tick(lost=True)
    less = 19 * GIB - int(TOTAL * GROW_FRACTION)
    assert (limits.state, budget(limits)) == (GovernorState.LOST, less)
    assert "no memory was found" in limits.reason
    assert budget(memory.tick(lost=True)) == less
    memory.demand = replace(memory.demand, shortages=5, least_bytes=GIB)
    memory.own = replace(memory.own, committed_bytes=GIB, slack_bytes=0)
    assert budget(memory.tick(lost=True)) == GIB, "one query goes on"
    memory.demand = replace(memory.demand, shortages=6)
    assert budget(memory.settle()) > less, "readings know better"


def test_before_the_first_reading_nothing_more_begins() -> None:
    memory = Memory()
    memory.demand = Demand(rows=8, running=2)
    limits = memory.tick(lost=True)
    assert (limits.state, limits.rows, limits.kv_budget_bytes) == (GovernorState.LOST, 2, None)
    memory.demand = IDLE
    assert memory.tick(lost=True).rows == 1


def test_a_memory_that_becomes_smaller_is_followed() -> None:
    """A control group's limit may be changed while the engine runs."""
    memory = Memory()
    memory.tick()
    memory.total_bytes = 50 * GIB
    assert budget(memory.tick()) < 50 * GIB - 10 * GIB
    memory.total_bytes = TOTAL
    assert budget(memory.settle()) == int(0.87 * TOTAL) - 10 * GIB - GIB // 2


def test_watermarks_out_of_order_are_refused() -> None:
    for marks in ({"low": 0.95}, {"high": 0.98}, {"critical": 1.01}, {"low": 0.0}, {"reserve_bytes": -1}):
        with pytest.raises(ValueError, match=r"watermarks|reserve"):
            Watermarks(**marks)  # type: ignore[arg-type]


# -- what holds for all -----------------------------------------------------------------------------------

sizes = st.integers(0, 120 * GIB)
uses = st.builds(OwnUse, sizes, sizes, sizes, st.integers(0, GIB))
demands = st.builds(Demand, sizes, st.integers(1, 64), st.integers(0, 64))


@given(
    others=st.lists(sizes, max_size=6),
    own=uses,
    demand=demands,
    more=st.integers(0, 100 * GIB),
    low=st.floats(0.01, 0.9),
)
@settings(max_examples=80, deadline=None)
def test_more_use_by_others_never_yields_more(
    others: list[int], own: OwnUse, demand: Demand, more: int, low: float
) -> None:
    """M8: whatever happened before, the one with the hungrier neighbour now gets no more."""
    marks = Watermarks(low=low, high=low + 0.05, critical=0.97)
    outcomes = []
    for extra in (0, more):
        governor, now_s = Governor(marks), 0.0
        for free in (max(0, TOTAL - used - own.total_bytes) for used in others):
            now_s += 0.7
            governor.decide(MemoryReading(TOTAL, free, now_s), own, demand, now_s)
        last = max(0, TOTAL - (others[-1] if others else 0) - own.total_bytes - extra)
        outcomes.append(governor.decide(MemoryReading(TOTAL, last, now_s + 0.7), own, demand, now_s + 0.7))
    mild, hungry = outcomes
    assert budget(hungry) <= budget(mild)
    assert hungry.rows <= mild.rows


@given(history=st.lists(st.tuples(sizes, uses), max_size=8), others=sizes, own=uses, demand=demands)
@settings(max_examples=80, deadline=None)
def test_it_never_oscillates_on_constant_input(
    history: Sequence[tuple[int, OwnUse]], others: int, own: OwnUse, demand: Demand
) -> None:
    """M8: hysteresis: it moves one way, comes to rest, and then stays."""
    memory = Memory()
    memory.demand = demand
    for memory.others_bytes, memory.own in history:
        memory.tick()
    memory.others_bytes, memory.own = others, own
    seen = [budget(memory.tick()) for _ in range(int(10 / TICK_S))]
    rises = [after > before for before, after in itertools.pairwise(seen) if after != before]
    assert len(set(rises)) <= 1, "up or down, not both"
    assert not any(after != seen[-1] for after in seen[-40:])
    states = {memory.tick().state for _ in range(20)}
    assert len(states) == 1
    assert GovernorState.GROWING not in states


@given(
    readings=st.lists(
        st.tuples(st.one_of(st.none(), st.tuples(st.integers(1, TOTAL), st.floats(0, 1))), uses, demands),
        min_size=1,
        max_size=12,
    )
)
@settings(max_examples=80, deadline=None)
def test_one_query_always_fits(
    readings: list[tuple[tuple[int, float] | None, OwnUse, Demand]],
) -> None:
    """M8: whatever is read, lost or odd: a row and one query's bytes are left, and no rows beyond all."""
    governor, now_s = Governor(), 0.0
    for reading, own, demand in readings:
        now_s += 0.1
        total, part = reading or (1, 0.0)
        real = MemoryReading(total, int(total * part), now_s) if reading else None
        limits = governor.decide(real, own, demand, now_s)
        assert 1 <= limits.rows <= max(demand.rows, demand.running)
        assert limits.kv_budget_bytes is None or limits.kv_budget_bytes >= demand.least_bytes
        assert limits.keep_pooled_bytes is None or limits.keep_pooled_bytes >= 0
        assert limits.reason


@given(steps=st.lists(st.integers(0, 80 * GIB), min_size=1, max_size=8), load=st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_an_obedient_batch_is_under_high_after_each_decision(steps: list[int], load: float) -> None:
    """M8: whatever neighbours do, one decision and its execution later free memory is back over high."""
    memory = Memory()
    memory.fill(int(budget(memory.tick()) * load))
    for wanted in steps:
        memory.neighbours_want(wanted)
        limits = memory.tick()
        memory.fill(min(memory.own.committed_bytes, budget(limits)))
        used = memory.total_bytes - memory.free_bytes
        alone = used - memory.own.committed_bytes
        assert used <= 0.92 * TOTAL or (memory.own.committed_bytes == 0 and alone > 0.92 * TOTAL)
        assert budget(memory.tick()) == budget(limits)
        memory.fill(int(budget(memory.tick()) * load))
