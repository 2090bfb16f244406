"""The tables for a console: outcome, prediction and published figure side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from batond.bench.memory import MEBIBYTE
from batond.bench.paper.cases import METHODS
from batond.bench.paper.published import SOURCE
from batond.bench.paper.results import lines, over_inline, over_plain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from batond.bench.paper.results import Line
    from batond.bench.paper.run import CaseReport, PaperReport

_NO_CARD = (
    "On a CPU: ratios in steps are those of any machine with these lengths; times are those of a model whose"
    " steps are mostly Python, and no step reads the columns that inline prompts leave in other rows."
)
_CLOCK_CPU = "Times are CPU time of this process: other work on the machine hardly moves them."
_HEADS = (
    "time s",
    "rounds",
    "predicted",
    "error",
    "tokens/s",
    "steps",
    "idle",
    "ratio",
    "predicted",
    "published",
    "in steps",
    "full lengths",
    "padded",
)
_CAPTION = (
    "time: median of the rounds, shortest and longest beside it; ratio: time of run to completion over this"
    f" one's; published: {SOURCE}, blank where not known here; in steps: ratio of decode steps; full lengths:"
    " the same of the whole workload at the published lengths; padded: ratio on padded tensors; idle:"
    " row-steps for nobody"
)


def show(console: Console, report: PaperReport) -> None:
    """Print everything that is done."""
    said = [", ".join(f"{name} {value}" for name, value in report.machine.items())]
    if report.options.clock == "cpu":
        said.append(_CLOCK_CPU)
    for line in said:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for case in report.cases:
        console.print(heading(case, report), markup=False, highlight=False, soft_wrap=True)
        console.print(table(case))
        for line in remarks(case):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if report.options.device == "cpu":
        console.print(_NO_CARD, markup=False, highlight=False, soft_wrap=True)


def heading(case: CaseReport, report: PaperReport) -> str:
    """What was run."""
    ran = "all" if case.run_queries == case.case.queries else str(case.run_queries or "none")
    layers = "1 layer" if case.layers == 1 else f"{case.layers} layers"
    return (
        f"\n{case.case.title}: {case.case.queries} queries, {case.prompt_tokens:,} prompt and"
        f" {case.output_tokens:,} output tokens; {ran} of them run; {report.options.shape} with {layers},"
        f" {report.options.dtype}; {case.seconds:.0f} s in all"
    )


def table(report: CaseReport) -> Table:
    """A column of the published tables, a method a line."""
    found = Table(title=report.case.title, caption=_CAPTION)
    found.add_column("method")
    for head in _HEADS:
        found.add_column(head, justify="right")
    for line in lines(report):
        found.add_row(METHODS.get(line.method, "plain transformers"), *_cells(line))
    return found


def _cells(line: Line) -> Iterator[str]:
    def cell(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    yield cell(line.seconds, ".2f")
    spread = (
        "" if line.least_s is None or line.least_s == line.most_s else f"{line.least_s:.2f}-{line.most_s:.2f}"
    )
    yield spread
    yield cell(line.predicted_s, ".2f")
    yield cell(line.error, "+.1%")
    yield cell(line.tokens_per_s, ",.0f")
    yield cell(line.steps, ",")
    yield cell(line.idle_row_steps, ",")
    yield cell(line.ratio, ".2f")
    yield cell(line.predicted_ratio, ".2f")
    yield cell(line.published_ratio, ".2f")
    yield cell(line.step_ratio, ".2f")
    yield cell(line.published_length_step_ratio, ".2f")
    yield cell(line.padded_ratio, ".2f")


def remarks(report: CaseReport) -> Iterator[str]:
    """What no line of the table holds."""
    inline = over_inline(report)
    known = {
        "measured": inline.measured,
        "predicted": inline.predicted,
        "measured on padded tensors": inline.padded,
        "published": inline.published,
    }
    said = [f"{value:.2f} {name}" for name, value in known.items() if value is not None]
    if inline.published is None:
        said.append("not known of the paper")
    yield f"decoupled over inline: {', '.join(said)}"
    if report.run_queries < report.case.queries:
        last = next(line for line in lines(report) if line.method == "decoupled")
        yield (
            f"whole workload, predicted: {last.whole_s or 0:.1f} s decoupled, over run to completion"
            f" {last.whole_ratio or 0:.3f}, over inline {inline.whole or 0:.3f}"
        )
    if report.plain is not None:
        plain = report.plain
        part = (
            ""
            if plain.complete
            else f" ({plain.batches} of {plain.all_batches} batches run, the rest worked out)"
        )
        over = over_plain(report)
        times = "" if over is None else f"; decoupled over it: {over:.2f}"
        yield f"plain transformers: {plain.whole_s:.2f} s{part}{times}"
    for curve in report.memory:
        yield (
            f"KV memory, {curve.mode}: peak {curve.peak_bytes / MEBIBYTE:.2f} MiB, mean"
            f" {curve.mean_bytes / MEBIBYTE:.2f} MiB, {curve.over_live:.2f} of live tokens"
        )
