"""Times of work on a device: CUDA events on a card, the clock elsewhere. Medians with their spread."""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_TENTHS: Final = 10


@dataclass(frozen=True, slots=True)
class Spread:
    """What a quantity came to in several rounds.

    Attributes:
        median: The middle one.
        low: A tenth of the rounds is below.
        high: A tenth of the rounds is above.
        worst: The greatest.
        rounds: How many.
    """

    median: float
    low: float
    high: float
    worst: float
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float], scale: float = 1.0) -> Spread:
        """Sum up values, each times `scale`.

        Raises:
            ValueError: There is none.
        """
        scaled = [value * scale for value in values]
        if not scaled:
            raise ValueError("nothing was measured")
        tenths = (
            statistics.quantiles(scaled, n=_TENTHS, method="inclusive") if len(scaled) > 1 else scaled * 2
        )
        return cls(statistics.median(scaled), tenths[0], tenths[-1], max(scaled), len(scaled))

    def text(self, digits: int = 2) -> str:
        """Median and spread, as tables have it."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


class Stopwatch:
    """Times laps of work queued on a device.

    On a card a lap is the time between two events in the current stream: what the card took, and what it
    waited for the host meanwhile.

    Args:
        device: Where the work is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[tuple[Any, Any]] = []
        self._seconds: list[float] = []

    @contextlib.contextmanager
    def lap(self) -> Iterator[None]:
        """Time what is queued inside."""
        if self._device.type != "cuda":
            began_s = time.perf_counter()
            yield
            self._seconds.append(time.perf_counter() - began_s)
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        yield
        last.record()
        self._events.append((first, last))

    def take(self) -> list[float]:
        """Seconds of all laps so far, oldest first; waits for the device and starts anew."""
        settle(self._device)
        seconds = self._seconds + [first.elapsed_time(last) / 1e3 for first, last in self._events]
        self._events, self._seconds = [], []
        return seconds


def settle(device: torch.device) -> None:
    """Wait until the device has done all that was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def repeat(device: torch.device, work: Callable[[], object], *, rounds: int, warm_up: int) -> list[float]:
    """Do something several times; returns seconds of each round but the first ones."""
    watch = Stopwatch(device)
    for _ in range(warm_up):
        work()
    for _ in range(rounds):
        with watch.lap():
            work()
    return watch.take()
