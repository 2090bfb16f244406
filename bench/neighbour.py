"""A neighbour takes most of the memory while queries run, and leaves: nothing fails, and no token changes.

    undisturbed    all queries, nobody beside them
    disturbed      the same queries on the same engine; the neighbour takes 30, 45, 60 % of the memory, gives
                   half of it back, and goes

On a card the neighbour is a process, and the engine is told by NVML. On a CPU both are a script, and seconds
are the script's: one reading, twenty a second, for each step.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from batond.daemon.engine import SamplingParams
from batond.daemon.memory.governor import Watermarks
from batond.daemon.wire.messages import QueryState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batond.bench.neighbour_stand import Stand
    from batond.daemon.engine.queries.query import Query

#: Once so much of all tokens is there, the neighbour shall hold such a part of the memory.
SCRIPT: Final = ((0.08, 0.30), (0.12, 0.45), (0.16, 0.60), (0.26, 0.30), (0.30, 0.0))
#: The next part of the script waits so long for the one before.
MOST_SHRINK_S: Final = 5.0
#: For so long use stays below the high watermark when it counts as being there.
CALM_S: Final = 0.25
_HIGH: Final = Watermarks().high


class Moment(NamedTuple):
    """What is there after a step.

    Attributes:
        at_s: Clock of the neighbour.
        wanted_bytes: What the neighbour is told to hold.
        neighbour_bytes: What it holds.
        used_bytes: Of the memory, by whomever, as of the governor's last reading.
        total_bytes: All there is, as of that.
        kv_bytes: That the batch has committed or pooled.
        rows: In use.
        row_limit: That may be in use.
        parked: Queries parked.
        live: Queries not ended.
        tokens: Emitted since the start, by all.
        state: Of the governor.
    """

    at_s: float
    wanted_bytes: int
    neighbour_bytes: int
    used_bytes: int
    total_bytes: int
    kv_bytes: int
    rows: int
    row_limit: int
    parked: int
    live: int
    tokens: int
    state: str


@dataclass(slots=True)
class Course:
    """One run of all queries.

    Attributes:
        outputs: Tokens of each query.
        failed: Why queries failed.
        moments: After each step.
        total_bytes: Of the memory.
        rows: Of the batch.
        parks: Queries parked, each time counted.
        dropped: Parks that kept nothing: computed again.
        recomputed_tokens: Computed again.
    """

    outputs: list[list[int]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    total_bytes: int = 0
    rows: int = 0
    parks: int = 0
    dropped: int = 0
    recomputed_tokens: int = 0

    @property
    def began_s(self) -> float:
        """Clock after the first step."""
        return self.moments[0].at_s

    @property
    def seconds(self) -> float:
        """From the first step to the last."""
        return self.moments[-1].at_s - self.began_s

    def full_rate(self, since_s: float) -> tuple[float, float]:
        """Tokens a second, and for how many seconds, from the first full batch to the end of the line.

        Args:
            since_s: Clock; what came before does not count.
        """
        full = [one for one in self.moments if one.at_s >= since_s and one.live >= self.rows]
        start = next((place for place, one in enumerate(full) if one.rows == self.rows), None)
        if start is None or len(full) - start < 2:  # noqa: PLR2004 - a rate is between two
            return 0.0, 0.0
        first, last = full[start], full[-1]
        seconds = last.at_s - first.at_s
        return (last.tokens - first.tokens) / seconds, seconds


@dataclass(frozen=True, slots=True)
class Take:
    """The neighbour wanted more.

    Attributes:
        at_s: When it was told.
        part: Of the memory, that it shall hold.
        pressed: Whether use rose above the high watermark.
        relieved_s: Until it had it, and use was below the high watermark and stayed there; None is never.
        kv_before_bytes: Of the batch when it was told.
        kv_after_bytes: Of the batch when it was relieved, or at the end.
    """

    at_s: float
    part: float
    pressed: bool
    relieved_s: float | None
    kv_before_bytes: int
    kv_after_bytes: int


def run(stand: Stand, script: Sequence[tuple[float, float]] = ()) -> Course:
    """Run all queries, submitted at once, every other one greedy, while the neighbour follows its script.

    Args:
        stand: Engine, neighbour and queries.
        script: After which part of all tokens the neighbour shall hold which part of the memory.
    """
    engine, neighbour = stand.engine, stand.neighbour
    before = dict(engine.counters)
    queries = [
        engine.submit(
            request.prompt_token_ids,
            SamplingParams(max_tokens=request.output_tokens, ignore_eos=True, temperature=0.8 * (place % 2)),
            seed=place,
        )
        for place, request in enumerate(stand.requests)
    ]
    course = Course(total_bytes=stand.total_bytes, rows=engine.rows)
    cue, told_s = 0, -MOST_SHRINK_S
    due = [part * sum(request.output_tokens for request in stand.requests) for part, _ in script]
    while engine.queries or cue < len(script):
        engine.step()
        course.moments.append(moment := _look(stand, queries, before.get("output_tokens", 0)))
        settled = _relieved(moment) or moment.at_s - told_s > MOST_SHRINK_S
        if cue < len(script) and settled and (moment.tokens >= due[cue] or not engine.queries):
            neighbour.want(int(script[cue][1] * stand.total_bytes))
            cue, told_s = cue + 1, moment.at_s
    course.outputs = [list(query.output_token_ids) for query in queries]
    course.failed = [f"{query.query_id}: {query.error}" for query in queries if query.error is not None]
    course.parks, course.dropped, course.recomputed_tokens = (
        engine.counters[name] - before.get(name, 0)
        for name in ("parks", "parks_dropped", "recomputed_tokens")
    )
    return course


def _look(stand: Stand, queries: Sequence[Query], tokens_before: int) -> Moment:
    engine, neighbour = stand.engine, stand.neighbour
    use, status = engine.residency.batch.memory, engine.memory_status
    return Moment(
        at_s=neighbour.clock(),
        wanted_bytes=neighbour.wanted_bytes,
        neighbour_bytes=neighbour.held_bytes,
        used_bytes=0 if status is None else status.total_bytes - status.free_bytes,
        total_bytes=stand.total_bytes if status is None else status.total_bytes,
        kv_bytes=use.committed_bytes + use.pooled_bytes,
        rows=len(engine.residency.occupied),
        row_limit=engine.rows if status is None else status.limits.rows,
        parked=sum(query.state is QueryState.PARKED for query in queries),
        live=len(engine.queries),
        tokens=engine.counters["output_tokens"] - tokens_before,
        state="off" if status is None else str(status.limits.state),
    )


def _pressed(moment: Moment) -> bool:
    """Whether use is above the high watermark."""
    return moment.used_bytes > _HIGH * moment.total_bytes


def _relieved(moment: Moment) -> bool:
    """Whether the neighbour has what it wants, and use is below the high watermark."""
    return moment.neighbour_bytes >= moment.wanted_bytes and not _pressed(moment)


def takes(course: Course) -> list[Take]:
    """What came of each time that the neighbour wanted more."""
    found: list[Take] = []
    moments = course.moments
    for place in range(1, len(moments)):
        before, told = moments[place - 1], moments[place]
        if told.wanted_bytes <= before.wanted_bytes:
            continue
        span = _until_told_again(moments[place:])
        calm = _first_calm(span)
        found.append(
            Take(
                at_s=before.at_s - course.began_s,
                part=told.wanted_bytes / course.total_bytes,
                pressed=any(map(_pressed, span)),
                relieved_s=None if calm is None else calm.at_s - before.at_s,
                kv_before_bytes=before.kv_bytes,
                kv_after_bytes=(calm or span[-1]).kv_bytes,
            )
        )
    return found


def _until_told_again(moments: Sequence[Moment]) -> list[Moment]:
    wanted_bytes = moments[0].wanted_bytes
    return list(itertools.takewhile(lambda one: one.wanted_bytes == wanted_bytes, moments))


def _first_calm(span: Sequence[Moment]) -> Moment | None:
    """The first moment from which on all is well for a while: a reading is of a little before."""
    calm = None
    for moment in span:
        if not _relieved(moment):
            calm = None
        elif calm is None:
            calm = moment
        elif moment.at_s - calm.at_s >= CALM_S:
            return calm
    return calm


def left_at_s(course: Course) -> float | None:
    """When the neighbour held nothing any more, having held something; None is never."""
    held = [place for place, one in enumerate(course.moments) if one.neighbour_bytes]
    if not held or held[-1] + 1 >= len(course.moments):
        return None
    return course.moments[held[-1] + 1].at_s


def measure(stand: Stand, tell: Callable[[str], object] = str) -> tuple[Course, Course, float]:
    """Both runs; returns them and the seconds that they took.

    Args:
        stand: Is closed afterwards.
        tell: Is told what was done, in words.
    """
    began_s = time.monotonic()
    try:
        tell(f"an engine of {stand.engine.rows} rows: {stand.engine.batch_reason}")
        alone = run(stand)
        tell(f"undisturbed: {alone.seconds:.1f} s, {alone.parks} parks")
        beside = run(stand, SCRIPT)
        tell(f"beside the neighbour: {beside.seconds:.1f} s, {beside.parks} parks")
    finally:
        stand.close()
    return alone, beside, time.monotonic() - began_s
