"""Decides how much of a memory the batch may take. Pure: told the time and what is there, it answers.

    0                                                        low       high   critical  total
    | other processes | own, not KV | KV of the batch          .  band   :        !        |
                      |  (weights)  |<-- kv_budget_bytes ----->|         |<-- left free -->|

*Used* is everything that is not free: other processes, this one, and what the driver keeps. Others' use is
not asked for by process, it is what is left: `other = total - free - own`. That works in containers and where
process ids are hidden, and puts to others whatever nobody can be blamed for.

The budget is what KV may take so that used stays under a watermark when all of it is taken: so it follows
others' use, not our own load. What it is depends on the watermark, and the band between the two keeps it
from sawing:

- over the budget at *high*: it is lowered at once, to the middle of the band.
- under the budget at *low*: it is raised to that, in bounded steps and not soon after it was lowered.
- between: it stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from batond.daemon.wire.messages import GovernorState

if TYPE_CHECKING:
    from batond.daemon.memory.readings import MemoryReading

#: A raise is at most this part of the memory, and at most so often.
GROW_FRACTION: Final = 1 / 16
GROW_EVERY_S: Final = 0.25
#: After it was lowered, the budget is not raised for so long: who took memory once may well take more.
GROW_AFTER_S: Final = 1.0
#: A peak of what is not KV is remembered for one to two of these.
PEAK_WINDOW_S: Final = 300.0

_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Parts of a memory that may be used, by whomever; 0 < low < high < critical <= 1.

    Attributes:
        low: Below this the budget is raised.
        high: Above this it is lowered.
        critical: Above this nothing new begins.
        reserve_bytes: Kept free beside them for what prompts need; None learns it from peaks.
    """

    low: float = 0.87
    high: float = 0.92
    critical: float = 0.97
    reserve_bytes: int | None = None

    def __post_init__(self) -> None:
        """Check the order.

        Raises:
            ValueError: They are not in order.
        """
        if not 0 < self.low < self.high < self.critical <= 1:
            raise ValueError(
                f"watermarks must be 0 < low < high < critical <= 1, not low {self.low}, high {self.high},"
                f" critical {self.critical}"
            )
        if self.reserve_bytes is not None and self.reserve_bytes < 0:
            raise ValueError(f"a reserve of {self.reserve_bytes} bytes makes no sense")


@dataclass(frozen=True, slots=True)
class OwnUse:
    """What this process holds of the memory, without counting anything twice.

    Attributes:
        committed_bytes: Physical memory behind rows' KV.
        pooled_bytes: Physical memory the arena keeps for the next rows and can give back at once.
        outside_bytes: What torch's allocator holds of the memory beside those: weights, prompts being
            computed, slices on their way, cached blocks. On a CPU the private resident memory beside them.
            Slices and prompts are KV of the budget as well: counted twice, which errs on the safe side.
        context_bytes: What a CUDA context takes and no allocator counts, measured once at the start; 0 on a
            CPU. Kernels that are loaded later count as others' use: a constant, so it does no harm.
        parked_bytes: KV in the host pool where that is the same memory, as on a CPU; 0 on a card.
        slack_bytes: Part of `committed_bytes` that no token has been written to: memory comes by the page,
            and the budget counts tokens. 0 where the batch could not give it back.
    """

    committed_bytes: int = 0
    pooled_bytes: int = 0
    outside_bytes: int = 0
    context_bytes: int = 0
    parked_bytes: int = 0
    slack_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of it."""
        in_arena = self.committed_bytes + self.pooled_bytes
        return in_arena + self.outside_bytes + self.context_bytes + self.parked_bytes


@dataclass(frozen=True, slots=True)
class Demand:
    """What the engine needs whatever memory says: one query always advances.

    Attributes:
        least_bytes: KV of the longest row after its next token; the budget never falls below. Who has no row
            yet is let in alone by the planner, whatever the budget is.
        rows: Rows of the batch.
        running: Rows in use.
        shortages: How often this process found no memory, counted from its start.
    """

    least_bytes: int = 0
    rows: int = 1
    running: int = 0
    shortages: int = 0


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """What the batch may take from now on.

    Attributes:
        rows: Rows that may be in use, 1 or more.
        kv_budget_bytes: KV that may be written or promised, slices on the device included; None is no bound.
        state: What the governor is at.
        reason: Why, in words.
        keep_pooled_bytes: Of what the arena has pooled, it may keep so much; None is all.
    """

    rows: int
    kv_budget_bytes: int | None
    state: GovernorState
    reason: str
    keep_pooled_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """Limits and what they were made from, for operators; sizes are those of the last reading.

    Attributes:
        limits: As of the last decision.
        total_bytes: All there is; 0 before the first reading.
        free_bytes: What any process could get.
        own: What this process holds.
        other_bytes: What is left: other processes, and what the driver keeps.
        readings_lost: How often readings were lost since the start.
    """

    limits: MemoryLimits
    total_bytes: int
    free_bytes: int
    own: OwnUse
    other_bytes: int
    readings_lost: int


def other_bytes(reading: MemoryReading, own: OwnUse) -> int:
    """Use of the memory that is not this process's; never below 0, whatever odd numbers say."""
    return max(0, reading.total_bytes - reading.free_bytes - own.total_bytes)


def beside_parked(budget_bytes: int, parked_bytes: int, taken_bytes: int, least_bytes: int) -> int:
    """What rows may take of a budget where parked KV lies in the same memory, as on a CPU.

    There, parking frees nothing. So parked KV keeps newcomers out, but pushes nobody else out: what is
    promised already stays, until others leave no room for it. A row parked for the parked ones before it
    would lower the budget again by as much as it gave, and so on to the last. Memory comes back as queries
    end, or as parked KV is spilled to files.

    Args:
        budget_bytes: For all KV.
        parked_bytes: In the host pool.
        taken_bytes: Written or promised now.
        least_bytes: Below which nothing would move.
    """
    return max(budget_bytes - parked_bytes, min(budget_bytes, taken_bytes), least_bytes)


class Governor:
    """Turns readings into limits; remembers the budget it set and the peaks it saw.

    Args:
        marks: Watermarks and reserve.
    """

    def __init__(self, marks: Watermarks = Watermarks()) -> None:
        self._marks = marks
        self._budget_bytes: int | None = None
        self._peak = _Peak(PEAK_WINDOW_S)
        self._lowered_s = self._raised_s = self._read_s = -1e9
        self._standing_bytes: int | None = None
        self._slack = (0, 0)  # Of the last two readings.
        self._total_bytes = self._other_bytes = 0  # As of the last reading.
        self._shortages = 0  # Of the last decision.

    @property
    def marks(self) -> Watermarks:
        """Watermarks and reserve."""
        return self._marks

    def presses(self, reading: MemoryReading) -> bool:
        """Whether others want what is not needed now, whatever is decided of the rest."""
        return reading.total_bytes - reading.free_bytes > self._marks.high * reading.total_bytes

    def decide(
        self, reading: MemoryReading | None, own: OwnUse, demand: Demand, now_s: float, trouble: str = ""
    ) -> MemoryLimits:
        """Set the limits.

        Args:
            reading: Of the memory; None where there is none.
            own: What this process held at the moment of the reading, or holds now if there is none.
            demand: What the engine needs in any case.
            now_s: Monotonic clock.
            trouble: Why there is no reading, in words.
        """
        struck, self._shortages = demand.shortages > self._shortages, demand.shortages
        if reading is None:
            return self._decide_blind(own, demand, trouble, struck=struck)
        self._total_bytes, self._other_bytes = reading.total_bytes, other_bytes(reading, own)
        if reading.at_s != self._read_s:
            self._read_s, self._slack = reading.at_s, (self._slack[1], own.slack_bytes)
        self._peak.note(own.outside_bytes, now_s)
        standing = own.outside_bytes if self._standing_bytes is None else self._standing_bytes
        self._standing_bytes = min(standing, own.outside_bytes)
        at_high, at_low = self._room(self._marks.high, own), self._room(self._marks.low, own)
        state, budget = self._move(at_low, at_high, reading.total_bytes, now_s)
        used = reading.total_bytes - reading.free_bytes
        if used > self._marks.critical * reading.total_bytes:
            state = GovernorState.CRITICAL
        elif used + self._reserve(own) > self._marks.high * reading.total_bytes:
            state = GovernorState.SHRINKING
        reason = self._reason(state, reading, demand, at_high)
        return _limits(state, reason, budget, own, demand)

    def _move(self, at_low: int, at_high: int, total_bytes: int, now_s: float) -> tuple[GovernorState, int]:
        """Lower the budget at once, raise it in steps, or leave it."""
        budget = self._budget_bytes
        if budget is None:
            budget = max(0, at_low)
        if budget > max(0, at_high):
            self._budget_bytes = max(0, (at_low + at_high) // 2)
            self._lowered_s = now_s
            return GovernorState.SHRINKING, self._budget_bytes
        state = GovernorState.STEADY
        if budget < at_low:
            state = GovernorState.GROWING
            if now_s - self._lowered_s >= GROW_AFTER_S and now_s - self._raised_s >= GROW_EVERY_S:
                budget = min(at_low, budget + max(1, int(total_bytes * GROW_FRACTION)))
                self._raised_s = now_s
        self._budget_bytes = budget
        return state, budget

    def _decide_blind(self, own: OwnUse, demand: Demand, trouble: str, *, struck: bool) -> MemoryLimits:
        """Without a reading others hold what they held; what is told of memory besides may lower limits.

        That is our own growth, and that no memory was found: others must have taken some. Then the batch may
        hold a step less than it does now.
        """
        why = trouble or "there is no reading yet"
        if self._budget_bytes is None:
            reason = f"{why}; nothing more begins than what runs"
            return MemoryLimits(max(1, demand.running), None, GovernorState.LOST, reason)
        budget = min(self._budget_bytes, self._room(self._marks.high, own))
        if struck:
            held = own.committed_bytes + own.parked_bytes - own.slack_bytes
            budget = min(budget, held - int(self._total_bytes * GROW_FRACTION))
        self._budget_bytes = max(0, budget)
        does = "no memory was found, limits are lowered" if struck else "limits are held"
        return _limits(GovernorState.LOST, f"{why}; {does}", self._budget_bytes, own, demand)

    def _room(self, mark: float, own: OwnUse) -> int:
        """KV, parked or not, that fits under a watermark beside everything else; below 0 if nothing does."""
        beside = self._other_bytes + own.context_bytes + own.outside_bytes + self._reserve(own)
        # A row that is being embedded has memory before it has tokens: slack is what two readings show.
        return int(mark * self._total_bytes) - beside - min(self._slack)

    def _reserve(self, own: OwnUse) -> int:
        """What prompts may need beside what is held now.

        As configured, over what stands while nothing is computed; or what brings us back to the last peak.
        """
        most = self._peak.most
        if self._marks.reserve_bytes is not None and self._standing_bytes is not None:
            most = self._standing_bytes + self._marks.reserve_bytes
        return max(0, most - own.outside_bytes)

    def _reason(self, state: GovernorState, reading: MemoryReading, demand: Demand, at_high: int) -> str:
        used = reading.total_bytes - reading.free_bytes
        if state is GovernorState.STEADY:
            return "all is within the watermarks"
        if state is GovernorState.GROWING:
            return f"{_gib(reading.free_bytes)} are free: the batch may take more, step by step"
        if used <= self._marks.high * reading.total_bytes:
            total = _gib(reading.total_bytes)
            return f"others hold {_gib(self._other_bytes)} of {total}: KV may take {_gib(max(0, at_high))}"
        over = (
            f"{_gib(used)} of {_gib(reading.total_bytes)} are used, {_gib(self._other_bytes)} by others;"
            f" {self._marks.high:.0%} may be"
        )
        return f"{over}; one query goes on all the same" if at_high < demand.least_bytes else over


def _limits(state: GovernorState, reason: str, budget: int, own: OwnUse, demand: Demand) -> MemoryLimits:
    """Put the bounds below which nothing would move under what was decided."""
    budget = max(budget, demand.least_bytes, 0)
    presses = state in {GovernorState.SHRINKING, GovernorState.CRITICAL}
    rows = demand.rows if state is not GovernorState.CRITICAL else min(demand.running, demand.rows)
    keep = 0 if presses else max(0, budget - own.committed_bytes - own.parked_bytes)
    return MemoryLimits(max(1, rows), budget, state, reason, keep)


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.1f} GiB"


class _Peak:
    """The most of a figure over one to two windows of time."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._since_s = 0.0
        self._before = self._now = 0

    @property
    def most(self) -> int:
        """The peak."""
        return max(self._before, self._now)

    def note(self, value: int, now_s: float) -> None:
        """Take in the figure as it is."""
        if now_s - self._since_s >= self._window_s:
            self._before, self._now, self._since_s = self._now, 0, now_s
        self._now = max(self._now, value)
