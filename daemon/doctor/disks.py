"""Directories that must hold what a restart needs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

from batond.daemon.doctor.report import Finding, Level

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batond.daemon.config import Settings

CHECK: Final = "state directory"
MIB, GIB = 1 << 20, 1 << 30
LITTLE_BYTES, TOO_LITTLE_BYTES = GIB, 100 * MIB
_VOLATILE: Final = {"tmpfs", "ramfs"}
_REMOTE: Final = {"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs"}


def look(settings: Settings) -> Iterator[Finding]:
    """The state directory, if a private Redis keeps the jobs in it."""
    place = settings.queue.state_dir.expanduser().absolute()
    if settings.queue.named:
        yield Finding(CHECK, Level.OK, "jobs are kept by the servers of [queue], nothing here")
        return
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    if not os.access(there, os.W_OK | os.X_OK) or not there.is_dir():
        yield Finding(
            CHECK,
            Level.FAULT,
            f"{there} can't be written to by {_me()}",
            "run this as the service's user (sudo -u batond), or set queue.state_dir",
        )
        return
    free = shutil.disk_usage(there).free
    level = Level.FAULT if free < TOO_LITTLE_BYTES else Level.WARNING if free < LITTLE_BYTES else Level.OK
    advice = "" if level is Level.OK else "free some, or set queue.state_dir: a full disk loses accepted jobs"
    missing = "" if there == place else ", which will be made"
    yield Finding(CHECK, level, f"{place}{missing}: {free / GIB:.1f} GiB free", advice)
    kind = file_system(there)
    if kind in _VOLATILE:
        yield Finding(
            CHECK,
            Level.WARNING,
            f"{place} is in memory ({kind}): jobs are lost with the machine",
            "set queue.state_dir",
        )
    elif kind in _REMOTE:
        yield Finding(
            CHECK,
            Level.WARNING,
            f"{place} is on a network file system ({kind}): every step waits for it",
            "set queue.state_dir to a local disk, or queue.url to a Redis server",
        )


def file_system(place: Path) -> str:
    """The kind of the file system that a directory is on; empty if that can't be seen."""
    real = place.resolve()
    mounts = {Path(one.mountpoint): one.fstype for one in psutil.disk_partitions(all=True)}
    return next((mounts[folder] for folder in (real, *real.parents) if folder in mounts), "")


def _me() -> str:
    return f"user {os.geteuid()}"
