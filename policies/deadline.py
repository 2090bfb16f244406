"""Least slack first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from batond.daemon.errors import ConfigError
from batond.policies.base import Phase
from batond.policies.history import OutputHistory

if TYPE_CHECKING:
    from batond.policies.base import QueryView, Rank


class Deadline:
    """The query that can wait least runs first: least slack (Mok 1983; Dertouzos and Mok 1989).

    Slack is the time that may still pass before work has to begin, the smaller one of

        next token  arrival + TTFT target + output x TPOT target - now - work to the next token
        last token  the job's own deadline                       - now - work to the last token

    with the output expected from what the flow (tenant and class) put out before, capped by `max_tokens`. A
    query that is ahead of its TPOT target gains slack with each token, one that waits loses it.

    A job's own deadline never counts below 0: then it is as urgent as a query whose class target is just
    due, and behind all that are late. Callers can't raise themselves above that, and no deadline takes a row
    from a more urgent class. A query without a row that can't make its deadline any more is not rushed: its
    class targets count.

    A row is taken only for a query whose slack is smaller by `margin_s`, and which is of a more urgent class,
    or of the same class with the earlier deadline of its own.

    Guarantees: equals never pre-empt each other, and a victim never takes its row back from the one it was
    parked for, since class and deadline don't change. No starvation where targets are finite: fresh queries
    start with a slack of their TTFT target less the work of their prompt, so none is sorted before a query
    late by more than the longest prompt; from then on it waits for those before it alone. In overload
    everybody is late and the order tends to that of arrival plus TTFT target. Without targets and deadlines:
    order of arrival.

    Args:
        token_s: Time of one decode step, as the bench measures it.
        prefill_token_s: Time of one prompt token.
        margin_s: How much less slack takes a row.

    Raises:
        ConfigError: A value has no meaning.
    """

    name = "deadline"
    counts_by_owner = True

    def __init__(self, token_s: float = 0.03, prefill_token_s: float = 0.0002, margin_s: float = 0.5) -> None:
        for field, value in (
            ("token_s", token_s),
            ("prefill_token_s", prefill_token_s),
            ("margin_s", margin_s),
        ):
            if not value >= 0:
                raise ConfigError(f"{field} must not be negative, not {value}", field=field)
        self._token_s = token_s
        self._prefill_token_s = prefill_token_s
        self._margin_s = margin_s
        self._history = OutputHistory()

    def slack_s(self, query: QueryView, now_s: float) -> float:
        """Time that may pass before the query has to be worked on; negative if it is late."""
        return self._latest_start_s(query, now_s) - now_s

    def rank(self, query: QueryView, now_s: float) -> Rank:
        """Order by slack, then arrival; time, by which all slacks fall alike, is left out, so ranks last."""
        return (self._latest_start_s(query, now_s), query.arrival_s, query.seq)

    def may_preempt(self, newcomer: QueryView, victim: QueryView, now_s: float) -> bool:
        """For clearly less slack, downwards in class or, within a class, towards later deadlines."""
        order = victim.class_order - newcomer.class_order
        if not victim.preemptible or order < 0:
            return False
        if order == 0 and newcomer.deadline_s >= victim.deadline_s:
            return False
        bar_s = self._latest_start_s(newcomer, now_s) + self._margin_s
        return bar_s < self._latest_start_s(victim, now_s)

    def victim_bar(self, newcomer: QueryView, class_order: int, now_s: float) -> float | None:
        """By slack downwards in class; in its own one by one, and only for a deadline."""
        if newcomer.class_order == class_order and newcomer.deadline_s < math.inf:
            return None
        less_urgent = newcomer.class_order < class_order
        return self._latest_start_s(newcomer, now_s) + self._margin_s if less_urgent else math.inf

    def line_of(self, query: QueryView) -> int | str:
        """One a class; who has a deadline of its own stands alone, for its slack can stop to count."""
        return query.class_order if query.deadline_s == math.inf else query.query_id

    def on_tokens(self, query: QueryView, prompt_tokens: int, output_tokens: int) -> None:
        """Slack is read off the query itself."""

    def on_end(self, query: QueryView) -> None:
        """Learn the length of an output."""
        if query.output_tokens > 0:
            self._history.add(query)

    def _latest_start_s(self, query: QueryView, now_s: float) -> float:
        due_s = query.arrival_s + query.ttft_target_s
        prefill_s = query.to_prefill_tokens * self._prefill_token_s
        work_s = prefill_s
        if query.output_tokens > 0:
            due_s += query.output_tokens * query.tpot_target_s
            work_s += self._token_s
        by_class_s = due_s - work_s
        if query.deadline_s == math.inf:
            return by_class_s
        own_s = query.deadline_s - prefill_s - self._history.remaining_tokens(query) * self._token_s
        if own_s < now_s and query.phase is not Phase.RUNNING:
            return by_class_s
        return min(by_class_s, max(own_s, now_s))
