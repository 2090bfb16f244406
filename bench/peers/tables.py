"""The tables of the peers: each beside batond's own engine, in one run."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from rich.table import Table

from batond.bench.peers.run import OWN

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from batond.bench.peers.run import PeerReport, Report
    from batond.bench.peers.task import Saturated

_NO_CARD = "No card: these times say that the bench runs, and nothing about speed."


def show(console: Console, report: Report) -> None:
    """Print everything."""
    for line in heading(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if any(one.saturated for one in report.peers):
        console.print(saturated_table(report))
    if any(one.urgent for one in report.peers):
        console.print(urgent_table(report))
    for line in notes(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def heading(report: Report) -> Iterator[str]:
    """What was run, and on what."""
    options = report.options
    layers = f" with {options.layers} layers" if options.layers is not None else ""
    yield f"{options.shape}{layers}, {options.dtype}, random weights, {options.device}"
    if report.requests:
        yield (
            f"workload {options.workload}: {report.requests} requests, {report.prompt_tokens:,} prompt and"
            f" {report.output_tokens:,} output tokens, all there from the start, lengths forced"
        )
    if options.urgency is not None:
        task = options.task(OWN, ()).urgency or options.urgency
        yield (
            f"urgent: {task.count} of {task.prompt_tokens} tokens, {task.output_tokens} out, while"
            f" {task.rows} of {task.fill_prompt_tokens} tokens, {task.fill_output_tokens} out, have the rows"
        )
    for one in report.peers:
        if one.about:
            about = ", ".join(f"{name} {value}" for name, value in one.about.items())
            yield f"{one.peer}: {about}; stood after {one.ready_s:.0f} s"


def saturated_table(report: Report) -> Table:
    """Throughput by rows: the median of the repeats."""
    table = Table(
        title="All requests at once", caption=f"{OWN}: its rate over the peer's; above 1 it is faster"
    )
    table.add_column("peer")
    for name in ("rows", "time s", "best s", "output tokens/s", f"{OWN} over it"):
        table.add_column(name, justify="right")
    for rows in report.options.rows:
        own = _median_s(_of(report, OWN, rows))
        for one in report.peers:
            runs = [run for run in one.saturated if run.rows == rows]
            if not runs:
                continue
            seconds = _median_s(runs)
            ratio = "" if math.isnan(own) else f"{seconds / own:.2f}"
            best = min(run.seconds for run in runs)
            rate = f"{runs[0].output_tokens / seconds:,.0f}"
            table.add_row(one.peer, f"{rows}", f"{seconds:.2f}", f"{best:.2f}", rate, ratio)
    return table


def urgent_table(report: Report) -> Table:
    """Urgent requests: first and last token, idle and under a full batch, and what they cost the others."""
    table = Table(
        title="Urgent requests, ms",
        caption="first, last: to that token of an urgent request; kept: rate with them over that without",
    )
    table.add_column("peer")
    names = "idle first p50, first p50, p99, last p50, p99, tokens/s, with them, kept"
    for name in [*names.split(", "), f"over {OWN}"]:
        table.add_column(name, justify="right")
    own = next((one.urgent for one in report.peers if one.peer == OWN and one.urgent), None)
    for one in report.peers:
        urgent = one.urgent
        if urgent is None:
            continue
        first = percentile(urgent.full_ms, 50)
        table.add_row(
            one.peer,
            f"{percentile(urgent.idle_ms, 50):,.1f}",
            f"{first:,.1f}",
            f"{percentile(urgent.full_ms, 99):,.1f}",
            f"{percentile(urgent.answer_ms, 50):,.1f}",
            f"{percentile(urgent.answer_ms, 99):,.1f}",
            f"{urgent.alone_rate:,.0f}",
            f"{urgent.mixed_rate:,.0f}",
            f"{urgent.mixed_rate / urgent.alone_rate:.3f}",
            "" if own is None else f"{first / percentile(own.full_ms, 50):,.1f}",
        )
    return table


def notes(report: Report) -> Iterator[str]:
    """Who is missing and why, what failed, and what the figures are worth."""
    for one in report.peers:
        if one.missing:
            yield f"{one.peer}: skipped, {one.missing}"
        for failure in one.failures:
            yield f"{one.peer}: failed, {failure}"
    if report.options.device == "cpu":
        yield _NO_CARD


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many per cent are not above: one that was measured, nothing between two."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _of(report: Report, peer: str, rows: int) -> list[Saturated]:
    found: list[PeerReport] = [one for one in report.peers if one.peer == peer]
    return [run for one in found for run in one.saturated if run.rows == rows]


def _median_s(runs: Sequence[Saturated]) -> float:
    return statistics.median(run.seconds for run in runs) if runs else math.nan
