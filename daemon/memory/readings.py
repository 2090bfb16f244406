"""What is known of a memory at one moment, and where it comes from.

A source is asked by the thread of `watch.py` alone; whatever goes wrong with it is `ReadingLost`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import psutil

from batond.daemon.memory.host import CgroupMemory

if TYPE_CHECKING:
    from collections.abc import Callable


class ReadingLost(Exception):  # noqa: N818 - it names what happened; nobody did anything wrong
    """A memory could not be read now; the text says why. The next try may succeed."""


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """One memory at one moment, as its owner counts: all processes, all containers.

    Attributes:
        total_bytes: All there is of it.
        free_bytes: What any process could still get.
        at_s: Monotonic clock before the source was asked, so that a slow answer counts as old.
    """

    total_bytes: int
    free_bytes: int
    at_s: float

    def __post_init__(self) -> None:
        """Refuse what no memory can be.

        Raises:
            ReadingLost: Sizes below zero, nothing at all, or more free than there is.
        """
        if self.total_bytes <= 0 or not 0 <= self.free_bytes <= self.total_bytes:
            raise ReadingLost(f"{self.free_bytes} bytes free of {self.total_bytes} make no sense")


class MemorySource(Protocol):
    """Something that can be asked how much memory is free."""

    name: str

    def read(self) -> MemoryReading:
        """Ask now; may take long, or hang.

        Raises:
            ReadingLost: It can't be told now.
        """

    def close(self) -> None:
        """Let go of whatever asking needs; not called while `read` runs."""


class HostSource:
    """Host RAM, for engines on the CPU: the system's or the control groups', whichever is less.

    Free is what can be had without swapping (MemAvailable) and without being killed: caches that the kernel
    drops first count as free.

    Args:
        root: Of the file system, for the control groups.
        virtual_memory: As in `psutil`.
        clock: Monotonic.
    """

    name = "host RAM"

    def __init__(
        self,
        root: Path = Path("/"),
        virtual_memory: Callable[[], Any] = psutil.virtual_memory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._groups, self._virtual_memory, self._clock = CgroupMemory(root), virtual_memory, clock

    def read(self) -> MemoryReading:
        """Ask the kernel.

        Raises:
            ReadingLost: `/proc` or the control groups can't be read.
        """
        at_s = self._clock()
        try:
            system = self._virtual_memory()
            limit_bytes, left_bytes = self._groups.read()
        except (OSError, ValueError, RuntimeError, psutil.Error) as error:
            raise ReadingLost(f"{type(error).__name__}: {error}") from error
        total_bytes, free_bytes = int(system.total), int(system.available)
        # The least of both, each for itself: whichever is tighter now, total stays what it is.
        if limit_bytes is not None:
            total_bytes = min(total_bytes, limit_bytes)
        if left_bytes is not None:
            free_bytes = min(free_bytes, left_bytes)
        return MemoryReading(total_bytes, min(free_bytes, total_bytes), at_s)

    def close(self) -> None:
        """Nothing is held."""
