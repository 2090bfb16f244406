"""The tables of the mixes: outcome beside prediction, and the ratios that were published."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from batond.bench.mixes.costs import Costs
    from batond.bench.mixes.run import MixesReport, MixReport, ModeRun

_NO_CARD = "No card: these times say that the bench runs, and nothing about speed."


def show(console: Console, report: MixesReport) -> None:
    """Print everything."""
    lines = [", ".join(f"{name} {value}" for name, value in report.machine.items())]
    for mix in report.mixes:
        lines += heading(mix, report.options.shape, report.options.dtype)
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print(costs_table(mix.costs))
        console.print(modes_table(mix))
        lines = list(ratio_lines(mix))
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if report.options.device == "cpu":
        console.print(_NO_CARD)


def heading(report: MixReport, shape: str, dtype: str) -> list[str]:
    """What was run."""
    what = (
        f"{report.mix.name}: batch {report.mix.rows}, lengths x {report.mix.scale}; {report.queries} queries,"
        f" {report.prompt_tokens:,} prompt and {report.output_tokens:,} output tokens;"
        f" {report.run_queries or 'none'} of them run; {shape} with {report.layers} layers, {dtype}; engine"
        f" ready in {report.ready_s:.0f} s, all in {report.seconds:.0f} s"
    )
    return ["", what, f"batch {report.batch}"]


def costs_table(costs: Costs) -> Table:
    """What the prediction is made of."""
    table = Table(title="Costs, measured before the runs")
    table.add_column("what")
    table.add_column("cost", justify="right")
    for step in costs.steps:
        table.add_row(
            f"step of {step.rows} rows, ms",
            f"{1e3 * step.fixed_s:.3f} + {1e6 * step.column_s:.4f} a thousand columns"
            f" + {1e6 * step.longest_s:.4f} a thousand of the longest row (misses by {step.worst_miss:.1%})",
        )
    for prompt in costs.prompts:
        points = ", ".join(f"{tokens}: {1e3 * seconds:.1f}" for tokens, seconds in prompt.points)
        table.add_row(f"prompt in {prompt.rows} row(s), ms by tokens", points)
    if not costs.reads_added:
        table.add_row("columns that prompts leave in other rows", "not read: no kernel of the card's")
    return table


def modes_table(report: MixReport) -> Table:
    """Each mode: outcome, prediction, and what the schedule alone says."""
    table = Table(
        title=f"{report.mix.name}: all modes on the same kernels and graphs",
        caption="idle: row-steps for nobody; ratio: to run_to_completion; whole: predicted for all queries",
    )
    table.add_column("mode")
    names = "time s, predicted, error, tokens/s, steps, idle, prompts s, ratio, in steps, whole s, ratio"
    for name in names.split(", "):
        table.add_column(name, justify="right")
    first = report.modes[0]
    for one in report.modes:
        table.add_row(one.mode, *_outcome(one, first), *_whole(one, first))
    return table


def _outcome(one: ModeRun, first: ModeRun) -> Iterator[str]:
    outcome, base = one.outcome, first.outcome
    if outcome is None:
        yield from ("", f"{one.predicted.seconds:.2f}", "", "", f"{one.predicted.steps:,}", "", "", "", "")
        return
    yield f"{outcome.seconds:.2f}"
    yield f"{one.predicted.seconds:.2f}"
    yield f"{one.predicted.seconds / outcome.seconds - 1:+.1%}"
    yield f"{outcome.output_tokens / outcome.seconds:,.0f}"
    yield f"{outcome.steps:,}"
    yield f"{outcome.idle_row_steps:,}"
    yield f"{outcome.prompt_s:.2f}"
    yield "" if base is None else f"{base.seconds / outcome.seconds:.2f}"
    yield "" if base is None else f"{base.steps / outcome.steps:.2f}"


def _whole(one: ModeRun, first: ModeRun) -> Iterator[str]:
    yield f"{one.whole.seconds:.1f}"
    yield f"{first.whole.seconds / one.whole.seconds:.2f}"


def ratio_lines(report: MixReport) -> Iterator[str]:
    """The two ratios that were published, measured, predicted, and for the whole workload."""
    modes = {one.mode: one for one in report.modes}
    last = modes["decoupled"]
    published = {"run_to_completion": report.mix.over_whole, "inline": report.mix.over_inline}
    for name in ("run_to_completion", "inline", "inline_ranged"):
        other = modes[name]
        said = [f"decoupled over {name}:"]
        predicted = other.predicted.seconds / max(last.predicted.seconds, 1e-9)
        if other.outcome is not None and last.outcome is not None:
            measured = other.outcome.seconds / last.outcome.seconds
            said.append(
                f"{measured:.3f} measured, {predicted:.3f} predicted ({predicted / measured - 1:+.1%}),"
            )
            said.append(f"{other.outcome.steps / last.outcome.steps:.3f} in steps;")
        said.append(f"whole workload predicted {other.whole.seconds / last.whole.seconds:.3f},")
        said.append(f"in steps {other.whole.steps / last.whole.steps:.3f}")
        if name in published:
            said[-1] += f"; published {published[name]}"
        yield " ".join(said)
