"""The command `batond doctor`."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path  # noqa: TC003 - typer reads annotations at run time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from batond.daemon.config_load import load_settings, parse_assignments
from batond.daemon.doctor.configured import CONFIGURED
from batond.daemon.doctor.report import Finding, Level, as_object, findings_of
from batond.daemon.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from batond.daemon.config import Settings

STYLES: Final = {Level.OK: "green", Level.WARNING: "yellow", Level.FAULT: "red"}
CONFIGURATION: Final = "configuration"
UNIT: Final = "batond.service"
#: Said with more by checks of their own.
_ELSEWHERE: Final = {"model", "tls files", "device", "queue"}


def doctor(
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="TOML file; else BATOND_CONFIG, else /etc/batond/batond.toml."),
    ] = None,
    *,
    assign: Annotated[
        list[str] | None, typer.Option("--set", help="Any key, such as engine.rows=4; may be repeated.")
    ] = None,
    unit: Annotated[
        str, typer.Option(help="The systemd unit whose limits count, such as batond@0.service.")
    ] = UNIT,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one value a line.")] = False,
) -> None:
    """Look at all that the daemon needs, whether it runs or not, and say what to do. Changes nothing.

    Exit code 0: no fault, though there may be warnings; 1: a fault. The daemon's own user sees what it will
    see: sudo -u batond batond doctor
    """
    findings = examine(config, assign or (), unit)
    if as_json:
        found = list(findings)
        typer.echo(json.dumps(as_object(found), ensure_ascii=False))
    else:
        found = [_shown(one) for one in findings]
        counts = {level: sum(one.level is level for one in found) for level in Level}
        typer.echo(
            f"{counts[Level.OK]} ok, {counts[Level.WARNING]} to look at, {counts[Level.FAULT]} at fault"
        )
    if any(one.level is Level.FAULT for one in found):
        raise typer.Exit(1)


def examine(config: Path | None, assignments: Iterable[str], unit: str) -> Iterator[Finding]:
    """Looks at everything, and gives what it finds as it finds it.

    Args:
        config: As `load_settings` takes it.
        assignments: As of `--set`.
        unit: The systemd unit.
    """
    try:
        settings = load_settings(config, parse_assignments(assignments))
    except ConfigError as error:
        for fault in error.message.split("; "):
            yield Finding(CONFIGURATION, Level.FAULT, fault)
        yield Finding(
            CONFIGURATION, Level.WARNING, "nothing else was looked at", "mend the configuration first"
        )
        return
    yield Finding(CONFIGURATION, Level.OK, "it can be read, and makes sense")
    for check, configured in CONFIGURED.items():
        if check not in _ELSEWHERE:
            yield from findings_of(check, functools.partial(_configured, check, configured, settings))
    for check, look in _looks(settings, unit):
        yield from findings_of(check, look)


def _configured(check: str, configured: Callable[[Settings], str], settings: Settings) -> Iterator[Finding]:
    yield Finding(check, Level.OK, configured(settings))


def _looks(settings: Settings, unit: str) -> Iterator[tuple[str, Callable[[], Iterable[Finding]]]]:
    """The checks, imported only now: some bring libraries that take a second."""
    from batond.daemon.doctor import (  # noqa: PLC0415 - as said
        cards,
        certificates,
        disks,
        ports,
        redis_servers,
        systemd_unit,
        weights,
    )

    yield weights.CHECK, functools.partial(weights.look, settings)
    yield redis_servers.CHECK, functools.partial(redis_servers.look, settings)
    yield disks.CHECK, functools.partial(disks.look, settings)
    yield ports.CHECK, functools.partial(ports.look, settings)
    yield certificates.CHECK, functools.partial(certificates.look, settings)
    yield cards.CARD, functools.partial(cards.look, settings, unit)
    yield systemd_unit.CHECK, functools.partial(systemd_unit.look, settings, unit)


def _shown(one: Finding) -> Finding:
    level = typer.style(f"{one.level:8}", fg=STYLES[one.level])
    typer.echo(f"{level} {one.check:16} {one.message}")
    if one.advice:
        typer.echo(f"{'':26}-> {one.advice}")
    sys.stdout.flush()
    return one
