"""Curves of latencies, for `batond simulate --plot` and the benchmarks; matplotlib is optional."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from batond.daemon.errors import ConfigError
from batond.daemon.simulator.report import e2e_s, tpot_s, ttft_s

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from batond.daemon.simulator.engine import Query
    from batond.daemon.simulator.world import Outcome

MOST_SPAN_BY_FIVES: Final = 200  # Longest over shortest: up to there 1, 2 and 5 of each decade have room.


def load_plotter() -> Any:
    """Matplotlib's figure class, which needs no display.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional, and takes a second
    except ImportError as error:
        raise ConfigError("a plot needs matplotlib: pip install 'batond[bench]'", field="plot") from error
    return Figure


def save(figure: Any, path: Path) -> None:
    """Write a figure, in the format that the ending names.

    Raises:
        ConfigError: The ending names no format, or the file can't be written.
    """
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plot {path} can't be written: {error}", field="plot") from error


def plot(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Draw `latencies` into a file.

    Raises:
        ConfigError: Matplotlib is missing, the ending names no format, or the file can't be written.
    """
    save(latencies(outcomes, "Simulated latencies"), path)


def latencies(outcomes: Sequence[Outcome], title: str) -> Any:
    """What part of each class had its first token, its tokens and its last token within a time.

    Args:
        outcomes: A line each; dashed where the policy's name ends with "simulated" beside others that don't.
        title: Of the figure.

    Raises:
        ConfigError: Matplotlib is missing.
    """
    names = [
        name
        for name in outcomes[0].setup.classes.names
        if any(query.sla.name == name and query.served for one in outcomes for query in one.queries)
    ]
    rows = max(1, len(names))
    figure = load_plotter()(figsize=(12, 3.2 * rows + 0.6), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(rows, 3, squeeze=False, sharey=True)
    for row, name in zip(axes, names, strict=False):
        sla = outcomes[0].setup.classes.get(name)
        _curves(row[0], outcomes, name, ttft_s, sla.ttft_target_s)
        row[0].set(
            title=f"{name}: time to first token", xlabel="seconds", ylabel="part of the requests served"
        )
        _curves(row[1], outcomes, name, tpot_s, sla.tpot_target_s)
        row[1].set(title=f"{name}: time per output token", xlabel="seconds, mean of a request")
        _curves(row[2], outcomes, name, e2e_s, math.nan)
        row[2].set(title=f"{name}: arrival to last token", xlabel="seconds")
        row[0].legend(fontsize="small", loc="best")
    return figure


def _curves(
    axes: Any, outcomes: Sequence[Outcome], name: str, measure: Callable[[Query], float], target_s: float
) -> None:
    predicted = [outcome.policy.endswith("simulated") for outcome in outcomes]
    colours: dict[str, str] = {}
    shown: list[float] = []
    for outcome, dashed in zip(outcomes, predicted, strict=True):
        policy = outcome.policy.partition(",")[0]
        colour = colours.setdefault(policy, f"C{len(colours)}")
        values = sorted(
            value
            for query in outcome.queries
            if query.sla.name == name and query.served and not math.isnan(value := measure(query))
        )
        shown += [value for value in values if value > 0]
        parts = [(place + 1) / len(values) for place in range(len(values))]
        style = "--" if dashed and not all(predicted) else "-"
        axes.step(values, parts, where="post", label=outcome.policy, color=colour, linestyle=style)
    if not math.isnan(target_s):
        axes.axvline(target_s, color="grey", linestyle=":", label=f"target, {target_s:g} s")
    axes.set_xscale("log")
    _tick(axes, shown if math.isnan(target_s) else [*shown, target_s])
    axes.set_ylim(0, 1.02)
    axes.grid(visible=True, alpha=0.3)


def _tick(axes: Any, shown: Sequence[float]) -> None:
    """Plain numbers, as many as there is room for: matplotlib's own powers of ten run into each other."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: PLC0415 - optional

    wide = not shown or max(shown) / min(shown) > MOST_SPAN_BY_FIVES
    axes.xaxis.set_major_locator(LogLocator(subs=(1,) if wide else (1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
