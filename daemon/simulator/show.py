"""Reports as tables and JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from batond.daemon.simulator.report import Report, Spread


def print_tables(console: Console, reports: Sequence[Report]) -> None:
    """Print policies side by side: a line for each class, tenant and policy, then one for each policy."""
    columns = [*_numbered("TTFT", "s"), *_numbered("TPOT", "ms"), *_numbered("end to end", "s")]
    latency = _table("latency", ["", "policy"], columns)
    names = ["requests", "late", "refused", "in target", "goodput/s", "tokens/s", "parks", "starved s"]
    service = _table("service", ["", "policy"], names)
    for line in _groups(reports):
        pairs = [(one, group) for one in reports for group in one.groups]
        for one, group in pairs:
            if (group.sla_class, group.tenant) != line:
                continue
            head = (f"  {group.tenant}" if group.tenant else group.sla_class, one.policy)
            latency.add_row(
                *head, *_cells(group.ttft_s, 1), *_cells(group.tpot_s, 1000), *_cells(group.e2e_s, 1)
            )
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


def _groups(reports: Sequence[Report]) -> list[tuple[str, str]]:
    """Class and tenant of every group of any report, as the one with most of them has them."""
    longest = max(reports, key=lambda one: len(one.groups))
    found = dict.fromkeys((group.sla_class, group.tenant) for group in longest.groups)
    found |= dict.fromkeys((group.sla_class, group.tenant) for one in reports for group in one.groups)
    return list(found)


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right")
    return table


def _numbered(name: str, unit: str) -> list[str]:
    return [f"{name}\np{part} {unit}" for part in (50, 90, 99)]


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
    return [_figure(value) for value in each]


def _figure(value: float) -> str:
    """Three digits that count, never an exponent."""
    if math.isnan(value):
        return "-"
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"  # noqa: PLR2004 - where :g takes one


def as_json(reports: Sequence[Report], **about: object) -> str:
    """All figures; what there is none of is null."""
    return json.dumps({**about, "policies": [_plain(asdict(one)) for one in reports]}, indent=2)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
