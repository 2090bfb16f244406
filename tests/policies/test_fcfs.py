"""First come, first served."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from batond.policies.base import Phase
from batond.policies.fcfs import Fcfs

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.policies.base import QueryView


def test_orders_by_arrival_whatever_the_class(make_query: Callable[..., QueryView]) -> None:
    late = make_query(arrival_s=5.0, class_order=0)
    early = make_query(arrival_s=4.0, class_order=2)
    assert Fcfs().rank(early, 9.0) < Fcfs().rank(late, 9.0)


def test_equal_arrivals_go_by_seq(make_query: Callable[..., QueryView]) -> None:
    first, second = make_query(arrival_s=1.0), make_query(arrival_s=1.0)
    assert Fcfs().rank(first, 1.0) < Fcfs().rank(second, 1.0)


def test_never_preempts(make_query: Callable[..., QueryView]) -> None:
    """S2."""
    policy = Fcfs()
    newcomers = [make_query(class_order=order) for order in range(3)]
    victims = [make_query(class_order=order, phase=Phase.RUNNING) for order in range(3)]
    assert not any(policy.may_preempt(n, v, 0.0) for n, v in product(newcomers, victims))
