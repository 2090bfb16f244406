"""Expected remaining output."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batond.daemon.errors import ConfigError
from batond.policies.base import Phase, QueryView, TracksEnds
from batond.policies.history import OutputHistory
from batond.policies.shortest import Shortest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


@pytest.fixture
def make_history(make_query: Callable[..., QueryView]) -> Callable[..., OutputHistory]:
    """Return a factory of histories of the factory's flow."""

    def make(lengths: Iterable[int], **flow: str) -> OutputHistory:
        history = OutputHistory()
        for length in lengths:
            history.add(make_query(output_tokens=length, max_tokens=10**6, **flow))
        return history

    return make


def test_without_history_the_limit_is_expected(make_query: Callable[..., QueryView]) -> None:
    query = make_query(output_tokens=30, max_tokens=100)
    assert OutputHistory().total_tokens(query) == 100
    assert OutputHistory().remaining_tokens(query) == 70


def test_mean_of_the_flow_is_expected_but_no_more_than_the_limit(
    make_query: Callable[..., QueryView], make_history: Callable[..., OutputHistory]
) -> None:
    history = make_history([10, 20, 60])
    assert history.total_tokens(make_query(max_tokens=500)) == 30
    assert history.total_tokens(make_query(max_tokens=25)) == 25
    assert history.remaining_tokens(make_query(max_tokens=500)) == 30


@pytest.mark.parametrize("other", [{"tenant": "t1"}, {"sla_class": "batch"}])
def test_flows_are_told_apart(
    make_query: Callable[..., QueryView], make_history: Callable[..., OutputHistory], other: dict[str, str]
) -> None:
    assert make_history([10]).total_tokens(make_query(max_tokens=500, **other)) == 500


def test_who_outlived_the_short_is_compared_with_the_long(
    make_query: Callable[..., QueryView], make_history: Callable[..., OutputHistory]
) -> None:
    history = make_history([10] * 98 + [1000] * 2)
    left = [
        history.remaining_tokens(make_query(output_tokens=tokens, max_tokens=4000))
        for tokens in (0, 9, 20, 990)
    ]
    assert left[0] == pytest.approx(29.8)
    assert left[1] == pytest.approx(20.8)
    assert left[2:] == [980, 10]


def test_who_outlived_all_may_go_to_its_limit(
    make_query: Callable[..., QueryView], make_history: Callable[..., OutputHistory]
) -> None:
    assert make_history([10]).remaining_tokens(make_query(output_tokens=50, max_tokens=400)) == 350


def test_history_follows_its_users(
    make_query: Callable[..., QueryView], make_history: Callable[..., OutputHistory]
) -> None:
    history = make_history([1000] * 2000 + [10] * 2000)
    assert history.total_tokens(make_query(max_tokens=4000)) < 40


@given(
    lengths=st.lists(st.integers(1, 5000), max_size=30),
    max_tokens=st.integers(1, 5000),
    emitted=st.integers(0, 5000),
)
def test_expectations_stay_within_what_may_come(lengths: list[int], max_tokens: int, emitted: int) -> None:
    def query(output_tokens: int, most: int) -> QueryView:
        return QueryView("q", "t", "c", 0, True, 0.0, 1, Phase.WAITING, 1, 0, output_tokens, most)  # noqa: FBT003 - QueryView's order

    history = OutputHistory()
    for length in lengths:
        history.add(query(length, 5000))
    emitted = min(emitted, max_tokens)
    left = history.remaining_tokens(query(emitted, max_tokens))
    assert min(1, max_tokens - emitted) <= left <= max_tokens - emitted
    assert 1 <= history.total_tokens(query(0, max_tokens)) <= max_tokens


def test_order_is_class_then_remaining_then_arrival(make_query: Callable[..., QueryView]) -> None:
    policy = Shortest()
    urgent = make_query(class_order=0, max_tokens=900, arrival_s=9.0)
    early, late = (make_query(max_tokens=50, arrival_s=arrival_s) for arrival_s in (1.0, 2.0))
    nearly_done = make_query(max_tokens=500, output_tokens=490, arrival_s=3.0)
    claims = [late, early, urgent, nearly_done]
    assert sorted(claims, key=lambda query: policy.rank(query, 10.0)) == [urgent, nearly_done, early, late]


def test_learns_from_ends_but_not_from_what_never_ran(make_query: Callable[..., QueryView]) -> None:
    policy = Shortest()
    assert isinstance(policy, TracksEnds)
    policy.on_end(make_query(output_tokens=0))
    assert policy.rank(make_query(max_tokens=300), 0.0)[1] == 300
    policy.on_end(make_query(output_tokens=20))
    assert policy.rank(make_query(max_tokens=300), 0.0)[1] == 20


def test_takes_rows_for_a_clear_gain_only(make_query: Callable[..., QueryView]) -> None:
    policy = Shortest(gain=2.0)
    victim = make_query(phase=Phase.RUNNING, max_tokens=200, output_tokens=20)
    verdicts = [policy.may_preempt(make_query(max_tokens=most), victim, 0.0) for most in (90, 91, 200)]
    assert verdicts == [True, False, False]


def test_a_victim_that_outlived_its_flow_is_still_an_equal(make_query: Callable[..., QueryView]) -> None:
    """S2: its expected rest has grown past the newcomer's whole output."""
    policy = Shortest()
    for _ in range(9):
        policy.on_end(make_query(output_tokens=5))
    policy.on_end(make_query(output_tokens=1000))
    victim = make_query(phase=Phase.RUNNING, max_tokens=2000, output_tokens=10)
    newcomer = make_query(max_tokens=2000)
    assert policy.rank(newcomer, 0.0) < policy.rank(victim, 0.0)
    assert not policy.may_preempt(newcomer, victim, 0.0)


def test_history_tells_the_short_from_the_long(make_query: Callable[..., QueryView]) -> None:
    """Both ask for the same; what their tenants used before differs."""
    policy = Shortest()
    policy.on_end(make_query(output_tokens=20, tenant="chat"))
    policy.on_end(make_query(output_tokens=900, tenant="essays"))
    chat = make_query(max_tokens=2000, tenant="chat")
    essay = make_query(max_tokens=2000, tenant="essays", output_tokens=100, phase=Phase.RUNNING)
    assert policy.may_preempt(chat, essay, 0.0)
    assert not policy.may_preempt(essay, chat, 0.0)


def test_class_decides_first(make_query: Callable[..., QueryView]) -> None:
    policy = Shortest()
    victim = make_query(class_order=1, max_tokens=10**4, phase=Phase.RUNNING)
    assert not policy.may_preempt(make_query(class_order=2, max_tokens=1), victim, 0.0)
    assert policy.may_preempt(make_query(class_order=0, max_tokens=10**6), victim, 0.0)


@pytest.mark.parametrize("gain", [1.0, 0.0, math.nan])
def test_meaningless_gain_is_refused(gain: float) -> None:
    with pytest.raises(ConfigError, match="gain"):
        Shortest(gain=gain)


def test_who_goes_on_elsewhere_stands_in_a_line_of_its_own(make_query: Callable[..., QueryView]) -> None:
    """What is learnt moves a query that brings tokens past a fresh one: they can't be sorted together."""
    policy = Shortest()
    fresh = make_query(max_tokens=100)
    begun = make_query(max_tokens=100, output_tokens=50)
    assert policy.rank(begun, 0.0) < policy.rank(fresh, 0.0)
    policy.on_end(make_query(output_tokens=10))
    assert policy.rank(fresh, 0.0) < policy.rank(begun, 0.0)
    assert policy.line_of(fresh) != policy.line_of(begun)
    assert policy.line_of(fresh) == policy.line_of(make_query(max_tokens=100))
