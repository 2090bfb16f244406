"""Strict order of SLA classes, with ageing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from batond.policies.ageing import aged_level, check_ageing

if TYPE_CHECKING:
    from batond.policies.base import QueryView, Rank


class Priority:
    """The more urgent class runs first; a query without a row rises by one class every `ageing_s`.

    Ageing moves a query forward in the line; it gives no right to take a row, and a running query does not
    age: an urgent query can therefore always pre-empt by the classes as configured (BATON section on
    pre-emption; ageing as in the classic multilevel queues). Pre-emption goes down the classes only, so
    equals never pre-empt each other and a victim can never take its row back from the one it was parked for.

    Worst-case wait. Take a query of class order k that arrived at t. No fresh query that arrives at
    t + k x ageing_s or later is ever sorted before it: with floor(x + k) = floor(x) + k, the newcomer's level
    is never the smaller one, and the earlier arrival breaks the tie. So it heads the line of fresh queries
    after at most

        k x ageing_s + B / R    seconds,

    where B is the number of tokens still to be computed for running, parked and waiting queries that arrived
    before t + k x ageing_s, with those of more urgent queries that take rows from these meanwhile (each is
    parked at most `PlannerLimits.max_parks` times, for one query each time), and R the tokens the rows
    compute in a second (`ageing.worst_first_row_s`). Once it has a row it is parked at most `max_parks` times
    itself, each time after at least `quantum_tokens` tokens, and stands in the parked line of its level,
    ahead of every fresh query of its class: after each park it waits for one row to come free
    (`ageing.worst_finish_s`).

    Args:
        ageing_s: Seconds without a row that are worth one class; infinity turns ageing off, and with it the
            bound.

    Raises:
        ConfigError: `ageing_s` is not above 0.
    """

    name = "priority"
    counts_by_owner = True

    def __init__(self, ageing_s: float = 60.0) -> None:
        self.ageing_s = check_ageing(ageing_s)

    def rank(self, query: QueryView, now_s: float) -> Rank:
        """Order by aged class, then arrival."""
        return (aged_level(query, now_s, self.ageing_s), query.arrival_s, query.seq)

    def may_preempt(self, newcomer: QueryView, victim: QueryView, now_s: float) -> bool:
        """By configured class only: an aged query waits for a row that comes free."""
        del now_s
        return victim.preemptible and newcomer.class_order < victim.class_order

    def victim_bar(self, newcomer: QueryView, class_order: int, now_s: float) -> float:
        """By configured class only."""
        del now_s
        return -math.inf if newcomer.class_order < class_order else math.inf

    def line_of(self, query: QueryView) -> int:
        """One a class: within it the earlier arrival is never aged less."""
        return query.class_order

    def on_tokens(self, query: QueryView, prompt_tokens: int, output_tokens: int) -> None:
        """Nothing depends on tokens."""
