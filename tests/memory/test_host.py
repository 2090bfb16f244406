"""Limits of host memory, read from made-up systems."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

import pytest

from batond.daemon.errors import ConfigError
from batond.daemon.memory.host import (
    PAGE_BYTES,
    CgroupMemory,
    HostLimits,
    auto_host_pool_bytes,
    cgroup_free_bytes,
    check_host_pool,
    memlock_free_bytes,
    read_limits,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GIB = 1 << 30
MIB = 1 << 20
V1_UNLIMITED = "9223372036854771712"


def limits(
    available: int = 64 * GIB, cgroup: int | None = None, memlock: int | None = None
) -> Callable[[], HostLimits]:
    return lambda: HostLimits(available, cgroup, memlock)


@pytest.mark.parametrize(
    ("read", "name", "largest"),
    [
        (limits(available=10 * GIB), "available", 9 * GIB),
        (limits(cgroup=2 * GIB), "cgroup", int(1.8 * GIB)),
        (limits(memlock=8 * MIB), "memlock", 8 * MIB),
        (limits(cgroup=2 * GIB, memlock=8 * MIB), "memlock", 8 * MIB),
        (limits(cgroup=1 * MIB, memlock=8 * MIB), "cgroup", int(0.9 * MIB)),
    ],
)
def test_the_message_names_the_limit_and_the_largest_workable_value(
    read: Callable[[], HostLimits], name: str, largest: int
) -> None:
    """M4."""
    with pytest.raises(ConfigError) as caught:
        check_host_pool(32 * GIB + 60 * GIB, pin=True, read=read)
    assert caught.value.reason == "HOST_POOL_TOO_LARGE"
    assert caught.value.details["limit"] == name
    workable = int(caught.value.details["largest_bytes"])
    assert largest - PAGE_BYTES < workable <= largest
    assert str(workable) in str(caught.value)
    check_host_pool(workable, pin=True, read=read)
    with pytest.raises(ConfigError):
        check_host_pool(workable + 1, pin=True, read=read)


def test_what_may_be_locked_matters_only_when_locking() -> None:
    """M4."""
    check_host_pool(1 * GIB, pin=False, read=limits(memlock=64 * 1024))
    with pytest.raises(ConfigError, match="LimitMEMLOCK"):
        check_host_pool(1 * GIB, pin=True, read=limits(memlock=64 * 1024))


def test_auto_shrinks_to_every_limit() -> None:
    """M4."""
    assert auto_host_pool_bytes(pin=True, read=limits(available=8 * GIB)) == 4 * GIB
    assert auto_host_pool_bytes(pin=True, read=limits(cgroup=1 * GIB), fraction=0.25) == 256 * MIB
    assert auto_host_pool_bytes(pin=True, read=limits(memlock=8 * MIB)) == 8 * MIB
    assert auto_host_pool_bytes(pin=False, read=limits(available=2 * GIB, memlock=8 * MIB)) == 1 * GIB
    assert auto_host_pool_bytes(pin=True, read=limits(cgroup=0)) == 0
    assert auto_host_pool_bytes(pin=True, read=limits(memlock=PAGE_BYTES * 3 + 17)) == PAGE_BYTES * 3


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigError):
        check_host_pool(-1, pin=False, read=limits())
    with pytest.raises(ConfigError):
        auto_host_pool_bytes(pin=False, fraction=1.5, read=limits())
    check_host_pool(0, pin=True, read=limits(available=0, memlock=0))


def test_v2_takes_the_tightest_parent_and_spares_droppable_cache(
    system: Callable[[dict[str, str]], Path],
) -> None:
    """M4."""
    root = system(
        {
            "proc/self/cgroup": "0::/system.slice/batond.service",
            "sys/fs/cgroup/system.slice/batond.service/memory.max": "max",
            "sys/fs/cgroup/system.slice/batond.service/memory.current": str(100 * MIB),
            "sys/fs/cgroup/system.slice/memory.max": str(1000 * MIB),
            "sys/fs/cgroup/system.slice/memory.current": str(700 * MIB),
            "sys/fs/cgroup/system.slice/memory.stat": f"anon 1\ninactive_file {200 * MIB}\nactive_file 5",
        }
    )
    assert cgroup_free_bytes(root) == 500 * MIB
    assert CgroupMemory(root).read() == (1000 * MIB, 500 * MIB)


def test_v2_throttling_limit_counts(system: Callable[[dict[str, str]], Path]) -> None:
    """M4."""
    root = system(
        {
            "proc/self/cgroup": "0::/a",
            "sys/fs/cgroup/a/memory.max": str(1000 * MIB),
            "sys/fs/cgroup/a/memory.high": str(600 * MIB),
            "sys/fs/cgroup/a/memory.current": str(100 * MIB),
        }
    )
    assert cgroup_free_bytes(root) == 500 * MIB


def test_v2_inside_a_container(system: Callable[[dict[str, str]], Path]) -> None:
    """M4: the namespace shows the container's own group as the root."""
    root = system(
        {
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": str(512 * MIB),
            "sys/fs/cgroup/memory.high": "max",
            "sys/fs/cgroup/memory.current": str(112 * MIB),
        }
    )
    assert cgroup_free_bytes(root) == 400 * MIB


def test_v1_with_the_hosts_path_inside_a_container(system: Callable[[dict[str, str]], Path]) -> None:
    """M4: the path is the host's, the mount shows the container's group."""
    root = system(
        {
            "proc/self/cgroup": "8:memory:/docker/0123\n3:cpu,cpuacct:/docker/0123\n0::/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(512 * MIB),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(312 * MIB),
            "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {50 * MIB}",
        }
    )
    assert cgroup_free_bytes(root) == 250 * MIB


def test_overdrawn_group_leaves_nothing(system: Callable[[dict[str, str]], Path]) -> None:
    root = system(
        {
            "proc/self/cgroup": "0::/a",
            "sys/fs/cgroup/a/memory.max": str(10 * MIB),
            "sys/fs/cgroup/a/memory.current": str(12 * MIB),
        }
    )
    assert cgroup_free_bytes(root) == 0


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/a"},
        {"proc/self/cgroup": "nonsense"},
        {
            "proc/self/cgroup": "0::/a",
            "sys/fs/cgroup/a/memory.max": "max",
            "sys/fs/cgroup/a/memory.current": "5",
        },
        {"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/memory.max": "77"},
        {
            "proc/self/cgroup": "8:memory:/a",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": V1_UNLIMITED,
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "5",
        },
    ],
    ids=["no-proc", "no-files", "nonsense", "max", "no-usage", "v1-unlimited"],
)
def test_no_limit_is_none(system: Callable[[dict[str, str]], Path], files: dict[str, str]) -> None:
    assert cgroup_free_bytes(system(files)) is None
    assert CgroupMemory(system(files)).read() == (None, None)


def test_memlock(system: Callable[[dict[str, str]], Path]) -> None:
    """M4."""
    root = system({"proc/self/status": "Name:\tx\nVmLck:\t    1024 kB\nCapEff:\t00000000a80425fb"})
    assert memlock_free_bytes(root, lambda _: (8 * MIB, 16 * MIB)) == 7 * MIB
    assert memlock_free_bytes(root, lambda _: (1024, 1024)) == 0
    assert memlock_free_bytes(root, lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY)) is None


def test_the_capability_overrides_memlock(system: Callable[[dict[str, str]], Path]) -> None:
    root = system({"proc/self/status": "VmLck:\t0 kB\nCapEff:\t0000000000004000"})
    assert memlock_free_bytes(root, lambda _: (1024, 1024)) is None


def test_this_system_can_be_read() -> None:
    found = read_limits()
    assert found.available_bytes > 0
    assert found.cgroup_bytes is None or found.cgroup_bytes >= 0
    assert auto_host_pool_bytes(pin=False) > 0
