"""The command `batond install-service`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from batond.daemon.errors import ConfigError
from batond.systemd.install import (
    CONFIG,
    NAMED_MODELS,
    carry_out,
    check_host,
    installation,
    removal,
    running_program,
)

LEFT = (
    """left as they are: the user batond, {root}etc/batond, {root}var/lib/batond*, {root}var/cache/batond"""
)
NEXT = """next: set model.path in {config}, then  systemctl enable --now batond"""


def install_service(  # noqa: PLR0917 - typer passes by name
    model: Annotated[str, typer.Option(help="Becomes model.path of a new configuration.")] = "",
    start: Annotated[  # noqa: FBT002 - typer wants a default
        bool, typer.Option("--now", help="Check the configuration, enable the service and start it.")
    ] = False,
    uninstall: Annotated[  # noqa: FBT002 - typer wants a default
        bool,
        typer.Option("--uninstall", help="Stop the service and remove it; configuration and state stay."),
    ] = False,
    dry_run: Annotated[  # noqa: FBT002 - typer wants a default
        bool, typer.Option("--dry-run", help="Tell what would be done, and do nothing.")
    ] = False,
    root: Annotated[
        Path, typer.Option(help="Root folder of a system that does not run, such as an image.")
    ] = Path("/"),
    program: Annotated[
        str, typer.Option(help="Path of batond as the service will see it; this one if empty.")
    ] = "",
) -> None:
    """Set batond up under systemd: user, folders, units, an example configuration. May be repeated.

    What is in force already stays, a configuration that is there is never overwritten.
    """
    if uninstall and (model or start or program):
        raise ConfigError("--uninstall goes with --root and --dry-run alone")
    root = root.absolute()
    if not dry_run:
        check_host(root)
    if uninstall:
        carry_out(removal(root), root, dry_run=dry_run, tell=typer.echo)
        typer.echo(LEFT.format(root=f"{root}/".replace("//", "/")))
        return
    if model and model not in NAMED_MODELS:
        model = str(Path(model).absolute())
        if root == Path("/") and not Path(model).exists():
            raise ConfigError(f"there is no model at {model}")
    steps = installation(root, program=program or running_program(), model=model, start=start)
    kept = model and (root / CONFIG).exists()
    carry_out(steps, root, dry_run=dry_run, tell=typer.echo)
    if kept:
        typer.echo(f"model.path is what {root / CONFIG} says: a configuration that is there is kept")
    if not start:
        typer.echo(NEXT.format(config=root / CONFIG))
