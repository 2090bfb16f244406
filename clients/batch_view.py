"""Draws a snapshot of the batch for a terminal. Pure: a value in, a rich renderable out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.columns import Columns
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from batond.clients.batch import GovernorState, QueryState

if TYPE_CHECKING:
    from rich.console import RenderableType

    from batond.clients.batch import BatchSnapshot, MemorySnapshot, QuerySnapshot, RowSnapshot

#: Colours of the default classes; an operator's own classes have none.
CLASS_STYLES: Final = {"interactive": "bold green", "standard": "cyan", "batch": "yellow"}
STATE_STYLES: Final = {
    QueryState.WAITING: "dim",
    QueryState.PREFILLING: "blue",
    QueryState.READY: "green",
    QueryState.PARKED: "magenta",
}
GOVERNOR_STYLES: Final = {
    GovernorState.SHRINKING: "yellow",
    GovernorState.CRITICAL: "bold red",
    GovernorState.LOST: "red",
}
BAR_WIDTH: Final = 16
MIB: Final = 1 << 20
COUNTERS: Final = ("parks", "resumes", "recomputed_tokens", "decode_steps", "idle_row_steps")


def render(
    snapshot: BatchSnapshot, *, title: str = "batond", max_queries: int = 12, framed: bool = True
) -> RenderableType:
    """Draws rows, the queries that own none, and the host pool.

    Args:
        snapshot: The batch.
        title: What stands at the top.
        max_queries: Most queries without a row to list; further ones are counted.
        framed: Fill the terminal's width, in a frame; else take as much room as is needed.
    """
    busy = sum(1 for row in snapshot.rows if row.job_id)
    heading = f"{title}  step {snapshot.step}  rows {busy}/{len(snapshot.rows)}  columns {snapshot.columns}"
    body = Group(_table(snapshot, max_queries, expand=framed), _footer(snapshot))
    if not framed:
        return Group(Text(heading), body)
    return Panel(body, title=Text(heading), title_align="left", border_style="dim")


def _table(snapshot: BatchSnapshot, max_queries: int, *, expand: bool) -> Table:
    table = Table(box=None, expand=expand, pad_edge=False, header_style="dim")
    table.add_column("row", justify="right", min_width=3)
    # The id gives way first where the terminal is narrow: a tenant knows its jobs by their first characters.
    table.add_column("query", no_wrap=True, overflow="ellipsis", ratio=1)
    for name in ("tenant", "class", "state"):
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    table.add_column("parks", justify="right", no_wrap=True)
    table.add_column("host RAM", justify="right", no_wrap=True)
    table.add_column("tokens", no_wrap=True, min_width=BAR_WIDTH + 8)
    for row in snapshot.rows:
        table.add_row(*_row(row))
    if snapshot.queries:
        table.add_section()
        table.add_row("", Text("no row:", "dim"))
    for query in snapshot.queries[:max_queries]:
        table.add_row(*_query(query))
    left = len(snapshot.queries) - max_queries
    if left > 0:
        table.add_row("", Text(f"and {left} more", "dim"))
    return table


# Names are tenants' own words: they go in as Text, so that no bracket in them is taken for markup.


def _row(row: RowSnapshot) -> list[RenderableType]:
    if not row.job_id:
        return [str(row.row), "", "", "", Text("idle", "dim")]
    return [
        str(row.row),
        Text(_name(row)),
        Text(row.tenant),
        Text(row.sla_class, _class_style(row.sla_class)),
        str(QueryState.RUNNING),
        "",
        "",
        _tokens(row.output_tokens, row.max_tokens),
    ]


def _query(query: QuerySnapshot) -> list[RenderableType]:
    state = f"{query.state} (held)" if query.held else str(query.state)
    if query.state is QueryState.PREFILLING:
        state = f"{state} {query.prefilled_tokens}/{query.prompt_tokens}"
    return [
        "",
        Text(_name(query)),
        Text(query.tenant),
        Text(query.sla_class, _class_style(query.sla_class)),
        Text(state, STATE_STYLES.get(query.state, "")),
        str(query.parks),
        _mebibytes(query.parked_bytes) if query.parked_bytes else "",
        _tokens(query.output_tokens, query.max_tokens),
    ]


def _name(owner: RowSnapshot | QuerySnapshot) -> str:
    return f"{owner.job_id}#{owner.choice}" if owner.choice else owner.job_id


def _footer(snapshot: BatchSnapshot) -> RenderableType:
    pool = f"host pool {_mebibytes(snapshot.host_pool_used_bytes)} of {_mebibytes(snapshot.host_pool_bytes)}"
    parts = [Text(pool, "magenta" if snapshot.host_pool_used_bytes else "dim")]
    if snapshot.memory is not None:
        parts += _memory(snapshot.memory)
    parts.append(Text(f"queued jobs {snapshot.queued_jobs}", "dim"))
    parts.extend(
        Text(f"{name.replace('_', ' ')} {snapshot.counters[name]:g}", "dim")
        for name in COUNTERS
        if name in snapshot.counters
    )
    return Columns(parts, padding=(0, 3))


def _memory(memory: MemorySnapshot) -> list[Text]:
    """Where KV lies besides the host pool, and what the governor makes of the memory that is left."""
    kv = f"KV {_mebibytes(memory.committed_bytes)}"
    if memory.kv_budget_bytes is not None:
        kv += f" of {_mebibytes(memory.kv_budget_bytes)}"
    parts = [Text(kv, "dim")]
    if memory.pooled_bytes:
        parts.append(Text(f"pooled {_mebibytes(memory.pooled_bytes)}", "dim"))
    if memory.spilled_bytes:
        parts.append(Text(f"on disk {_mebibytes(memory.spilled_bytes)}", "magenta"))
    if memory.governor not in {GovernorState.OFF, GovernorState.UNKNOWN}:
        free = f"free {_mebibytes(memory.free_bytes)} of {_mebibytes(memory.total_bytes)}"
        parts.append(Text(free, "dim"))
        words = f"rows at most {memory.row_limit}, {memory.governor}: {memory.reason}"
        parts.append(Text(words, GOVERNOR_STYLES.get(memory.governor, "dim")))
    return parts


def _tokens(output_tokens: int, max_tokens: int) -> Text:
    if not max_tokens:
        return Text(str(output_tokens))
    filled = min(BAR_WIDTH, BAR_WIDTH * output_tokens // max_tokens)
    bar = Text("━" * filled, "green").append("┄" * (BAR_WIDTH - filled), "bright_black")
    return bar.append(f" {output_tokens}/{max_tokens}", "default")


def _class_style(sla_class: str) -> str:
    return CLASS_STYLES.get(sla_class, "")


def _mebibytes(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.1f} MiB"
