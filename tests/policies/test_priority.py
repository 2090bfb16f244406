"""Class order with ageing."""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batond.daemon.errors import ConfigError
from batond.policies.base import Phase, QueryView
from batond.policies.priority import Priority

if TYPE_CHECKING:
    from collections.abc import Callable


def test_class_comes_before_arrival(make_query: Callable[..., QueryView]) -> None:
    batch = make_query(class_order=2, arrival_s=0.0)
    urgent = make_query(class_order=0, arrival_s=1.0)
    assert Priority().rank(urgent, 2.0) < Priority().rank(batch, 2.0)


def test_ageing_lifts_a_waiting_query_by_whole_classes(make_query: Callable[..., QueryView]) -> None:
    policy, batch = Priority(ageing_s=10.0), make_query(class_order=2, arrival_s=0.0)
    assert [policy.rank(batch, now)[0] for now in (0.0, 9.9, 10.0, 19.9, 20.0, 35.0)] == [2, 2, 1, 1, 0, -1]


def test_a_running_query_does_not_age(make_query: Callable[..., QueryView]) -> None:
    batch = make_query(class_order=2, arrival_s=0.0, phase=Phase.RUNNING)
    assert Priority(ageing_s=1.0).rank(batch, 1000.0)[0] == 2


def test_arrival_in_the_future_is_no_penalty(make_query: Callable[..., QueryView]) -> None:
    assert Priority(ageing_s=1.0).rank(make_query(arrival_s=50.0), 0.0)[0] == 1


def test_without_ageing_the_class_stays(make_query: Callable[..., QueryView]) -> None:
    assert Priority(ageing_s=math.inf).rank(make_query(class_order=2, arrival_s=0.0), 1e9)[0] == 2


def test_preempts_strictly_lower_classes_only(make_query: Callable[..., QueryView]) -> None:
    """S2: equals never."""
    policy = Priority()
    for newcomer, victim in product(range(3), range(3)):
        allowed = policy.may_preempt(
            make_query(class_order=newcomer), make_query(class_order=victim, phase=Phase.RUNNING), 1e9
        )
        assert allowed == (newcomer < victim)


def test_class_that_is_not_preemptible_is_left_alone(make_query: Callable[..., QueryView]) -> None:
    victim = make_query(class_order=2, preemptible=False, phase=Phase.RUNNING)
    assert not Priority().may_preempt(make_query(class_order=0), victim, 0.0)


def test_ageing_gives_no_right_to_a_row(make_query: Callable[..., QueryView]) -> None:
    aged = make_query(class_order=2, arrival_s=0.0)
    victim = make_query(class_order=1, arrival_s=999.0, phase=Phase.RUNNING)
    assert not Priority(ageing_s=1.0).may_preempt(aged, victim, 1000.0)


@pytest.mark.parametrize("ageing_s", [0.0, -1.0, math.nan])
def test_meaningless_ageing_is_refused(ageing_s: float) -> None:
    with pytest.raises(ConfigError, match="ageing_s"):
        Priority(ageing_s=ageing_s)


@given(
    order=st.integers(0, 5),
    later_order=st.integers(0, 5),
    # Whole seconds: the bound is about order, not about rounding of the clock.
    arrival_s=st.integers(0, 1000),
    ageing_s=st.integers(1, 100),
    after_s=st.integers(0, 1000),
    wait_s=st.integers(0, 5000),
)
def test_nothing_that_comes_after_the_stated_time_overtakes(
    *, order: int, later_order: int, arrival_s: int, ageing_s: int, after_s: int, wait_s: int
) -> None:
    """S8: the bound in the docstring, for all classes and times."""

    def query(seq: int, class_order: int, arrival: int) -> QueryView:
        return QueryView(
            query_id=f"q{seq}",
            tenant="t",
            sla_class="c",
            class_order=class_order,
            preemptible=True,
            arrival_s=float(arrival),
            seq=seq,
            phase=Phase.WAITING,
            prompt_tokens=1,
            prefilled_tokens=0,
            output_tokens=0,
            max_tokens=1,
        )

    policy = Priority(ageing_s=float(ageing_s))
    later_arrival_s = arrival_s + order * ageing_s + after_s
    now_s = float(later_arrival_s + wait_s)
    first, later = query(1, order, arrival_s), query(2, later_order, later_arrival_s)
    assert policy.rank(first, now_s) < policy.rank(later, now_s)
