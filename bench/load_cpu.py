"""CPU time and memory of processes, which stay true on a machine that is busy with other things too."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Spent:
    """What passed between two looks.

    Attributes:
        wall_s: Time on the clock.
        cpu_s: CPU time of each process, by its name.
    """

    wall_s: float
    cpu_s: dict[str, float]


class Meter:
    """Looks at the CPU time of some processes.

    Args:
        pids: Process ids by the names under which their time is told.
    """

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self._wall_s, self._cpu_s = time.monotonic(), self._look()

    def lap(self) -> Spent:
        """What passed since the last lap."""
        wall_s, cpu_s = time.monotonic(), self._look()
        spent = Spent(wall_s - self._wall_s, {name: cpu_s[name] - self._cpu_s[name] for name in cpu_s})
        self._wall_s, self._cpu_s = wall_s, cpu_s
        return spent

    def _look(self) -> dict[str, float]:
        times = {name: process.cpu_times() for name, process in self._processes.items()}
        return {name: one.user + one.system for name, one in times.items()}


def rss_bytes(pid: int) -> int:
    """Memory of a process that is in RAM, bytes."""
    return int(psutil.Process(pid).memory_info().rss)


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, 99th percentile and the greatest."""
    if len(values) < 2:  # noqa: PLR2004 - what quantiles() needs
        return (values[0],) * 3 if values else (0.0,) * 3
    return statistics.median(values), statistics.quantiles(values, n=100)[98], max(values)
