"""What arithmetic allows: step counts of ideal schedules, to hold measured ones against."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def list_schedule_steps(lengths: Sequence[int], rows: int) -> int:
    """Steps of list scheduling: whoever is next takes the row that is free first (Graham 1966).

    Args:
        lengths: Decode steps of each query, in the order they start.
        rows: Rows of the batch.
    """
    free_at = [0] * rows
    for length in lengths:
        heapq.heappush(free_at, heapq.heappop(free_at) + length)
    return max(free_at)
