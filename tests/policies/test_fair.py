"""Virtual token counters."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from batond.daemon.errors import ConfigError
from batond.policies.base import Phase, TracksEnds
from batond.policies.fair import Fair

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from batond.policies.base import QueryView


def order(policy: Fair, queries: Iterable[QueryView], now_s: float = 0.0) -> list[str]:
    """Tenants in the order in which their queries are next."""
    return [query.tenant for query in sorted(queries, key=lambda query: policy.rank(query, now_s))]


def test_charges_prompt_and_output_over_weight(make_query: Callable[..., QueryView]) -> None:
    policy = Fair(prompt_weight=1.0, output_weight=2.0)
    query = make_query(tenant="a", to_prefill_tokens=100, prompt_tokens=100, tenant_weight=4.0)
    policy.rank(query, 0.0)
    assert policy.counter("a", 1) == 0, "a prompt in line isn't given yet"
    policy.on_tokens(query, 60, 0)
    policy.on_tokens(query, 40, 0)
    assert policy.counter("a", 1) == 25
    policy.on_tokens(replace(query, phase=Phase.RUNNING), 0, 10)
    assert policy.counter("a", 1) == 30
    assert policy.counter("a", 0) == policy.counter("nobody", 1) == 0


def test_prompts_computed_again_are_not_charged(make_query: Callable[..., QueryView]) -> None:
    policy = Fair()
    query = make_query(tenant="a", to_prefill_tokens=100)
    policy.rank(query, 0.0)
    policy.on_tokens(query, 100, 0)
    policy.on_tokens(replace(query, phase=Phase.PARKED, park_seq=1), 120, 0)
    assert policy.counter("a", 1) == 100


def test_many_rows_of_one_step_are_shared(make_query: Callable[..., QueryView]) -> None:
    """One of a's prompts weighs as much as three of b's: places are given out as if one by one."""
    policy = Fair()
    queries = [make_query(tenant="a", to_prefill_tokens=300, arrival_s=0.0) for _ in range(4)]
    queries += [make_query(tenant="b", to_prefill_tokens=100, arrival_s=1.0) for _ in range(12)]
    order(policy, queries)
    assert "".join(order(policy, queries)) == "ab" + "bbab" * 3 + "bb"


def test_session_that_brings_its_prompt_is_charged_for_the_rest(make_query: Callable[..., QueryView]) -> None:
    policy = Fair()
    query = make_query(tenant="a", prompt_tokens=500, prefilled_tokens=480, to_prefill_tokens=20)
    policy.rank(query, 0.0)
    policy.on_tokens(query, 20, 0)
    assert policy.counter("a", 1) == 20


def test_inline_prompts_are_charged(make_query: Callable[..., QueryView]) -> None:
    """Where the batch step computes prompts, a new query shows as READY with nothing to prefill."""
    policy = Fair()
    query = make_query(tenant="a", prompt_tokens=50, phase=Phase.READY)
    policy.rank(query, 0.0)
    policy.on_tokens(query, 50, 0)
    assert policy.counter("a", 1) == 50


def test_query_that_leaves_the_line_is_refunded(make_query: Callable[..., QueryView]) -> None:
    policy = Fair()
    assert isinstance(policy, TracksEnds)
    big, small = (make_query(tenant="a", to_prefill_tokens=tokens) for tokens in (8000, 10))
    policy.rank(big, 0.0)
    policy.rank(small, 0.0)
    assert policy.rank(small, 0.0)[2] == 8000
    policy.on_end(big)
    assert policy.rank(small, 0.0)[2] == 0
    policy.on_tokens(small, 10, 0)
    policy.on_end(small)
    assert policy.counter("a", 1) == 10, "what was computed stays charged"


def test_returning_tenant_is_lifted_to_the_smallest_in_line(make_query: Callable[..., QueryView]) -> None:
    """S10: VTC, algorithm 2."""
    policy = Fair()
    for tenant, tokens in (("a", 500), ("b", 900)):
        done = make_query(tenant=tenant, to_prefill_tokens=tokens)
        policy.rank(done, 0.0)
        policy.on_tokens(done, tokens, 0)
        policy.rank(make_query(tenant=tenant, to_prefill_tokens=5), 0.0)
    policy.rank(make_query(tenant="c", to_prefill_tokens=5), 3600.0)
    assert policy.counter("c", 1) == 500


def test_returning_tenant_is_lifted_to_who_left_the_line_last(make_query: Callable[..., QueryView]) -> None:
    """S10: nobody is in line; output that came after the line emptied counts."""
    policy = Fair()
    for tenant, tokens in (("a", 900), ("b", 500)):
        done = make_query(tenant=tenant, to_prefill_tokens=tokens)
        policy.rank(done, 0.0)
        policy.on_tokens(done, tokens, 0)
        policy.on_tokens(replace(done, phase=Phase.RUNNING), 0, 50)
    policy.rank(make_query(tenant="c", to_prefill_tokens=5), 1.0)
    # b entered while a was alone: it started at a's counter.
    assert policy.counter("c", 1) == policy.counter("b", 1) == 950 + 500 + 50


def test_tenant_in_line_keeps_its_credit(make_query: Callable[..., QueryView]) -> None:
    policy = Fair()
    policy.rank(make_query(tenant="a", to_prefill_tokens=5), 0.0)
    for _ in range(10):
        busy = make_query(tenant="b", to_prefill_tokens=100)
        policy.rank(busy, 0.0)
        policy.on_tokens(busy, 100, 0)
    policy.rank(make_query(tenant="a", to_prefill_tokens=5), 0.0)
    assert policy.counter("a", 1) == 0


def test_what_others_got_in_one_class_costs_nothing_in_the_next(make_query: Callable[..., QueryView]) -> None:
    policy = Fair()
    heavy = make_query(tenant="a", class_order=0, to_prefill_tokens=9000)
    policy.rank(heavy, 0.0)
    policy.on_tokens(heavy, 9000, 0)
    policy.rank(make_query(tenant="c", class_order=0, to_prefill_tokens=1), 0.0)
    batch = [make_query(tenant=tenant, class_order=2, to_prefill_tokens=9) for tenant in "cb"]
    assert policy.counter("c", 0) == 9000
    assert order(policy, batch) == ["c", "b"]


def test_class_comes_before_counter(make_query: Callable[..., QueryView]) -> None:
    policy = Fair()
    heavy = make_query(tenant="a", class_order=0, to_prefill_tokens=9000)
    policy.rank(heavy, 0.0)
    policy.on_tokens(heavy, 9000, 0)
    claims = [make_query(tenant="b", class_order=1), make_query(tenant="a", class_order=0)]
    assert order(policy, claims) == ["a", "b"]


def test_class_of_which_nothing_is_begun_rises_until_one_is(make_query: Callable[..., QueryView]) -> None:
    """S8: whole class by whole class, so that its tenants stay in fair order."""
    policy = Fair(ageing_s=10.0)
    batch = make_query(class_order=2, arrival_s=0.0, to_prefill_tokens=8)
    other = make_query(class_order=2, arrival_s=0.0, to_prefill_tokens=8, tenant="b")

    def level(now_s: float) -> float:
        return policy.rank(other, now_s)[0]

    policy.rank(batch, 0.0)
    assert [level(now_s) for now_s in (9.0, 10.0, 29.0, 30.0)] == [2, 1, 0, -1]
    assert policy.rank(other, 30.0) < policy.rank(make_query(class_order=0, arrival_s=29.0), 30.0)
    policy.on_tokens(batch, 8, 0)
    assert [level(now_s) for now_s in (30.0, 39.0, 40.0)] == [2, 2, 1]


def test_aged_class_stands_behind_the_class_it_came_to(make_query: Callable[..., QueryView]) -> None:
    policy = Fair(ageing_s=10.0)
    aged = make_query(class_order=2, arrival_s=0.0)
    policy.rank(aged, 0.0)
    fresh = make_query(class_order=0, arrival_s=25.0)
    policy.rank(fresh, 25.0)
    policy.on_tokens(replace(fresh, phase=Phase.RUNNING), 0, 9999)
    next_one = make_query(class_order=0, arrival_s=26.0, tenant=fresh.tenant)
    assert policy.rank(aged, 26.0)[0] == policy.rank(next_one, 26.0)[0] == 0
    assert policy.rank(next_one, 26.0) < policy.rank(aged, 26.0)


def test_rows_go_by_class_only(make_query: Callable[..., QueryView]) -> None:
    """S2: however far the counters are apart."""
    policy = Fair()
    victim = make_query(tenant="a", phase=Phase.RUNNING)
    policy.on_tokens(victim, 0, 10**6)
    assert not policy.may_preempt(make_query(tenant="b"), victim, 0.0)
    assert policy.may_preempt(make_query(tenant="a", class_order=0), victim, 0.0)
    assert not policy.may_preempt(make_query(class_order=0), replace(victim, preemptible=False), 0.0)


def test_the_tenant_that_was_given_most_is_the_first_victim(make_query: Callable[..., QueryView]) -> None:
    policy = Fair()
    rows = [make_query(tenant=tenant, phase=Phase.RUNNING) for tenant in "ab"]
    policy.on_tokens(rows[0], 0, 10)
    policy.on_tokens(rows[1], 0, 5)
    assert order(policy, rows) == ["b", "a"]
    policy.rank(make_query(tenant="b", to_prefill_tokens=8000), 0.0)
    assert order(policy, rows) == ["b", "a"], "what is only in line doesn't count"


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
@pytest.mark.parametrize("field", ["prompt_weight", "output_weight"])
def test_meaningless_weights_are_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        Fair(**{field: value})


def test_who_leaves_a_class_is_no_demand_there(make_query: Callable[..., QueryView]) -> None:
    """S10: a query moves to another class; its tenant, idle in the first, comes back without credit."""
    policy = Fair()
    moved = make_query(tenant="a", to_prefill_tokens=100)
    policy.rank(moved, 0.0)
    policy.rank(replace(moved, sla_class="batch", class_order=2), 0.0)
    served = make_query(tenant="b", to_prefill_tokens=1000)
    policy.rank(served, 0.0)
    policy.on_tokens(served, 1000, 0)
    policy.rank(make_query(tenant="a", to_prefill_tokens=10), 0.0)
    assert policy.counter("a", 1) == 1000


def test_a_class_that_everybody_left_does_not_age(make_query: Callable[..., QueryView]) -> None:
    """S8: the class is not taken for one that has starved since the update."""
    policy = Fair(ageing_s=10.0)
    moved = make_query(class_order=1, to_prefill_tokens=100)
    policy.rank(moved, 0.0)
    policy.rank(replace(moved, class_order=2), 0.0)
    late = make_query(class_order=1, arrival_s=3600.0)
    assert policy.rank(late, 3600.0)[0] == 1


def test_an_update_refunds_what_was_not_begun_and_charges_what_comes(
    make_query: Callable[..., QueryView],
) -> None:
    """Those behind it in its former line move up; one that runs is charged in its new class."""
    policy = Fair()
    moved, behind = (make_query(tenant="a", to_prefill_tokens=100) for _ in range(2))
    place = policy.rank(moved, 0.0)[2]
    policy.rank(behind, 0.0)
    lowered = replace(moved, class_order=2)
    policy.rank(lowered, 0.0)
    assert policy.rank(behind, 0.0)[2] == place
    policy.on_tokens(lowered, 100, 0)
    policy.on_tokens(replace(lowered, phase=Phase.RUNNING), 0, 1)
    assert (policy.counter("a", 1), policy.counter("a", 2)) == (0, 101)
    policy.on_end(lowered)
    policy.on_end(behind)
    accounts = [account for tenants in policy._accounts.values() for account in tenants.values()]
    assert not any(account.line or account.tags for account in accounts)
