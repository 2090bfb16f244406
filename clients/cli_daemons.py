"""The command of batonctl for the daemons of a queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from rich.table import Table
from rich.text import Text

from batond.clients import cli_output, cli_print
from batond.clients.cli_input import JsonOption, open_client

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batond.clients.daemons import DaemonInfo


def daemons(ctx: typer.Context, *, as_json: JsonOption = False) -> None:
    """List the daemons that share the daemon's Redis, of all models."""
    with open_client(ctx) as client:
        found = client.daemons()
    if not as_json:
        cli_print.table(_table(found))
        return
    for one in found:
        typer.echo(cli_output.to_json(one))


def _table(found: Iterable[DaemonInfo]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("model", "address", "state", "rows", "jobs", "version", "since", "daemon"):
        table.add_column(name, no_wrap=True, justify="right" if name in {"rows", "jobs"} else "left")
    for one in found:
        since = one.start_time.isoformat(sep=" ", timespec="seconds")
        cells = (one.model, one.address or "-", one.state, one.rows, one.running_jobs, one.version, since)
        table.add_row(*(Text(str(cell)) for cell in (*cells, one.daemon_id)))
    return table
