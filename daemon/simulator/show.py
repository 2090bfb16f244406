"""Reports as tables, JSON and a plot."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from batond.daemon.errors import ConfigError
from batond.daemon.simulator.report import tpot_s, ttft_s

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rich.console import Console

    from batond.daemon.simulator.engine import Query
    from batond.daemon.simulator.report import Report, Spread
    from batond.daemon.simulator.world import Outcome


def print_tables(console: Console, reports: Sequence[Report]) -> None:
    """Print policies side by side: a line for each class, tenant and policy, then one for each policy."""
    latency = _table("latency", ["", "policy"], _numbered("TTFT", "s") + _numbered("TPOT", "ms"))
    names = ["requests", "late", "refused", "in target", "goodput/s", "tokens/s", "parks", "starved s"]
    service = _table("service", ["", "policy"], names)
    for same in zip(*(one.groups for one in reports), strict=True):
        for one, group in zip(reports, same, strict=True):
            head = (f"  {group.tenant}" if group.tenant else group.sla_class, one.policy)
            latency.add_row(*head, *_cells(group.ttft_s, 1), *_cells(group.tpot_s, 1000))
            service.add_row(
                *head,
                str(group.requests),
                str(group.late),
                str(group.refused),
                f"{group.met:.1%}",
                f"{group.goodput_per_s:.2f}",
                f"{group.tokens_per_s:.0f}",
                str(group.parks),
                f"{group.starved_s:.1f}",
            )
        latency.add_section()
        service.add_section()
    for table in (latency, service, _totals(reports)):
        console.print(table)


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right")
    return table


def _numbered(name: str, unit: str) -> list[str]:
    return [f"{name} p{part} {unit}" for part in (50, 90, 99)]


def _totals(reports: Sequence[Report]) -> Table:
    names = [
        "seconds",
        "tokens/s",
        "busy",
        "rows taken",
        "parks",
        "recomputed",
        "late",
        "refused",
        "Jain",
        "starved s",
    ]
    table = _table("in all", ["policy"], names)
    for one in reports:
        table.add_row(
            one.policy,
            f"{one.duration_s:.0f}",
            f"{one.tokens_per_s:.0f}",
            "-" if math.isnan(one.busy) else f"{one.busy:.0%}",
            "-" if math.isnan(one.rows_taken) else f"{one.rows_taken:.0%}",
            str(one.parks),
            str(one.recomputes),
            str(one.late),
            str(one.refused),
            "-" if math.isnan(one.jain) else f"{one.jain:.3f}",
            f"{one.starved_s:.1f}",
        )
    return table


def _cells(values: Spread, factor: float) -> list[str]:
    each = (values.p50 * factor, values.p90 * factor, values.p99 * factor)
    return ["-" if math.isnan(value) else f"{value:.3g}" for value in each]


def as_json(reports: Sequence[Report], **about: object) -> str:
    """All figures; what there is none of is null."""
    return json.dumps({**about, "policies": [_plain(asdict(one)) for one in reports]}, indent=2)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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


def plot(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Draw how many requests of each class got their first token, and their tokens, within a time.

    Raises:
        ConfigError: Matplotlib is missing, the ending names no format, or the file can't be written.
    """
    names = [
        name
        for name in outcomes[0].setup.classes.names
        if any(query.sla.name == name and query.served for query in outcomes[0].queries)
    ]
    figure = load_plotter()(figsize=(9, 3 * len(names)), layout="constrained")
    axes = figure.subplots(len(names), 2, squeeze=False)
    for row, name in zip(axes, names, strict=True):
        sla = outcomes[0].setup.classes.get(name)
        _curves(row[0], outcomes, name, ttft_s, sla.ttft_target_s)
        row[0].set(xlabel="time to first token, s", ylabel=f"part of {name}")
        _curves(row[1], outcomes, name, tpot_s, sla.tpot_target_s)
        row[1].set(xlabel="time per token, s")
        row[0].legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plot {path} can't be written: {error}", field="plot") from error


def _curves(
    axes: Any, outcomes: Sequence[Outcome], name: str, measure: Callable[[Query], float], target_s: float
) -> None:
    for outcome in outcomes:
        values = sorted(
            value
            for query in outcome.queries
            if query.sla.name == name and query.served and not math.isnan(value := measure(query))
        )
        parts = [(place + 1) / len(values) for place in range(len(values))]
        axes.plot(values, parts, label=outcome.policy)
    axes.axvline(target_s, color="grey", linestyle=":", label="target")
    axes.set_xscale("log")
    axes.grid(visible=True, alpha=0.3)
