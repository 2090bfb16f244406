"""Slack to targets and deadlines."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from batond.daemon.errors import ConfigError
from batond.policies.base import Phase
from batond.policies.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.policies.base import QueryView


@pytest.fixture
def policy() -> Deadline:
    """Return a policy that reckons with 0.5 s a token and 0.25 s a prompt token; exact in binary."""
    return Deadline(token_s=0.5, prefill_token_s=0.25, margin_s=1.0)


@pytest.fixture
def make(make_query: Callable[..., QueryView]) -> Callable[..., QueryView]:
    """Return a factory of queries that arrive at 0 with targets of 10 s and 1 s."""

    def make(**changes: object) -> QueryView:
        return make_query(**({"arrival_s": 0.0, "ttft_target_s": 10.0, "tpot_target_s": 1.0} | changes))

    return make


def test_first_token_is_due_at_the_ttft_target(policy: Deadline, make: Callable[..., QueryView]) -> None:
    query = make(to_prefill_tokens=8)
    assert [policy.slack_s(query, now_s) for now_s in (0.0, 8.0, 9.0)] == [8, 0, -1]


def test_next_token_is_due_by_the_tpot_target(policy: Deadline, make: Callable[..., QueryView]) -> None:
    """Who is ahead of its target has time; who waits loses it."""
    query = make(output_tokens=4, phase=Phase.RUNNING)
    assert policy.slack_s(query, 5.0) == 10 + 4 - 5 - 0.5
    dropped = replace(query, phase=Phase.PARKED, to_prefill_tokens=12)
    assert policy.slack_s(dropped, 7.0) == 10 + 4 - 7 - 3 - 0.5


def test_own_deadline_counts_the_whole_rest(policy: Deadline, make: Callable[..., QueryView]) -> None:
    query = make(deadline_s=12.0, max_tokens=16, output_tokens=4, phase=Phase.RUNNING)
    assert policy.slack_s(query, 1.0) == 12 - 1 - 12 * 0.5
    assert policy.slack_s(replace(query, deadline_s=1e6), 1.0) == 10 + 4 - 1 - 0.5, (
        "a loose one costs nothing"
    )


def test_rest_is_expected_from_what_the_flow_put_out(
    policy: Deadline, make: Callable[..., QueryView]
) -> None:
    policy.on_end(make(output_tokens=6))
    policy.on_end(make(output_tokens=0))
    assert policy.slack_s(make(deadline_s=9.0, max_tokens=1000), 0.0) == 9 - 6 * 0.5


def test_deadline_makes_nobody_more_urgent_than_one_that_is_due(
    policy: Deadline, make: Callable[..., QueryView]
) -> None:
    """Callers can only lower themselves: a late query of any class comes before a tight deadline."""
    tight = make(deadline_s=4.0, max_tokens=16, output_tokens=4, phase=Phase.RUNNING)
    late = make(arrival_s=-20.0)
    assert policy.slack_s(tight, 0.0) == 0
    assert policy.rank(late, 0.0) < policy.rank(tight, 0.0)


def test_hopeless_deadline_is_not_rushed(policy: Deadline, make: Callable[..., QueryView]) -> None:
    query = make(deadline_s=7.0, max_tokens=16)
    assert policy.slack_s(query, 0.0) == 10
    assert policy.slack_s(replace(query, deadline_s=8.0), 0.0) == 0


def test_without_targets_order_is_arrival(make_query: Callable[..., QueryView]) -> None:
    policy = Deadline()
    early, late = make_query(class_order=2, arrival_s=1.0), make_query(class_order=0, arrival_s=2.0)
    assert policy.rank(early, 5.0) < policy.rank(late, 5.0)
    assert not policy.may_preempt(late, replace(early, phase=Phase.RUNNING), 5.0)


def test_takes_rows_for_clearly_less_slack_only(policy: Deadline, make: Callable[..., QueryView]) -> None:
    victim = make(class_order=2, output_tokens=4, phase=Phase.RUNNING)
    slack_s = policy.slack_s(victim, 0.0)
    verdicts = [
        policy.may_preempt(make(class_order=0, ttft_target_s=slack_s - less_s), victim, 0.0)
        for less_s in (0.5, 1.0, 1.5)
    ]
    assert verdicts == [False, False, True]
    assert not policy.may_preempt(
        make(class_order=0, ttft_target_s=0.1), replace(victim, preemptible=False), 0.0
    )


def test_no_deadline_takes_a_row_from_a_more_urgent_class(
    policy: Deadline, make: Callable[..., QueryView]
) -> None:
    victim = make(class_order=1, output_tokens=12, phase=Phase.RUNNING)
    newcomer = make(class_order=2, deadline_s=8.0)
    assert policy.slack_s(newcomer, 0.0) + 1 < policy.slack_s(victim, 0.0)
    assert not policy.may_preempt(newcomer, victim, 0.0)
    assert policy.may_preempt(replace(newcomer, class_order=1), victim, 0.0)


def test_equals_ahead_of_their_target_are_left_alone(
    policy: Deadline, make: Callable[..., QueryView]
) -> None:
    """S2: a running query gains slack with each token; that makes it no victim of its equals."""
    victim = make(output_tokens=15, phase=Phase.RUNNING)
    newcomer = make(arrival_s=0.01)
    assert policy.slack_s(newcomer, 0.5) + 10 < policy.slack_s(victim, 0.5)
    assert not policy.may_preempt(newcomer, victim, 0.5)
    both = {"deadline_s": 20.0}
    assert not policy.may_preempt(replace(newcomer, **both), replace(victim, **both), 0.5)


def test_earlier_deadline_takes_a_row_of_its_class(policy: Deadline, make: Callable[..., QueryView]) -> None:
    victim = make(deadline_s=60.0, ttft_target_s=100.0, phase=Phase.RUNNING)
    newcomer = make(deadline_s=20.0, ttft_target_s=100.0)
    assert policy.may_preempt(newcomer, victim, 0.0)
    assert not policy.may_preempt(victim, newcomer, 0.0)


@pytest.mark.parametrize("field", ["token_s", "prefill_token_s", "margin_s"])
@pytest.mark.parametrize("value", [-0.1, math.nan])
def test_meaningless_times_are_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        Deadline(**{field: value})
