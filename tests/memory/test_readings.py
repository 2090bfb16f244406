"""Host memory as the governor reads it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from batond.daemon.memory.readings import HostSource, MemoryReading, ReadingLost

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GIB = 1 << 30
MIB = 1 << 20


@pytest.mark.parametrize(("total", "free"), [(0, 0), (-1, 0), (100, 101), (100, -1)])
def test_what_no_memory_can_be_is_no_reading(total: int, free: int) -> None:
    """M9."""
    with pytest.raises(ReadingLost, match="make no sense"):
        MemoryReading(total, free, 0.0)


def group(limit: str, used: int) -> dict[str, str]:
    return {
        "proc/self/cgroup": "0::/a",
        "sys/fs/cgroup/a/memory.max": limit,
        "sys/fs/cgroup/a/memory.current": str(used),
    }


@pytest.mark.parametrize(
    ("files", "total", "free"),
    [
        ({}, 64 * GIB, 10 * GIB),
        (group("max", 5), 64 * GIB, 10 * GIB),
        (group(str(8 * GIB), 3 * GIB), 8 * GIB, 5 * GIB),
        (group(str(32 * GIB), 3 * GIB), 32 * GIB, 10 * GIB),  # The system is tighter now; the total stays.
        (group(str(8 * GIB), 9 * GIB), 8 * GIB, 0),
    ],
    ids=["no-group", "no-limit", "group", "system", "overdrawn"],
)
def test_the_tighter_of_system_and_groups(
    system: Callable[[dict[str, str]], Path], files: dict[str, str], total: int, free: int
) -> None:
    source = HostSource(
        root=system(files),
        virtual_memory=lambda: SimpleNamespace(total=64 * GIB, available=10 * GIB),
        clock=lambda: 7.0,
    )
    assert source.read() == MemoryReading(total, free, 7.0)


@pytest.mark.parametrize("error", [OSError("no /proc"), psutil.Error("gone"), ValueError("x")])
def test_an_unreadable_system_is_a_lost_reading(tmp_path: Path, error: Exception) -> None:
    def fail() -> Any:
        raise error

    with pytest.raises(ReadingLost, match=type(error).__name__):
        HostSource(root=tmp_path, virtual_memory=fail).read()


def test_this_host_can_be_read() -> None:
    """A real system: what this process takes is seen, unless others give as much back each time."""
    source = HostSource()

    def is_seen() -> bool:
        before = source.read()
        assert 0 < before.free_bytes < before.total_bytes
        block = bytearray(256 * MIB)
        block[::4096] = b"x" * len(block[::4096])
        return source.read().free_bytes < before.free_bytes - 64 * MIB

    assert any(is_seen() for _ in range(10))
    source.close()
