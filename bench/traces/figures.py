"""Figures of a replay: latencies, the course of it, and what each class and tenant got."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from batond.daemon.simulator.figures import latencies, load_plotter, save

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from batond.bench.traces.options import Options
    from batond.bench.traces.replay import Replayed
    from batond.bench.traces.run import Result, Run

FORMATS: Final = ("png", "svg")
POINTS: Final = 600  # Of a course over time.
BINS: Final = 60


def draw(folder: Path, options: Options, result: Result) -> list[Path]:
    """Write `latency`, `course` and `service`, each as PNG and SVG.

    Args:
        folder: Made if it is missing.
        options: What was asked for.
        result: What came of it.

    Raises:
        ConfigError: Matplotlib is missing, or a file can't be written.
        OSError: The folder can't be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    runs = result.full or result.runs
    both = [one for run in runs for one in (run.outcome, run.predicted) if one is not None]
    what = f"{options.trace.name}, {len(result.requests):,} requests, {result.info.rows} rows"
    figures = {
        "latency": latencies(both, f"Latencies of {what}"),
        "course": _course(runs, f"Course of {what}"),
        "service": _service(runs, f"What classes and tenants got of {what}"),
    }
    written = []
    for name, figure in figures.items():
        for ending in FORMATS:
            path = folder / f"{name}.{ending}"
            save(figure, path)
            figure.set_layout_engine("none")  # It is laid out by now, which takes as long as drawing.
            written.append(path)
    return written


def _course(runs: Sequence[Run], title: str) -> Any:
    """Requests with a row, parked and waiting, and tokens a second by class; a column each run."""
    figure = load_plotter()(figsize=(6.5 * len(runs), 7), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2, len(runs), squeeze=False, sharex=True, sharey="row")
    for column, run in enumerate(runs):
        ended = [one for one in run.replayed if one.ended]
        states, tokens = axes[0][column], axes[1][column]
        seconds, counts = _states(run, ended)
        states.stackplot(
            seconds, *counts.values(), labels=list(counts), colors=("C2", "C4", "C1"), step="post"
        )
        rows = run.outcome.setup.rows
        states.axhline(rows, color="black", linewidth=0.8, linestyle=":", label=f"rows of the batch, {rows}")
        states.set(title=f"{run.name}: requests in the daemon", ylabel="requests")
        for name, place in zip(run.outcome.setup.classes.names, range(10), strict=False):
            some = [one for one in ended if one.query.sla.name == name]
            if some:
                _rate(tokens, some, run.outcome.end_s, name, f"C{place}")
        tokens.set(
            title=f"{run.name}: output", ylabel="output tokens/s", xlabel="seconds since the replay began"
        )
        for one in (states, tokens):
            one.grid(visible=True, alpha=0.3)
    for one in axes[:, 0]:
        one.set_ylim(bottom=0)  # Shared by its row: only now is the highest of all runs known.
    axes[0][0].legend(fontsize="small", loc="best")
    axes[1][0].legend(fontsize="small", loc="best", title="class")
    return figure


def _states(run: Run, ended: Sequence[Replayed]) -> tuple[Sequence[float], dict[str, Sequence[float]]]:
    """Times, and how many requests were in each state: as the engine tells, else as the clients saw it."""
    names = ("has a row", "parked", "waits for its first row")
    if run.course:
        columns = ([one.rows for one in run.course], [one.parked for one in run.course])
        waiting = [one.waiting for one in run.course]
        return [one.at_s for one in run.course], dict(zip(names, (*columns, waiting), strict=True))
    seconds = np.linspace(0, run.outcome.end_s, POINTS)
    spans = (_with_row(ended), _parked(ended), _waiting(ended))
    return seconds.tolist(), {name: _at_once(some, seconds) for name, some in zip(names, spans, strict=True)}


def _rate(axes: Any, some: Sequence[Replayed], end_s: float, label: str, colour: str) -> None:
    times_s = [now_s for one in some for now_s, _ in one.came_s]
    tokens = [count for one in some for _, count in one.came_s]
    edges = np.linspace(0, max(end_s, 1e-9), BINS + 1)
    counts, _ = np.histogram(times_s, bins=edges, weights=tokens)
    axes.stairs(counts / np.diff(edges), edges, label=label, color=colour)


Span = tuple[float, float]


def _with_row(ended: Sequence[Replayed]) -> Iterator[Span]:
    for one in ended:
        yield from ((start_s, min(end_s, one.query.end_s)) for start_s, end_s in one.had_row_s)


def _parked(ended: Sequence[Replayed]) -> Iterator[Span]:
    for one in ended:
        ends = [end_s for _, end_s in one.had_row_s[:-1]]
        yield from zip(ends, (start_s for start_s, _ in one.had_row_s[1:]), strict=True)


def _waiting(ended: Sequence[Replayed]) -> Iterator[Span]:
    for one in ended:
        yield one.sent_s, one.had_row_s[0][0] if one.had_row_s else one.query.end_s


def _at_once(spans: Iterator[Span], seconds: np.ndarray[Any, Any]) -> list[float]:
    """How many spans hold each of these times."""
    listed = list(spans)
    starts = np.sort([start_s for start_s, _ in listed])
    ends = np.sort([end_s for _, end_s in listed])
    counts = np.searchsorted(starts, seconds, "right") - np.searchsorted(ends, seconds, "right")
    return [float(count) for count in counts]


def _service(runs: Sequence[Run], title: str) -> Any:
    """Goodput and the part within targets by class; tokens each tenant wanted and got, over time."""
    figure = load_plotter()(figsize=(6.5 * max(2, len(runs)), 7.5), layout="constrained")
    figure.suptitle(title)
    top, bottom = figure.subfigures(2, 1)
    goodput, parts = top.subplots(1, 2)
    names = [
        one for one in runs[0].outcome.setup.classes.names if any(_of(run, one) is not None for run in runs)
    ]
    width = 0.8 / len(runs)
    for place, run in enumerate(runs):
        at = [number + (place - (len(runs) - 1) / 2) * width for number in range(len(names))]
        groups = [_of(run, name) for name in names]
        goodput.bar(at, [one.goodput_per_s if one else 0 for one in groups], width, label=run.name)
        bars = parts.bar(at, [100 * one.met if one else 0 for one in groups], width, label=run.name)
        parts.bar_label(bars, fmt="%.0f", fontsize="small")
    goodput.set(title="Goodput: within both targets of the class", ylabel="requests/s")
    parts.set(title="Part of the requests within both targets", ylabel="%", ylim=(0, 110))
    for axes in (goodput, parts):
        axes.set_xticks(range(len(names)), names)
        axes.grid(visible=True, axis="y", alpha=0.3)
        axes.legend(fontsize="small")
    for axes, run in zip(
        np.atleast_1d(bottom.subplots(1, len(runs), sharex=True, sharey=True)), runs, strict=True
    ):
        _tenants(axes, run)
    return figure


def _of(run: Run, name: str) -> Any:
    """A class's figures; None if it has none."""
    return next((one for one in run.report.groups if one.sla_class == name and not one.tenant), None)


def _tenants(axes: Any, run: Run) -> None:
    """Dashed what a tenant has asked for so far, drawn through what it has got."""
    ended = [one for one in run.replayed if one.ended]
    for place, tenant in enumerate(sorted({one.query.request.tenant for one in ended})):
        some = [one for one in ended if one.query.request.tenant == tenant]
        wanted: Counter[float] = Counter()
        got: Counter[float] = Counter()
        for one in some:
            request = one.query.request
            wanted[one.sent_s] += request.prompt_tokens + request.output_tokens
            for number, (now_s, tokens) in enumerate(one.came_s):
                got[now_s] += tokens + (0 if number else request.prompt_tokens)
        for counts, style, what in ((wanted, "--", "asked for"), (got, "-", "got")):
            times_s = sorted(counts)
            totals = np.cumsum([counts[now_s] for now_s in times_s])
            axes.step(
                times_s, totals, where="post", color=f"C{place}", linestyle=style, label=f"{tenant}, {what}"
            )
    axes.set(
        title=f"{run.name}: tenants",
        xlabel="seconds since the replay began",
        ylabel="prompt and output tokens",
    )
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small", loc="best")
