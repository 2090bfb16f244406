"""The command `batonctl top`."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer
from rich.live import Live

from batond.clients import batch_view, cli_output, cli_print
from batond.clients.cli_input import JsonOption, open_client


def top(
    ctx: typer.Context,
    *,
    interval_s: Annotated[float, typer.Option(min=0.05, help="Least time between two pictures.")] = 0.25,
    snapshots: Annotated[int, typer.Option(min=0, help="End after so many; 0 goes on for ever.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Watch the batch live: rows, queries without a row, host pool."""
    with open_client(ctx) as client:
        title = f"batond {client.server_info().model}"
        console = cli_print.console()
        # A terminal gets one picture that is drawn over; a pipe gets one after the other.
        live = Live(console=console, auto_refresh=False) if console.is_terminal and not as_json else None
        with live or contextlib.nullcontext():
            for count, snapshot in enumerate(client.watch_batch(interval_s), start=1):
                if as_json:
                    typer.echo(cli_output.to_json(snapshot))
                elif live is not None:
                    live.update(batch_view.render(snapshot, title=title), refresh=True)
                else:
                    framed = console.is_terminal
                    cli_print.table(batch_view.render(snapshot, title=title, framed=framed))
                if count == snapshots:
                    break
