"""Fair shares of tokens among tenants."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batond.daemon.errors import ConfigError
from batond.policies.ageing import check_ageing
from batond.policies.base import Phase

if TYPE_CHECKING:
    from batond.policies.base import QueryView, Rank


@dataclass(slots=True)
class _Account:
    """A tenant's counter in one class, and where its queries stand in it.

        given                                            finish
        [ begun and put out | prompt in line | prompt in line ]     finish = tail + shift
                            ^ first of line  ^ second                        tag + shift

    Tokens of output move `shift`, and with it all tags at once.
    """

    tail: float = 0.0
    shift: float = 0.0
    tags: dict[str, float] = field(default_factory=dict)  # Queries that had no row yet.
    line: dict[str, float] = field(default_factory=dict)  # Those of them not begun, with their cost.

    @property
    def finish(self) -> float:
        return self.tail + self.shift

    @property
    def given(self) -> float:
        return self.tags[next(iter(self.line))] + self.shift if self.line else self.finish


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
        self._left_last: dict[int, _Account] = {}
        self._begun_s: dict[int, float] = {}
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
        fresh = query.park_seq == 0 and query.phase is not Phase.PARKED
        if fresh and query.query_id not in account.tags:
            self._enter(query, account)
        tag = account.tags.get(query.query_id)
        given = account.given if tag is None else tag + account.shift
        # An aged class stands behind the class whose level it has come to: their counters don't compare.
        return (self._level(query), order, given, query.arrival_s, query.seq)

    def may_preempt(self, newcomer: QueryView, victim: QueryView, now_s: float) -> bool:
        """By configured class only."""
        del now_s
        return victim.preemptible and newcomer.class_order < victim.class_order

    def on_tokens(self, query: QueryView, prompt_tokens: int, output_tokens: int) -> None:
        """Charge output; prompts are charged when a query enters the line."""
        del prompt_tokens
        account = self._account(query)
        if account.line.pop(query.query_id, None) is not None:
            self._left_last[query.class_order] = account
            self._begun_s[query.class_order] = self._now_s
        if output_tokens:
            account.shift += output_tokens * self._output_weight / query.tenant_weight
            account.tags.pop(query.query_id, None)

    def on_end(self, query: QueryView) -> None:
        """Forget a query; refund its prompt if nothing of it was computed."""
        account = self._account(query)
        # Below 0 is rounding only.
        account.tail = max(0.0, account.tail - account.line.pop(query.query_id, 0.0))
        account.tags.pop(query.query_id, None)

    def _account(self, query: QueryView) -> _Account:
        tenants = self._accounts.setdefault(query.class_order, {})
        account = tenants.get(query.tenant)
        if account is None:
            account = tenants[query.tenant] = _Account()
            account.tail = self._floor(query.class_order)
        return account

    def _enter(self, query: QueryView, account: _Account) -> None:
        if not account.line:
            account.tail = max(account.tail, self._floor(query.class_order) - account.shift)
        # Inline, a prompt is computed by the batch: it shows nothing to prefill.
        tokens = query.to_prefill_tokens or max(0, query.prompt_tokens - query.prefilled_tokens)
        cost = tokens * self._prompt_weight / query.tenant_weight
        account.tags[query.query_id] = account.tail
        account.line[query.query_id] = cost
        account.tail += cost

    def _floor(self, class_order: int) -> float:
        """Counter to which a tenant that comes back is lifted."""
        heads = [account.given for account in self._accounts[class_order].values() if account.line]
        if heads:
            return min(heads)
        last = self._left_last.get(class_order)
        return last.finish if last else 0.0

    def _level(self, query: QueryView) -> float:
        since_s = max(query.arrival_s, self._begun_s.get(query.class_order, query.arrival_s))
        waited_s = max(0.0, self._now_s - since_s)
        return query.class_order - waited_s // self.ageing_s
