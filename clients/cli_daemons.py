"""The commands of batonctl for daemons: what one is, that it shall stop, and which there are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from batond.clients import cli_output, cli_print
from batond.clients.cli_input import JsonOption, open_client

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batond.clients.daemons import DaemonInfo


def drain(
    ctx: typer.Context,
    *,
    drain_timeout_s: Annotated[
        float | None,
        typer.Option("--for", min=0.0, metavar="SECONDS", help="How long running jobs may take to finish."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Tell the daemon to take no more jobs, finish or hand back what it has, and stop."""
    with open_client(ctx) as client:
        running = client.drain(drain_timeout_s)
    if as_json:
        typer.echo(cli_output.to_json({"running_jobs": running}))
    else:
        typer.echo(f"draining; jobs in the engine: {running}")


def info(ctx: typer.Context, *, as_json: JsonOption = False) -> None:
    """Show what the daemon serves, and within which limits."""
    with open_client(ctx) as client:
        found = client.server_info()
    if as_json:
        typer.echo(cli_output.to_json(found))
    else:
        cli_print.table(cli_output.info_table(found))


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
