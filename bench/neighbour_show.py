"""What the runs beside a neighbour came to: checks, tables and a drawing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

from batond.bench.neighbour import left_at_s, takes
from batond.daemon.simulator.figures import load_plotter, save

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from batond.bench.neighbour import Course, Moment

MOST_SHRINK_S: Final = 1.0
MOST_RATE_LOSS: Final = 0.05
_TABLE_ROWS: Final = 32
_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold.

    Attributes:
        what: In words.
        holds: Whether it does.
        found: What was found.
    """

    what: str
    holds: bool
    found: str


def checks(alone: Course, beside: Course) -> list[Check]:
    """Judge a run beside a neighbour.

    Args:
        alone: The same queries, undisturbed.
        beside: The run.
    """
    pairs = enumerate(zip(alone.outputs, beside.outputs, strict=True))
    changed = [place for place, (one, other) in pairs if one != other]
    sampled = sum(place % 2 for place in changed)
    taken = takes(beside)
    slowest = [take.relieved_s for take in taken]
    pressed = [take for take in taken if take.pressed]
    shrunk = all(take.kv_after_bytes < take.kv_before_bytes for take in pressed)
    left_s = left_at_s(beside)
    rate, _ = alone.full_rate(alone.began_s)
    after, after_s = (0.0, 0.0) if left_s is None else beside.full_rate(left_s)
    ratio = after / rate if rate else 0.0
    return [
        Check(
            "no query failed",
            not (alone.failed or beside.failed),
            "; ".join([*alone.failed, *beside.failed][:3]) or f"{len(beside.outputs)} queries",
        ),
        Check(
            "no token lost or changed",
            not changed,
            f"{len(changed) - sampled} greedy and {sampled} sampled outputs differ,"
            f" of {sum(map(len, alone.outputs))} tokens",
        ),
        Check(
            "the neighbour wanted more than was free", bool(pressed), f"{len(pressed)} of {len(taken)} times"
        ),
        Check(
            f"it has it, and the batch has shrunk, within {MOST_SHRINK_S:g} s",
            shrunk and all(seconds is not None and seconds <= MOST_SHRINK_S for seconds in slowest),
            ", ".join("never" if seconds is None else f"{seconds:.2f} s" for seconds in slowest),
        ),
        Check(
            f"throughput is back within {MOST_RATE_LOSS:.0%} after it left",
            ratio >= 1 - MOST_RATE_LOSS,
            f"{after:.1f} tokens a second over {after_s:.1f} s, {rate:.1f} undisturbed: {ratio:.3f}",
        ),
    ]


def verdict(found: Sequence[Check], beside: Course) -> Table:
    """The checks as a table."""
    again = f"{beside.dropped} kept nothing, {beside.recomputed_tokens} tokens computed again"
    table = Table(title=f"{len(beside.outputs)} queries beside a neighbour: {beside.parks} parks, {again}")
    for name in ("what must hold", "holds", "found"):
        table.add_column(name)
    for check in found:
        table.add_row(check.what, "yes" if check.holds else "NO", check.found)
    return table


def timeline(course: Course) -> Table:
    """The run, at about equal distances in time and whenever the neighbour was told something."""
    table = Table(title=f"timeline; batch of {course.rows} rows, memory of {_size(course.total_bytes)}")
    for name in ("s", "neighbour wants", "holds", "used", "KV", "rows", "parked", "tokens/s", "governor"):
        table.add_column(name, justify="left" if name == "governor" else "right")
    before: Moment | None = None
    for moment in _picked(course):
        rate = 0.0
        if before is not None and moment.at_s > before.at_s:
            rate = (moment.tokens - before.tokens) / (moment.at_s - before.at_s)
        table.add_row(
            f"{moment.at_s - course.began_s:.2f}",
            _size(moment.wanted_bytes),
            _size(moment.neighbour_bytes),
            f"{moment.used_bytes / course.total_bytes:.1%}",
            _size(moment.kv_bytes),
            f"{moment.rows}",
            f"{moment.parked}",
            f"{rate:.0f}",
            moment.state,
        )
        before = moment
    return table


def _picked(course: Course) -> list[Moment]:
    every_s = course.seconds / _TABLE_ROWS
    picked: list[Moment] = []
    for moment in course.moments:
        told = bool(picked) and moment.wanted_bytes != picked[-1].wanted_bytes
        if not picked or told or moment.at_s - picked[-1].at_s >= every_s:
            picked.append(moment)
    if picked[-1] is not course.moments[-1]:
        picked.append(course.moments[-1])
    return picked


def _size(nbytes: int) -> str:
    return f"{nbytes / _GIB:.1f} GiB" if nbytes >= _GIB else f"{nbytes / (1 << 20):.2f} MiB"


def figures(alone: Course, beside: Course) -> dict[str, Any]:
    """Everything, for a file."""
    return {
        "checks": [[check.what, check.holds, check.found] for check in checks(alone, beside)],
        "total_bytes": beside.total_bytes,
        "rows": beside.rows,
        "alone": [moment._asdict() for moment in alone.moments],
        "beside": [moment._asdict() for moment in beside.moments],
    }


def plot(path: Path, alone: Course, beside: Course) -> None:
    """Draw who holds the memory over time, and how many rows are in use.

    Raises:
        ConfigError: Matplotlib is missing, the ending names no format, or the file can't be written.
    """
    figure = load_plotter()(figsize=(9, 6), layout="constrained")
    memory, rows = figure.subplots(2, sharex=True)
    seconds = [moment.at_s - beside.began_s for moment in beside.moments]
    share = 100 / beside.total_bytes
    lines = {
        "neighbour wants": [moment.wanted_bytes * share for moment in beside.moments],
        "neighbour holds": [moment.neighbour_bytes * share for moment in beside.moments],
        "KV of the batch": [moment.kv_bytes * share for moment in beside.moments],
        "used by all": [moment.used_bytes * share for moment in beside.moments],
    }
    for name, values in lines.items():
        memory.step(seconds, values, where="post", label=name, linestyle="--" if "wants" in name else "-")
    memory.set(ylabel="% of the memory", ylim=(0, 102))
    rows.step(seconds, [moment.rows for moment in beside.moments], where="post", label="rows")
    rows.step(seconds, [moment.parked for moment in beside.moments], where="post", label="parked")
    undisturbed = [moment.at_s - alone.began_s for moment in alone.moments]
    rows.step(
        undisturbed,
        [moment.rows for moment in alone.moments],
        where="post",
        label="rows, undisturbed",
        linestyle=":",
    )
    rows.set(xlabel="seconds", ylabel="queries", ylim=(0, None))
    for axes in (memory, rows):
        axes.legend(loc="upper right")
    save(figure, path)
