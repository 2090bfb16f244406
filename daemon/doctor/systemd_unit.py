"""The limits of the systemd unit that the daemon would run in."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Final

from batond.daemon.doctor.report import Finding, Level

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from batond.daemon.config import Settings

CHECK: Final = "systemd"
TIMEOUT_S: Final = 5.0
#: A connection a client, and some for Redis, the model's files and the engine.
FEWEST_FILES: Final = 4096
_LIMITS: Final = ("LimitMEMLOCK", "LimitNOFILE", "MemoryMax")
_PROPERTIES: Final = ("LoadState", "ActiveState", "TimeoutStopUSec", *_LIMITS)
_NO_LIMIT: Final = str((1 << 64) - 1)  # What some releases say instead of infinity.
_SECONDS: Final = {
    "y": 31_557_600.0,
    "month": 2_629_800.0,
    "w": 604_800.0,
    "d": 86_400.0,
    "h": 3600.0,
    "min": 60.0,
    "s": 1.0,
    "ms": 0.001,
    "us": 0.000_001,
}


def look(settings: Settings, unit: str) -> Iterator[Finding]:
    """Limits that are too tight for what is configured."""
    properties = unit_properties(unit)
    if not properties:
        yield Finding(
            CHECK, Level.OK, f"there is no unit {unit} here: nothing bounds the daemon but this shell"
        )
        return
    problems = list(_problems(settings, unit, properties))
    yield from problems
    if not problems:
        state = properties.get("ActiveState", "unknown")
        yield Finding(CHECK, Level.OK, f"{unit} is {state}, its limits fit the configuration")


def _problems(settings: Settings, unit: str, properties: Mapping[str, str]) -> Iterator[Finding]:
    files = properties.get("LimitNOFILE", "infinity")
    if files.isdecimal() and int(files) < FEWEST_FILES:
        yield Finding(
            CHECK, Level.WARNING, f"{unit}: LimitNOFILE is {files}", f"LimitNOFILE=65536 ({_edit(unit)})"
        )
    stop_s, drain_s = seconds(properties.get("TimeoutStopUSec", "")), settings.service.drain_timeout_s
    if stop_s is not None and stop_s <= drain_s:
        yield Finding(
            CHECK,
            Level.FAULT,
            f"{unit}: TimeoutStopSec is {stop_s:g} s, and a drain may take {drain_s:g} s: it would be killed",
            f"TimeoutStopSec={drain_s + 60:.0f} ({_edit(unit)}), or a shorter service.drain_timeout_s",
        )
    memory, pool = properties.get("MemoryMax", "infinity"), settings.engine.host_pool_bytes
    if memory.isdecimal() and pool != "auto" and int(memory) < int(pool):
        yield Finding(
            CHECK,
            Level.FAULT,
            f"{unit}: MemoryMax is {memory} bytes, the host pool alone has {int(pool)}",
            f"a larger MemoryMax= ({_edit(unit)}), or a smaller engine.host_pool_bytes",
        )


@functools.cache
def unit_properties(unit: str) -> Mapping[str, str]:
    """What systemd says of a unit; empty where there is no systemd, or no such unit."""
    program = shutil.which("systemctl")
    if program is None:
        return {}
    command = [program, "show", unit, f"--property={','.join(_PROPERTIES)}"]
    try:
        told = subprocess.run(  # noqa: S603 - the unit's name is one argument, no shell
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found = dict(line.split("=", 1) for line in told.splitlines() if "=" in line)
    if found.get("LoadState") != "loaded":
        return {}
    return found | {name: "infinity" for name in _LIMITS if found.get(name) == _NO_LIMIT}


def seconds(span: str) -> float | None:
    """Reads a time as systemd prints it, such as "1min 30s"; None of "infinity", or of what is none."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([a-z]+)", span)
    if not parts or any(unit not in _SECONDS for _, unit in parts):
        return None
    return sum(float(count) * _SECONDS[unit] for count, unit in parts)


def _edit(unit: str) -> str:
    return f"systemctl edit {unit}"
