"""Skip-join multi-level feedback queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from batond.daemon.errors import ConfigError
from batond.policies.base import Phase
from batond.policies.mlfq import Mlfq

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.policies.base import QueryView


def test_goes_down_a_queue_with_each_quantum(make_query: Callable[..., QueryView]) -> None:
    """Quanta of 10, 20, 40 tokens, then no end."""
    policy = Mlfq(quantum_tokens=10, queues=4, prompt_cost=0.0)
    places = {tokens: policy.queue_of(make_query(output_tokens=tokens)) for tokens in (0, 10, 11, 30, 31)}
    assert places == {0: 0, 10: 0, 11: 1, 30: 1, 31: 2}
    assert [policy.queue_of(make_query(output_tokens=tokens)) for tokens in (70, 71, 10**6)] == [2, 3, 3]


@pytest.mark.parametrize(("prompt", "queue"), [(1, 0), (20, 0), (21, 1), (40, 1), (41, 2), (10**6, 3)])
def test_a_long_prompt_joins_lower(make_query: Callable[..., QueryView], prompt: int, queue: int) -> None:
    """Skip-join: the first queue whose quantum takes the whole prompt, here at half a token each."""
    policy = Mlfq(quantum_tokens=10, queues=4, prompt_cost=0.5)
    assert policy.queue_of(make_query(prompt_tokens=prompt)) == queue


def test_a_long_prompt_has_the_rest_of_its_quantum(make_query: Callable[..., QueryView]) -> None:
    policy = Mlfq(quantum_tokens=10, queues=4, prompt_cost=0.5)
    assert [policy.queue_of(make_query(prompt_tokens=30, output_tokens=n)) for n in (5, 6)] == [1, 2]


def test_order_is_class_then_queue_then_arrival(make_query: Callable[..., QueryView]) -> None:
    policy = Mlfq(quantum_tokens=10, prompt_cost=1.0)
    urgent = make_query(class_order=0, prompt_tokens=500, arrival_s=9.0)
    early, late = (make_query(prompt_tokens=5, arrival_s=arrival_s) for arrival_s in (1.0, 2.0))
    long = make_query(prompt_tokens=50, arrival_s=0.0)
    claims = [long, late, early, urgent]
    assert sorted(claims, key=lambda query: policy.rank(query, 10.0)) == [urgent, early, late, long]


def test_ageing_lifts_past_queues_and_classes(make_query: Callable[..., QueryView]) -> None:
    """S8: FastServe's promotion."""
    policy = Mlfq(ageing_s=10.0)
    sunk = make_query(class_order=1, arrival_s=0.0, output_tokens=4000, max_tokens=5000, phase=Phase.PARKED)
    fresh = make_query(class_order=0, arrival_s=20.0)
    assert policy.rank(fresh, 19.0) < policy.rank(sunk, 19.0)
    assert policy.rank(sunk, 20.0) < policy.rank(fresh, 20.0)


def test_takes_rows_only_from_what_can_sink_deeper(make_query: Callable[..., QueryView]) -> None:
    """S2, and the same with FastServe's own rule."""
    policy, classic = Mlfq(quantum_tokens=10), Mlfq(quantum_tokens=10, preempt_alike=True)
    victim = make_query(phase=Phase.RUNNING, output_tokens=100, max_tokens=200)
    alike, short = make_query(max_tokens=200), make_query(max_tokens=8)
    assert [policy.may_preempt(newcomer, victim, 0.0) for newcomer in (alike, short)] == [False, True]
    assert [classic.may_preempt(newcomer, victim, 0.0) for newcomer in (alike, short)] == [True, True]
    fresh = make_query(phase=Phase.RUNNING, max_tokens=200)
    assert not policy.may_preempt(short, fresh, 0.0), "it has not sunk yet"


def test_class_decides_first(make_query: Callable[..., QueryView]) -> None:
    policy = Mlfq()
    short = make_query(class_order=2, max_tokens=1)
    long = make_query(class_order=1, output_tokens=5000, max_tokens=9000, phase=Phase.RUNNING)
    assert not policy.may_preempt(short, long, 0.0)
    assert policy.may_preempt(make_query(class_order=0, prompt_tokens=10**5), long, 0.0)


@pytest.mark.parametrize("options", [{"quantum_tokens": 0}, {"queues": 0}, {"prompt_cost": -1.0}])
def test_meaningless_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Mlfq(**options)
