"""The commands of batonctl for dead jobs."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from batond.clients import cli_complete, cli_output, cli_print
from batond.clients.cli_input import JsonOption, open_client
from batond.clients.errors import NotFoundError

if TYPE_CHECKING:
    from batond.clients.client import Client
    from batond.clients.dead import DeadJob

MOST_A_PAGE = 200

dead_app = typer.Typer(
    name="dead",
    help="Look at what was given up for good, run it again or throw it away.",
    no_args_is_help=True,
)


@dead_app.command("list")
def list_dead(
    ctx: typer.Context,
    *,
    limit: Annotated[int, typer.Option(min=1, help="Most entries to show.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """List dead jobs of all tenants, newest first, with the evidence."""
    with open_client(ctx) as client:
        found = list(islice(client.dead_jobs(page_size=min(limit, MOST_A_PAGE)), limit))
    if not found and not as_json:
        typer.echo("there are no dead jobs", err=True)
    for one in found:
        if as_json:
            typer.echo(cli_output.to_json(one))
        else:
            _show(one)


@dead_app.command("retry")
def retry(
    ctx: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="The entry's name, as `dead list` shows it.",
            autocompletion=cli_complete.dead_jobs,
        ),
    ],
    *,
    as_json: JsonOption = False,
) -> None:
    """Let a dead job run again, from its committed tokens and with fresh attempts."""
    with open_client(ctx) as client:
        cli_print.brief(client.retry_dead_job(name), as_json=as_json)


@dead_app.command("drop")
def drop(
    ctx: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID]",
            help="The entry's name, as `dead list` shows it.",
            autocompletion=cli_complete.dead_jobs,
        ),
    ] = None,
    *,
    drop_all: Annotated[bool, typer.Option("--all", help="Drop all that are in the list now.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --all: don't ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Throw a dead job away, with what it has put out; or all of them."""
    if (name is None) is not drop_all:
        raise typer.BadParameter("name one entry, or give --all")
    with open_client(ctx) as client:
        if name is not None:
            client.drop_dead_job(name)
        dropped = [name] if name is not None else _drop_all(client, ask=not yes)
    if as_json:
        typer.echo(cli_output.to_json({"dropped": dropped}))
    else:
        typer.echo(f"{len(dropped) if name is None else name} dropped")


def _drop_all(client: Client, *, ask: bool) -> list[str]:
    """Drops what is listed before anybody is asked: that alone was agreed to. Gives the names."""
    names = [one.name for one in client.dead_jobs(page_size=MOST_A_PAGE)]
    if names and ask:
        typer.confirm(
            f"Throw {len(names)} dead jobs away, with what they have put out?", abort=True, err=True
        )
    dropped = []
    for name in names:
        try:
            client.drop_dead_job(name)
        except NotFoundError:  # Somebody else was faster.
            continue
        dropped.append(name)
    return dropped


def _show(one: DeadJob) -> None:
    """Prints an entry as a block: evidence has lines of its own."""
    attempts = f"{one.attempts} attempt{'' if one.attempts == 1 else 's'}" if one.attempts else ""
    facts = {
        "died": one.died_time.isoformat(sep=" ", timespec="seconds") if one.died_time else "unknown",
        "why": f"{one.message} [{one.reason}]",
        "class": ", ".join(filter(None, (one.sla_class, attempts))),
        "retry": "possible" if one.can_retry else f"not possible: {one.obstacle}",
    }
    lines = [f"  {name:9}{value}" for name, value in facts.items() if value]
    lines += [f"  {'evidence' if number == 0 else '':9}{line}" for number, line in enumerate(one.evidence)]
    cli_print.console().print(Text("\n".join([one.name, *lines])), soft_wrap=True)
