"""Fair shares of tokens among tenants."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batond.daemon.errors import ConfigError
from batond.policies.ageing import check_ageing
from batond.policies.base import Phase

if TYPE_CHECKING:
    from batond.policies.base import QueryView, Rank


@dataclass(slots=True)
class _Account:
    """A tenant's counter in one class, and where its queries stand.

        [ given: begun, put out, or lifted | prompt in line | prompt in line |
                                           ^ first          ^ second         ^ end     each is tag + shift

    Tokens of output move `shift`, and with it all places at once.
    """

    given: float
    end: float
    shift: float = 0.0
    tags: dict[str, float] = field(default_factory=dict)  # Queries that had no row yet.
    line: dict[str, float] = field(default_factory=dict)  # Those of them not begun, with their cost.


class Fair:
    """Within a class, the tenant that was given least runs first; classes stay in order.

    Virtual token counters (VTC; Sheng et al. 2024, "Fairness in Serving Large Language Models", OSDI,
    algorithm 2; weights as in its section 4.3). A tenant's counter rises by its tokens, prompt and output,
    over its weight. A tenant without a query in line that sends one is lifted to the smallest counter of
    those in line, or if there are none to that of the tenant that left the line last: time without demand
    earns nothing, so nobody comes back with a monopoly. Tokens computed again after a park aren't charged.

    Prompts are charged in advance, query by query: a query's place is the counter its tenant will have when
    the query is next. So many rows given out in one step are shared as fairly as one by one. A query that
    ends before it was begun is refunded.

    Counters are kept apart for each class. Classes are served strictly in order, and a tenant lifted for what
    others were given in one class would be punished for it in the next.

    Guarantees: between two tenants that both have queries in line in a class the counters drift apart by at
    most twice the larger of the longest prompt and of the tokens the rows can hold (VTC, theorem 4.4), each
    over its weight. Rows are taken by more urgent classes only: equals, and tenants of a class, never
    pre-empt each other, and a victim never takes its row back from the one it was parked for. Starvation: a
    class of order k of which nothing was begun for (k + 1) x ageing_s is next for one query, so a query
    with n queries sorted before it in its class is next after (n + 1) x (k + 1) x ageing_s at the latest.

    Args:
        prompt_weight: Charge of a prompt token.
        output_weight: Charge of an output token; the paper's is 2.
        ageing_s: Seconds without a query begun that are worth one class to a class.

    Raises:
        ConfigError: A value has no meaning.
    """

    name = "fair"
    counts_by_owner = True

    def __init__(
        self, prompt_weight: float = 1.0, output_weight: float = 1.0, ageing_s: float = 60.0
    ) -> None:
        for key, value in (("prompt_weight", prompt_weight), ("output_weight", output_weight)):
            if not 0 <= value < float("inf"):
                raise ConfigError(f"{key} must be finite and not negative, not {value}", field=key)
        self.ageing_s = check_ageing(ageing_s)
        self._prompt_weight = prompt_weight
        self._output_weight = output_weight
        self._accounts: dict[int, dict[str, _Account]] = {}  # By class order, then tenant.
        self._homes: dict[str, _Account] = {}  # Where queries that had no row yet stand.
        self._left_last: dict[int, _Account] = {}
        self._since_s: dict[int, float] = {}  # Last begin in a class, or when its line filled after it.
        self._now_s = float("-inf")

    def counter(self, tenant: str, class_order: int = 0) -> float:
        """Virtual tokens a tenant was charged in a class; 0 if it is not known."""
        account = self._accounts.get(class_order, {}).get(tenant)
        return account.given if account else 0.0

    def rank(self, query: QueryView, now_s: float) -> Rank:
        """Order by class, then the tenant's counter when the query is next, then arrival.

        The first call for a query enters it into its tenant's line.
        """
        self._now_s = max(self._now_s, now_s)
        order = query.class_order
        account = self._account(query)
        if query.phase is Phase.RUNNING:
            return (order, order, account.given, query.arrival_s, query.seq)
        tag = account.tags.get(query.query_id)
        if tag is None and query.park_seq == 0 and query.phase is not Phase.PARKED:
            tag = self._enter(query, account)
        place = account.given if tag is None else tag + account.shift
        level = order - (self._now_s - self._since_s.get(order, self._now_s)) // self.ageing_s
        # An aged class stands behind the class whose level it has come to: their counters don't compare.
        return (level, order, place, query.arrival_s, query.seq)

    def may_preempt(self, newcomer: QueryView, victim: QueryView, now_s: float) -> bool:
        """By configured class only."""
        del now_s
        return victim.preemptible and newcomer.class_order < victim.class_order

    def victim_bar(self, newcomer: QueryView, class_order: int, now_s: float) -> float:
        """By configured class only."""
        del now_s
        return -math.inf if newcomer.class_order < class_order else math.inf

    def line_of(self, query: QueryView) -> tuple[int, str]:
        """One a class and tenant: a counter moves all its places at once."""
        return (query.class_order, query.tenant)

    def on_tokens(self, query: QueryView, prompt_tokens: int, output_tokens: int) -> None:
        """Charge output; prompts are charged when a query enters the line."""
        del prompt_tokens
        account = self._account(query)
        cost = account.line.pop(query.query_id, None)
        if cost is not None:
            account.given += cost
            self._left_last[query.class_order] = account
            self._since_s[query.class_order] = self._now_s
        if output_tokens:
            charge = output_tokens * self._output_weight / query.tenant_weight
            account.given += charge
            account.shift += charge
            account.tags.pop(query.query_id, None)
            self._homes.pop(query.query_id, None)

    def on_end(self, query: QueryView) -> None:
        """Forget a query. If nothing of it was computed, those behind it in its line move up."""
        self._leave(query.query_id)

    def _leave(self, query_id: str) -> None:
        account = self._homes.pop(query_id, None)
        if account is None:
            return
        cost = account.line.get(query_id)
        if cost is not None:
            for behind in reversed(account.line):
                if behind == query_id:
                    break
                account.tags[behind] -= cost
            account.end -= cost
            del account.line[query_id]
        account.tags.pop(query_id, None)

    def _account(self, query: QueryView) -> _Account:
        order = query.class_order
        tenants = self._accounts.get(order)
        account = tenants.get(query.tenant) if tenants else None
        if account is None:
            tenants = self._accounts.setdefault(order, {})
            floor = self._floor(order)
            account = tenants[query.tenant] = _Account(given=floor, end=floor)
        if self._homes.get(query.query_id, account) is not account:
            self._leave(query.query_id)  # It was moved to another class.
        return account

    def _enter(self, query: QueryView, account: _Account) -> float:
        if not account.line:
            tenants = self._accounts[query.class_order].values()
            if not any(other.line for other in tenants):
                self._since_s[query.class_order] = self._now_s
            account.given = max(account.given, self._floor(query.class_order))
            account.end = account.given - account.shift
        # Inline, a prompt is computed by the batch: it shows nothing to prefill.
        tokens = query.to_prefill_tokens or max(0, query.prompt_tokens - query.prefilled_tokens)
        cost = tokens * self._prompt_weight / query.tenant_weight
        tag = account.tags[query.query_id] = account.end
        account.line[query.query_id] = cost
        account.end += cost
        self._homes[query.query_id] = account
        return tag

    def _floor(self, class_order: int) -> float:
        """Counter to which a tenant that comes back is lifted."""
        heads = [account.given for account in self._accounts[class_order].values() if account.line]
        if heads:
            return min(heads)
        last = self._left_last.get(class_order)
        return last.given if last else 0.0
