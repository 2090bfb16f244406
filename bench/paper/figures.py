"""The figures: what is done over time, what KV memory is held, and the ratios beside the published ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from batond.bench.memory import MEBIBYTE
from batond.bench.paper.cases import METHODS
from batond.bench.paper.results import lines
from batond.bench.paper.series import kept_points
from batond.daemon.errors import ConfigError
from batond.daemon.simulator.figures import load_plotter, save

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from batond.bench.paper.run import CaseReport, PaperReport

FORMATS: Final = ("svg", "png")
_KNOWN: Final = (*FORMATS, "pdf")
#: Colours that people with any colour vision tell apart (Okabe and Ito).
_COLOURS: Final = {
    "run_to_completion": "#D55E00",
    "pd": "#E69F00",
    "inline": "#56B4E9",
    "decoupled": "#0072B2",
    "ring": "#009E73",
    "transformers": "#7F7F7F",
}
_MEMORY_NAMES: Final = {**METHODS, "ring": "batond's ring (decoupled), memory alone"}


def require(formats: Sequence[str]) -> None:
    """Refuse what can't be drawn, before hours of runs.

    Raises:
        ConfigError: Matplotlib is missing, or a format is unknown.
    """
    load_plotter()
    if unknown := set(formats).difference(_KNOWN):
        raise ConfigError(f"--formats must be of {', '.join(_KNOWN)}, not {', '.join(sorted(unknown))}")


def draw(folder: Path, report: PaperReport, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Draw a figure for each column of the tables, and one with all ratios.

    Args:
        folder: It is there.
        report: What is done so far.
        formats: Endings of the files.

    Raises:
        ConfigError: Matplotlib is missing, a format is not known to it, or a file can't be written.
    """
    plotter, written = load_plotter(), []
    drawings: list[tuple[str, Callable[[Any], None]]] = [
        (case.case.name, lambda figure, case=case: _case(figure, case, report))  # type: ignore[misc]
        for case in report.cases
        if case.run_queries
    ]
    if drawings:
        drawings.append(("ratios", lambda figure: _ratios(figure, report)))
    for name, drawing in drawings:
        figure = plotter(layout="constrained")
        drawing(figure)
        for ending in formats:
            path = folder / f"{name}.{ending}"
            save(figure, path)
            written.append(path)
    return written


def _case(figure: Any, case: CaseReport, report: PaperReport) -> None:
    """Queries and tokens above; memory below, in all methods and without the one that dwarfs the others."""
    below = 1 if case.memory else 0
    figure.set_size_inches(12, 4.4 + 3.8 * below)
    axes = figure.subplots(1 + below, 2, squeeze=False)
    layers = "1 layer" if case.layers == 1 else f"{case.layers} layers"
    what = f"{case.run_queries} queries, {report.options.shape}, {layers}, {report.options.dtype}"
    figure.suptitle(f"{case.case.title}\n{what}", fontsize=12)
    _progress(axes[0, 0], case, "queries", "Completed queries", "queries")
    _progress(axes[0, 1], case, "tokens", "Output tokens", "tokens")
    if case.memory:
        _memory(axes[1, 0], case, "KV memory held; methods on padded tensors", without="")
        _memory(axes[1, 1], case, "The same without inline", without="inline")
    clock = "CPU seconds" if report.options.clock == "cpu" else "seconds"
    named: dict[str, Any] = {}
    for panel in axes.flat:
        panel.set(xlabel=f"{clock} since the first submit", xlim=(0, None), ylim=(0, None))
        panel.grid(alpha=0.25)
        handles, names = panel.get_legend_handles_labels()
        named |= dict(zip(names, handles, strict=True))
    figure.legend(named.values(), named, loc="outside lower center", ncols=3, frameon=False, fontsize=9)


def _progress(axes: Any, case: CaseReport, field: str, title: str, unit: str) -> None:
    for one in case.methods:
        if one.series is not None:
            axes.step(
                one.series.seconds,
                getattr(one.series, field),
                where="post",
                label=METHODS[one.mode],
                color=_COLOURS[one.mode],
            )
    if case.plain is not None:
        series = case.plain.series.thinned()
        axes.step(
            series.seconds,
            getattr(series, field),
            where="post",
            label="plain transformers" + ("" if case.plain.complete else " (cut off)"),
            color=_COLOURS["transformers"],
            linestyle="--",
        )
    axes.set(title=f"{title}, cumulative", ylabel=unit)


def _memory(axes: Any, case: CaseReport, title: str, *, without: str) -> None:
    for curve in case.memory:
        if curve.mode == without:
            continue
        kept = kept_points(len(curve.ends_s))
        axes.step(
            [curve.ends_s[place] for place in kept],
            [curve.held_bytes[place] / MEBIBYTE for place in kept],
            where="post",
            label=_MEMORY_NAMES[curve.mode],
            color=_COLOURS[curve.mode],
            linewidth=1.0,
        )
    axes.set(title=title, ylabel="MiB")


def _ratios(figure: Any, report: PaperReport) -> None:
    """Bars of one figure that the paper has: run-to-completion over Baton-PD."""
    figure.set_size_inches(1.5 + 1.6 * len(report.cases), 4.6)
    axes = figure.subplots()
    last = [next(line for line in lines(case) if line.method == "decoupled") for case in report.cases]
    bars = [
        ("measured, time", [line.ratio for line in last], "#0072B2"),
        ("predicted, time", [line.predicted_ratio for line in last], "#56B4E9"),
        ("decode steps of this run", [line.step_ratio for line in last], "#009E73"),
        ("decode steps, published lengths", [line.published_length_step_ratio for line in last], "#CC79A7"),
        ("published, time", [line.published_ratio for line in last], "#D55E00"),
    ]
    width = 0.8 / len(bars)
    for number, (name, values, colour) in enumerate(bars):
        places = [place + (number - (len(bars) - 1) / 2) * width for place in range(len(last))]
        axes.bar(places, [value or 0.0 for value in values], width, label=name, color=colour)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(last)), [f"Table {line.table}\nbatch {line.batch}" for line in last])
    axes.set(ylabel="ratio", title="Run to completion over Baton-PD (decoupled): times as fast")
    axes.grid(axis="y", alpha=0.25)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
