"""First come, first served."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batond.policies.base import QueryView, Rank


class Fcfs:
    """Rows go out in order of arrival; nobody is ever pre-empted.

    The order that Orca (OSDI 2022, section 3.2) gives its iteration-level scheduler. Guarantee: a query is
    overtaken by no query that arrived later, but for parked ones (row limit lowered, parked by hand), which
    return first. No query starves while running ones end.
    """

    name = "fcfs"
    counts_by_owner = True

    def rank(self, query: QueryView, now_s: float) -> Rank:
        """Order by arrival; every query is on the same level."""
        del now_s
        return (0.0, query.arrival_s, query.seq)

    def may_preempt(self, newcomer: QueryView, victim: QueryView, now_s: float) -> bool:
        """Never: who has a row keeps it."""
        del newcomer, victim, now_s
        return False

    def victim_bar(self, newcomer: QueryView, class_order: int, now_s: float) -> float:
        """Nobody."""
        del newcomer, class_order, now_s
        return math.inf

    def line_of(self, query: QueryView) -> int:
        """All stand in one."""
        del query
        return 0

    def on_tokens(self, query: QueryView, prompt_tokens: int, output_tokens: int) -> None:
        """Nothing depends on tokens."""
