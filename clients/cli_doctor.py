"""The command `batonctl doctor`: a door to `batond doctor`, which knows the daemon's configuration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path  # noqa: TC003 -- typer reads annotations at run time
from typing import Annotated

import typer

from batond.clients.cli_input import JsonOption  # noqa: TC001 -- as above


def doctor(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", metavar="FILE", help="As of `batond serve`.")
    ] = None,
    *,
    assign: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of it; repeatable.")
    ] = None,
    unit: Annotated[str | None, typer.Option(help="The systemd unit whose limits count.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Look at all that a daemon on this host needs, whether it runs or not, and say what to do.

    It is `batond doctor`: it reads the daemon's configuration, asks no daemon by --server, and needs what the
    daemon needs to be installed. Exit code 1 says that there is a fault.
    """
    options = [] if config is None else ["--config", str(config)]
    for one in assign or ():
        options += ["--set", one]
    if unit is not None:
        options += ["--unit", unit]
    if as_json:
        options.append("--json")
    # The clients import nothing of the daemon: it is another program, of the same interpreter.
    command = [sys.executable, "-m", "batond.daemon", "doctor", *options]
    raise typer.Exit(subprocess.run(command, check=False).returncode)  # noqa: S603 -- our own program
