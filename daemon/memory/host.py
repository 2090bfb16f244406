"""How much host memory the host pool may take.

Three limits, the tightest counts: what the system can give without swapping, what the control groups of this
process leave, and, for page-locked memory only, what the process may lock.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from batond.daemon.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Part of the free memory that an explicitly configured pool may take; the rest is for weights that are being
#: loaded, tokenizers, Redis and whatever else grows.
WORKABLE_FRACTION = 0.9
#: Part that an unconfigured pool takes.
AUTO_FRACTION = 0.5
#: Control groups without a limit say "max" (v2) or a number near 2^63 (v1); nobody has this much memory.
UNLIMITED_BYTES = 1 << 60
PAGE_BYTES = resource.getpagesize()
#: Files of limits by version. Above memory.high nothing is killed, but everything is slowed down until it is
#: unusable.
_LIMITS = {1: ("memory.limit_in_bytes",), 2: ("memory.max", "memory.high")}
CAP_IPC_LOCK = 14  # Number of the capability in CapEff; see capabilities(7).


@dataclass(frozen=True, slots=True)
class HostLimits:
    """Bytes left under each limit now.

    Attributes:
        available_bytes: Of the whole system (MemAvailable).
        cgroup_bytes: Of the tightest control group; None without limit.
        memlock_bytes: That this process may still lock; None without limit.
    """

    available_bytes: int
    cgroup_bytes: int | None
    memlock_bytes: int | None

    def tightest(self, *, pin: bool, fraction: float) -> tuple[int, str]:
        """The largest pool, and the limit that sets it.

        Args:
            pin: Whether the pool is page-locked.
            fraction: Part of free memory that may be taken; what may be locked may be locked in full.

        Returns:
            Bytes, a multiple of the page size; "available", "cgroup" or "memlock".
        """
        candidates = [(int(self.available_bytes * fraction), "available")]
        if self.cgroup_bytes is not None:
            candidates.append((int(self.cgroup_bytes * fraction), "cgroup"))
        if pin and self.memlock_bytes is not None:
            candidates.append((self.memlock_bytes, "memlock"))
        nbytes, name = min(candidates)
        return max(nbytes, 0) // PAGE_BYTES * PAGE_BYTES, name


_ADVICE = {
    "available": "the system has no more memory to give",
    "cgroup": "the control group allows no more (MemoryMax= of the unit, or the container's memory limit)",
    "memlock": "RLIMIT_MEMLOCK allows no more (LimitMEMLOCK= of the unit, or `ulimit -l`)",
}


def read_limits() -> HostLimits:
    """Read all limits of this process and system."""
    return HostLimits(
        available_bytes=int(psutil.virtual_memory().available),
        cgroup_bytes=cgroup_free_bytes(),
        memlock_bytes=memlock_free_bytes(),
    )


def check_host_pool(nbytes: int, *, pin: bool, read: Callable[[], HostLimits] = read_limits) -> None:
    """Check that a pool of the configured size can work.

    Args:
        nbytes: Size of the pool.
        pin: Whether it is to be page-locked.
        read: Where the limits come from.

    Raises:
        ConfigError: It can't; message and details (`largest_bytes`, `limit`) say what can.
    """
    if nbytes < 0:
        raise ConfigError(f"a host pool of {nbytes} bytes makes no sense", requested_bytes=nbytes)
    if nbytes == 0:
        return
    largest_bytes, limit = read().tightest(pin=pin, fraction=WORKABLE_FRACTION)
    if nbytes > largest_bytes:
        raise ConfigError(
            f"a {'page-locked ' if pin else ''}host pool of {nbytes} bytes can't work: {_ADVICE[limit]}."
            f" The largest workable value is {largest_bytes} bytes",
            reason="HOST_POOL_TOO_LARGE",
            requested_bytes=nbytes,
            largest_bytes=largest_bytes,
            limit=limit,
        )


def auto_host_pool_bytes(
    *, pin: bool, fraction: float = AUTO_FRACTION, read: Callable[[], HostLimits] = read_limits
) -> int:
    """Size of a pool nobody configured: a part of what is free, within every limit.

    Args:
        pin: Whether it is to be page-locked.
        fraction: Part of free memory, 0 to 1.
        read: Where the limits come from.

    Returns:
        Bytes; 0 if nothing is left.
    """
    if not 0 <= fraction <= 1:
        raise ConfigError(f"a part of {fraction} of the free memory makes no sense", fraction=fraction)
    return read().tightest(pin=pin, fraction=fraction)[0]


def cgroup_free_bytes(root: Path = Path("/")) -> int | None:
    """Bytes the control groups of this process leave, v1, v2 or both.

    Page cache that the kernel drops before it kills anybody (inactive file pages: the weights just read)
    doesn't count as used.

    Args:
        root: Of the file system.

    Returns:
        The least over the group and all its parents; None without limit.
    """
    return CgroupMemory(root).read()[1]


class CgroupMemory:
    """The control groups of this process, found once and read often.

    Args:
        root: Of the file system.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._folders = [
            (folder, version)
            for folder, version in _cgroup_folders(root)
            if any((folder / name).exists() for name in _LIMITS[version])
        ]

    def read(self) -> tuple[int | None, int | None]:
        """The tightest limit, and the least that a limit leaves, over the group and all its parents.

        Returns:
            Bytes; None without a limit, or where what is used of it is not told.
        """
        limits: list[int] = []
        left: list[int] = []
        for folder, version in self._folders:
            limit = _cgroup_limit(folder, version)
            used = None if limit is None else _cgroup_used(folder, version)
            if limit is not None and used is not None:
                limits.append(limit)
                left.append(max(limit - used, 0))
        return min(limits, default=None), min(left, default=None)


def memlock_free_bytes(
    root: Path = Path("/"),
    getrlimit: Callable[[int], tuple[int, int]] = resource.getrlimit,
) -> int | None:
    """Bytes this process may still lock.

    Args:
        root: Of the file system.
        getrlimit: As in `resource`.

    Returns:
        None without limit: RLIM_INFINITY, or the capability CAP_IPC_LOCK, which overrides it.
    """
    soft, _hard = getrlimit(resource.RLIMIT_MEMLOCK)
    status = _fields(root / "proc/self/status")
    if soft == resource.RLIM_INFINITY or int(status.get("CapEff", "0"), 16) >> CAP_IPC_LOCK & 1:
        return None
    return max(soft - int(status.get("VmLck", "0")) * 1024, 0)


def _cgroup_folders(root: Path) -> Iterator[tuple[Path, int]]:
    """The memory control groups of this process with their versions, innermost first.

    A container often sees its own group as the root of the mount while its path is the host's: folders that
    aren't there are skipped on the way up.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            mounts, version = ["sys/fs/cgroup", "sys/fs/cgroup/unified"], 2
        elif "memory" in controllers.split(","):
            mounts, version = ["sys/fs/cgroup/memory"], 1
        else:
            continue
        for mount in mounts:
            inner = Path(path.lstrip("/"))
            for relative in (inner, *inner.parents):
                yield root / mount / relative, version


def _cgroup_limit(folder: Path, version: int) -> int | None:
    numbers = [number for name in _LIMITS[version] if (number := _number(folder / name)) is not None]
    limit = min(numbers, default=UNLIMITED_BYTES)
    return limit if limit < UNLIMITED_BYTES else None


def _cgroup_used(folder: Path, version: int) -> int | None:
    used = _number(folder / ("memory.current" if version > 1 else "memory.usage_in_bytes"))
    if used is None:
        return None
    cache = _fields(folder / "memory.stat").get(
        "inactive_file" if version > 1 else "total_inactive_file", "0"
    )
    return max(used - int(cache), 0)


def _text(path: Path) -> str:
    """Content of a file of the kernel; empty if there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _fields(path: Path) -> dict[str, str]:
    """Lines `name: value unit` or `name value` by name."""
    parts = [line.replace(":", " ", 1).split() for line in _text(path).splitlines()]
    return {words[0]: words[1] for words in parts if len(words) > 1}
