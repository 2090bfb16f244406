"""What the doctor finds, and how it is told."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from batond.daemon.errors import BatondError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class Level(enum.StrEnum):
    """How bad it is: a warning lets a daemon run, a fault does not, or not for long."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: What it belongs to; scripts may compare it.
        level: How bad it is.
        message: What was found.
        advice: What to do; empty where nothing is, or the message says it.
    """

    check: str
    level: Level
    message: str
    advice: str = ""


def findings_of(check: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Looks; an error of ours is a fault, and any other one keeps nobody from looking at the rest."""
    try:
        yield from look()
    except BatondError as error:
        yield Finding(check, Level.FAULT, error.message)
    except Exception as error:  # noqa: BLE001 - a doctor that dies tells nothing
        yield Finding(
            check, Level.WARNING, f"could not be looked at: {type(error).__name__}: {error}", "report this"
        )


def as_object(findings: Iterable[Finding]) -> dict[str, Any]:
    """The shape of `--json`; docs/batonctl.md has it."""
    found = list(findings)
    return {
        "ok": not any(one.level is Level.FAULT for one in found),
        "counts": {level.value: sum(one.level is level for one in found) for level in Level},
        "checks": [asdict(one) for one in found],
    }
