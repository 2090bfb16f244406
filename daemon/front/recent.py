"""How the classes have fared lately, for people who look on; Prometheus has the whole of it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

WINDOW_S: Final = 300.0
#: Of a class and kind: enough for a 95th percentile, and sorted in some 50 microseconds.
MOST_SAMPLES: Final = 512


@dataclass(frozen=True, slots=True)
class Times:
    """How many times there are, and which half or 95 % of them do not exceed; None without any."""

    samples: int
    p50_s: float | None = None
    p95_s: float | None = None


class _Window:
    """The latest times of one kind."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=MOST_SAMPLES)  # (when, how long)

    def add(self, value_s: float, now_s: float) -> None:
        self._seen.append((now_s, value_s))

    def times(self, now_s: float) -> Times:
        while self._seen and self._seen[0][0] < now_s - WINDOW_S:
            self._seen.popleft()
        ordered = sorted(value_s for _, value_s in self._seen)
        if not ordered:
            return Times(0)
        return Times(len(ordered), _nearest_rank(ordered, 0.5), _nearest_rank(ordered, 0.95))


class Recent:
    """The times of the last five minutes by class, the latest 512 of each kind at most.

    Args:
        classes: Names of all classes; jobs of others are left out.
    """

    def __init__(self, classes: Iterable[str]) -> None:
        names = tuple(classes)
        self._first = {name: _Window() for name in names}
        self._output = {name: _Window() for name in names}

    def first_token(self, sla_class: str, value_s: float, now_s: float) -> None:
        """Take note of a time from acceptance to the first token."""
        if sla_class in self._first:
            self._first[sla_class].add(value_s, now_s)

    def output_token(self, sla_class: str, value_s: float, now_s: float) -> None:
        """Take note of a generation's mean time from one token to the next."""
        if sla_class in self._output:
            self._output[sla_class].add(value_s, now_s)

    def first_tokens(self, sla_class: str, now_s: float) -> Times:
        """Times to the first token of a configured class."""
        return self._first[sla_class].times(now_s)

    def output_tokens(self, sla_class: str, now_s: float) -> Times:
        """Times per output token of a configured class."""
        return self._output[sla_class].times(now_s)


def _nearest_rank(ordered: list[float], share: float) -> float:
    """The smallest value that so large a share of the values does not exceed."""
    return ordered[math.ceil(share * len(ordered)) - 1]
