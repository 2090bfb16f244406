"""Least expected remaining output first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from batond.daemon.errors import ConfigError
from batond.policies.ageing import aged_level, check_ageing
from batond.policies.history import OutputHistory

if TYPE_CHECKING:
    from batond.policies.base import QueryView, Rank


class Shortest:
    """Within a class the query with the least output to come runs first; classes stay in order.

    Shortest remaining processing time (Schrage 1968), which minimises the mean completion time where lengths
    are known. Here they are expected: from the outputs that ended before in the same flow (tenant and
    class), given what was emitted, never more than `max_tokens` leaves. A flow without history counts with
    its `max_tokens`.

    A row is taken within a class only for a gain that pays for the copies: the newcomer must be shorter than
    the victim by `gain` both in what is still to come and as the two looked before their first token. The
    second keeps equals equal: a victim that outlived its flow's mean is no reason to park it for a query of
    the same flow and `max_tokens`.

    Guarantees: equals never pre-empt each other. Of two queries of a class the victim never takes its row
    back, unless the history of their flows turns round by `gain` squared meanwhile; across classes never. A
    newcomer that arrives (k + 1) x ageing_s after a query of order k is not sorted before it, so the wait for
    the first row is bounded by `ageing.worst_first_row_s` with k + 1 levels; `ageing_s = inf` leaves the
    order to length alone, without a bound.

    Args:
        gain: How many times shorter a newcomer must be to take a row within its class; above 1.
        ageing_s: Seconds without a row that are worth one class.

    Raises:
        ConfigError: A value has no meaning.
    """

    name = "shortest"
    counts_by_owner = True

    def __init__(self, gain: float = 2.0, ageing_s: float = 60.0) -> None:
        if not gain > 1:
            raise ConfigError(f"gain must be above 1, not {gain}", field="gain")
        self.gain = gain
        self.ageing_s = check_ageing(ageing_s)
        self._history = OutputHistory()

    def rank(self, query: QueryView, now_s: float) -> Rank:
        """Order by aged class, then expected remaining output, then arrival."""
        level = aged_level(query, now_s, self.ageing_s)
        return (level, self._history.remaining_tokens(query), query.arrival_s, query.seq)

    def may_preempt(self, newcomer: QueryView, victim: QueryView, now_s: float) -> bool:
        """By class, then by a clear gain in expected output."""
        del now_s
        if not victim.preemptible or newcomer.class_order != victim.class_order:
            return victim.preemptible and newcomer.class_order < victim.class_order
        history = self._history
        return (
            newcomer.max_tokens > newcomer.output_tokens
            and history.remaining_tokens(newcomer) * self.gain <= history.remaining_tokens(victim)
            and history.total_tokens(newcomer) * self.gain <= history.total_tokens(victim)
        )

    def victim_bar(self, newcomer: QueryView, class_order: int, now_s: float) -> float | None:
        """By class; within its own one by one."""
        del now_s
        if newcomer.class_order == class_order:
            return None
        return -math.inf if newcomer.class_order < class_order else math.inf

    def line_of(self, query: QueryView) -> tuple[int, str, str, int, int]:
        """One a flow, limit and output brought along: the expectation is the same, whatever is learnt."""
        return (query.class_order, query.tenant, query.sla_class, query.max_tokens, query.output_tokens)

    def on_tokens(self, query: QueryView, prompt_tokens: int, output_tokens: int) -> None:
        """Only whole outputs teach."""

    def on_end(self, query: QueryView) -> None:
        """Learn the length of an output. Cut ones count too: they took what they took."""
        if query.output_tokens > 0:
            self._history.add(query)
