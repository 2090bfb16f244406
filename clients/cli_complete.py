"""What the shell may offer behind a command: names that the daemon knows, asked for when TAB is pressed.

A shell that completes must neither hang nor show errors: a daemon that does not answer soon offers nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import typer

from batond.clients.errors import BatondClientError
from batond.clients.model import JobState
from batond.clients.retry import RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from batond.clients.client import Client

TIMEOUT_S: Final = 1.0
MOST_OFFERED: Final = 50
VARIABLE: Final = "_BATONCTL_COMPLETE"  # By which typer knows that a shell asks, and for what.
#: Some shells evaluate what they are offered: anything else is left out, whatever a daemon says.
PLAIN: Final = re.compile(r"[A-Za-z0-9._:/@%-]+( [A-Za-z0-9._:/@%-]+)*")
SETTINGS: Final = (
    "server",
    "token",
    "token_file",
    "root_ca",
    "certificate",
    "key",
    "tls",
    "timeout_s",
    "allow_plaintext_token",
)

Offer = list[tuple[str, str]]


def job_ids(ctx: typer.Context, incomplete: str) -> Offer:
    """Jobs of the caller's tenant, newest first."""
    return _ask(
        ctx,
        incomplete,
        lambda client: (
            (job.job_id, f"{job.state} {job.effective_sla_class}".strip())
            for job in client.list(page_size=MOST_OFFERED)
        ),
    )


def sla_classes(ctx: typer.Context, incomplete: str) -> Offer:
    """Classes of service, most urgent first."""
    return _ask(
        ctx, incomplete, lambda client: ((one.name, "class") for one in client.server_info().sla_classes)
    )


def policies(ctx: typer.Context, incomplete: str) -> Offer:
    """Registered policies."""
    return _ask(ctx, incomplete, lambda client: ((name, "policy") for name in client.policy().known_policies))


def tenants(ctx: typer.Context, incomplete: str) -> Offer:
    """Tenants, for administrators."""
    return _ask(
        ctx,
        incomplete,
        lambda client: (
            (one.name, "disabled tenant" if one.disabled else "tenant") for one in client.tenants()
        ),
    )


def dead_jobs(ctx: typer.Context, incomplete: str) -> Offer:
    """Entries of the dead-letter list, for administrators."""
    return _ask(
        ctx,
        incomplete,
        lambda client: ((one.name, one.reason) for one in client.dead_jobs(page_size=MOST_OFFERED)),
    )


def states(incomplete: str) -> list[str]:
    """States of jobs."""
    return [
        state.value
        for state in JobState
        if state is not JobState.UNKNOWN and state.value.startswith(incomplete.lower())
    ]


def script(shell: str, call: Callable[[], Any]) -> None:
    """Prints the script that teaches a shell to complete.

    Args:
        shell: bash, zsh or fish.
        call: Runs the command line; it sees by the environment what is wanted, prints, and exits.
    """
    os.environ[VARIABLE] = f"source_{shell}"
    printed = io.StringIO()
    try:
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(printed):
            call()
    finally:
        del os.environ[VARIABLE]
    # What names a file's purpose to zsh must be its first line.
    typer.echo(printed.getvalue().strip())


def _ask(ctx: typer.Context, incomplete: str, names: Callable[[Client], Iterable[tuple[str, str]]]) -> Offer:
    """Asks the daemon that the options typed so far and the environment name."""
    from batond.clients.cli_input import settings_of  # noqa: PLC0415 -- it names these functions itself

    root = ctx.find_root()
    try:
        settings = settings_of(
            root,  # type: ignore[arg-type] # click's own class is as good
            **{name: root.params.get(name) for name in SETTINGS},  # type: ignore[arg-type] # as typed
        )
        settings = dataclasses.replace(settings, timeout_s=TIMEOUT_S)
        with settings.client(RetryPolicy(attempts=1)) as client:
            fitting = (
                (name, what if PLAIN.fullmatch(what) else "")
                for name, what in islice(names(client), MOST_OFFERED)
                if name.startswith(incomplete) and PLAIN.fullmatch(name) and " " not in name
            )
            return list(fitting)
    except (BatondClientError, OSError, ValueError):
        return []
