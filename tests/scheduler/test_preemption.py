"""Rules 1, 2, 4 and 6: who gives up a row, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from batond.daemon.scheduler.plan import ParkMode
from batond.daemon.scheduler.planner import PlannerLimits
from batond.policies.fcfs import Fcfs
from batond.policies.priority import Priority

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.scheduler.plan import Plan
    from batond.policies.base import QueryView

    from .conftest import Views

    Planning = Callable[..., Plan]


def parked_ids(plan: Plan) -> list[str]:
    return [order.query_id for order in plan.park]


def test_urgent_arrival_takes_one_row_in_the_step_of_its_last_chunk(plan: Planning, views: Views) -> None:
    """S1."""
    low = [views.running("batch") for _ in range(4)]
    urgent = views.waiting("interactive")
    result = plan(4, *low, urgent)
    assert [(c.query_id, c.tokens, c.last) for c in result.chunks] == [(urgent.query_id, 8, True)]
    assert parked_ids(result) == [low[-1].query_id]
    assert (result.park[0].cause, result.park[0].for_query_id) == ("row", urgent.query_id)
    assert result.admit == (urgent.query_id,)


def test_victim_works_on_until_the_last_chunk(plan: Planning, views: Views) -> None:
    low, urgent = views.running("batch"), views.waiting("interactive", prompt=100)
    result = plan(1, low, urgent, chunk_tokens=64)
    assert [(c.tokens, c.last) for c in result.chunks] == [(64, False)]
    assert not result.park


def test_lowest_class_goes_first_then_the_latest_arrival(plan: Planning, views: Views) -> None:
    batch_early, batch_late, standard = views.running("batch"), views.running("batch"), views.running()
    result = plan(3, batch_early, batch_late, standard, views.ready("interactive"))
    assert parked_ids(result) == [batch_late.query_id]
    result = plan(3, batch_early, batch_late, standard, *(views.ready("interactive") for _ in range(3)))
    assert parked_ids(result) == [batch_late.query_id, batch_early.query_id, standard.query_id]


@pytest.mark.parametrize("sla", ["interactive", "standard", "batch"])
def test_equals_never_preempt(plan: Planning, views: Views, sla: str) -> None:
    """S2."""
    result = plan(1, views.running(sla), views.ready(sla))
    assert not result.park
    assert list(result.blocked.values()) == ["row"]


def test_aged_query_does_not_preempt(plan: Planning, views: Views) -> None:
    result = plan(1, views.running("standard"), views.ready("batch", arrival_s=0.0), now_s=1e6)
    assert not result.park


def test_class_that_is_not_preemptible_stays_whatever_the_policy_says(plan: Planning, views: Views) -> None:
    class Ruthless(Priority):
        def may_preempt(self, newcomer: QueryView, victim: QueryView, now_s: float) -> bool:
            return newcomer.class_order < victim.class_order

    victim = views.running("batch", preemptible=False)
    assert not plan(1, victim, views.ready("interactive"), policy=Ruthless()).park


def test_policy_that_lets_equals_preempt_each_other_is_overruled(plan: Planning, views: Views) -> None:
    """S2: rule 1 is the planner's, not the policy's."""

    class Careless(Priority):
        def may_preempt(self, newcomer: QueryView, victim: QueryView, now_s: float) -> bool:
            return newcomer.class_order <= victim.class_order

    assert not plan(1, views.running(), views.ready(), policy=Careless()).park
    assert plan(1, views.running("batch"), views.ready(), policy=Careless()).park


def test_fcfs_never_parks_for_anybody(plan: Planning, views: Views) -> None:
    assert not plan(1, views.running("batch"), views.ready("interactive"), policy=Fcfs()).park


def test_quantum_protects_up_to_its_last_token(plan: Planning, views: Views) -> None:
    """Rule 4."""
    urgent = views.ready("interactive")
    result = plan(1, views.running("batch", since=15), urgent)
    assert not result.park
    assert result.blocked == {urgent.query_id: "quantum"}
    assert len(plan(1, views.running("batch", since=16), urgent).park) == 1
    limits = PlannerLimits(quantum_tokens=3)
    assert len(plan(1, views.running("batch", since=3), urgent, limits=limits).park) == 1


def test_query_in_its_quantum_is_passed_over_for_the_next(plan: Planning, views: Views) -> None:
    other, fresh = views.running("batch", since=40), views.running("batch", since=2)
    assert parked_ids(plan(2, other, fresh, views.ready("interactive"))) == [other.query_id]


def test_park_cap(plan: Planning, views: Views) -> None:
    """Rule 3: a query parked too often is not pre-emptible any more."""
    urgent = views.ready("interactive")
    result = plan(1, views.running("batch", parks=8), urgent)
    assert not result.park
    assert result.blocked == {urgent.query_id: "park_cap"}
    assert len(plan(1, views.running("batch", parks=7), urgent).park) == 1


def test_free_row_is_used_before_anybody_is_parked(plan: Planning, views: Views) -> None:
    result = plan(2, views.running("batch"), views.ready("interactive"))
    assert not result.park
    assert len(result.admit) == 1


def test_free_row_goes_to_the_more_urgent_and_the_other_waits(plan: Planning, views: Views) -> None:
    first, urgent, low = views.running("batch"), views.ready("interactive"), views.ready("batch")
    result = plan(2, first, low, urgent)
    assert result.admit == (urgent.query_id,)
    assert not result.park


def test_query_that_ends_with_its_prefill_needs_no_row(plan: Planning, views: Views) -> None:
    low, single = views.running("batch"), views.waiting("interactive", max_tokens=1)
    result = plan(1, low, single)
    assert [(c.query_id, c.last) for c in result.chunks] == [(single.query_id, True)]
    assert result.park == ()
    assert result.admit == ()


def test_parked_urgent_query_may_preempt_too(plan: Planning, views: Views) -> None:
    low, parked = views.running("batch"), views.parked("standard")
    result = plan(1, low, parked)
    assert parked_ids(result) == [low.query_id]
    assert result.resume == (parked.query_id,)


def test_held_query_is_left_alone(plan: Planning, views: Views) -> None:
    held = views.parked("interactive", held=True)
    result = plan(2, views.running("batch"), held)
    assert result.empty
    assert result.blocked == {held.query_id: "held"}


@pytest.mark.parametrize("kind", ["waiting", "prefilling", "ready", "parked", "dropped"])
def test_held_query_of_any_phase_gets_nothing(plan: Planning, views: Views, kind: str) -> None:
    """R10."""
    assert plan(2, getattr(views, kind)(held=True)).empty


def test_host_pool_that_holds_one_slice_parks_the_others_by_recompute(plan: Planning, views: Views) -> None:
    """M1, rule 6."""
    low = [views.running("batch") for _ in range(3)]
    result = plan(3, *low, *(views.ready("interactive") for _ in range(3)), host_free_bytes=60)
    assert [order.mode for order in result.park] == [
        ParkMode.OFFLOAD,
        ParkMode.RECOMPUTE,
        ParkMode.RECOMPUTE,
    ]
    assert len(result.admit) == 3


def test_smaller_slice_still_fits_after_one_that_did_not(plan: Planning, views: Views) -> None:
    small, big = views.running("batch", prompt=4), views.running("batch", prompt=500)
    result = plan(2, small, big, *(views.ready("interactive") for _ in range(2)), host_free_bytes=60)
    assert {o.query_id: o.mode for o in result.park} == {
        big.query_id: ParkMode.RECOMPUTE,
        small.query_id: ParkMode.OFFLOAD,
    }


def test_model_whose_kv_cant_be_carried_is_recomputed(plan: Planning, views: Views) -> None:
    """R8."""
    result = plan(1, views.running("batch"), views.ready("interactive"), recompute_only=True)
    assert [order.mode for order in result.park] == [ParkMode.RECOMPUTE]


def test_query_of_zero_park_bytes_is_recomputed_if_nothing_can_be_carried(
    plan: Planning, views: Views
) -> None:
    victim = views.running("batch", park_bytes=0)
    result = plan(1, victim, views.ready("interactive"), recompute_only=True)
    assert [order.mode for order in result.park] == [ParkMode.RECOMPUTE]


def test_lowered_row_limit_parks_the_least_urgent(plan: Planning, views: Views) -> None:
    urgent, first, second = views.running("interactive"), views.running("batch"), views.running("batch")
    result = plan(2, urgent, first, second)
    assert [(o.query_id, o.cause, o.for_query_id) for o in result.park] == [
        (second.query_id, "row_limit", "")
    ]


def test_nothing_protects_from_a_lowered_row_limit(plan: Planning, views: Views) -> None:
    running = [views.running("interactive", since=0, parks=8) for _ in range(3)]
    assert len(plan(1, *running).park) == 2
    assert len(plan(0, *running).park) == 3


def test_lowered_row_limit_and_an_urgent_arrival_together(plan: Planning, views: Views) -> None:
    low = [views.running("batch") for _ in range(3)]
    urgent = views.ready("interactive")
    result = plan(2, *low, urgent)
    assert [o.cause for o in result.park] == ["row_limit", "row"]
    assert result.admit == (urgent.query_id,)
