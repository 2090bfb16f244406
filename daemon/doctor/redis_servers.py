"""The queue's servers: those that are named, or the private one that would be started."""

from __future__ import annotations

import asyncio
import re
import subprocess
from typing import TYPE_CHECKING, Final

from batond.daemon.doctor.report import Finding, Level
from batond.daemon.errors import BatondError, ConfigError
from batond.daemon.queue.check import MIN_VERSION, check_target
from batond.daemon.queue.embedded import find_server
from batond.daemon.queue.target import target_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batond.daemon.config import Settings

CHECK: Final = "redis"
TIMEOUT_S: Final = 3.0
#: What a warning of `check_target` is about, in words, and what to do.
_WARNINGS: Final = {
    "redis_policy_unknown": (
        "maxmemory-policy is not told to this user",
        "make sure that it is noeviction, or let the user ask: ACL SETUSER ... +info +config|get",
    ),
    "redis_without_aof": (
        "nothing is appended to a file: accepted jobs are lost if Redis dies",
        "set appendonly yes",
    ),
    "redis_replica_away": ("a replica does not answer", "start it, or take it out of the topology"),
}


def look(settings: Settings) -> Iterator[Finding]:
    """Version, topology, what it does when its memory is full, persistence, rights."""
    if settings.queue.named:
        yield from _named(settings)
    else:
        yield _private()


def _named(settings: Settings) -> Iterator[Finding]:
    warned: list[Finding] = []

    def warn(event: str, **facts: object) -> None:
        words, advice = _WARNINGS.get(event, (event, ""))
        place = facts.get("server") or facts.get("replica")
        warned.append(Finding(CHECK, Level.WARNING, f"{place}: {words}", advice))

    target = target_of(settings.queue)
    asked = check_target(target, replicas=settings.queue.wait_replicas, timeout_s=TIMEOUT_S, warn=warn)
    try:
        about = asyncio.run(asked)
    except ConfigError as error:
        yield Finding(CHECK, Level.FAULT, error.message)
    except BatondError as error:
        advice = "start it, or mend [queue]; where it is reached by a name, is the name known here?"
        yield Finding(CHECK, Level.FAULT, error.message, advice)
    else:
        known = "" if any("maxmemory" in one.message for one in warned) else ", evicts nothing"
        yield Finding(CHECK, Level.OK, f"{about}{known}, the user may do all that the queue does")
    yield from warned


def _private() -> Finding:
    server = find_server()
    try:
        told = subprocess.run(  # noqa: S603 - what the daemon itself would start
            [str(server), "--version"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(CHECK, Level.FAULT, f"{server} can't be run: {error}", "install Redis or Valkey anew")
    version = re.search(r"v=(\d+)\.(\d+)\.?(\d*)", told)
    if version is None or tuple(int(part) for part in version.groups()[:2]) < MIN_VERSION:
        return Finding(
            CHECK, Level.FAULT, f"{server} is too old, or no Redis: {told.strip()!r}", "install 6.2 or newer"
        )
    return Finding(CHECK, Level.OK, f"a private one will be started: {server}, version {version[0][2:]}")
