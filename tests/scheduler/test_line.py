"""Rule 3: the parked line; and the reasons given to those who wait."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from batond.policies.base import Phase
from batond.policies.fcfs import Fcfs
from batond.policies.priority import Priority

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.scheduler.plan import Plan

    from .conftest import Views

    Planning = Callable[..., Plan]


@pytest.mark.parametrize("policy", [Fcfs(), Priority(ageing_s=math.inf), Priority(ageing_s=7.0)])
@pytest.mark.parametrize("kind", ["ready", "waiting"])
def test_parked_wins_over_fresh_of_its_class_submitted_earlier(
    plan: Planning, views: Views, policy: Fcfs | Priority, kind: str
) -> None:
    """S3; also if the fresh one has aged for longer."""
    fresh = getattr(views, kind)(arrival_s=0.0)
    parked = views.parked(arrival_s=20.0)
    result = plan(1, fresh, parked, policy=policy, now_s=25.0)
    assert result.resume == (parked.query_id,)
    assert result.admit == ()


def test_parked_line_is_in_park_order(plan: Planning, views: Views) -> None:
    third, first, second = (views.parked(park_seq=number) for number in (9, 4, 7))
    assert plan(2, third, first, second).resume == (first.query_id, second.query_id)


def test_more_urgent_fresh_query_comes_before_the_parked_line(plan: Planning, views: Views) -> None:
    parked, urgent = views.parked("batch"), views.ready("interactive")
    result = plan(1, parked, urgent)
    assert result.admit == (urgent.query_id,)
    assert result.blocked == {parked.query_id: "row"}


@pytest.mark.parametrize("phase", [Phase.PREFILLING, Phase.READY])
def test_query_computed_again_keeps_its_place(plan: Planning, views: Views, phase: Phase) -> None:
    again = views.dropped(phase=phase, to_prefill_tokens=0 if phase is Phase.READY else 3)
    result = plan(1, views.ready(arrival_s=0.0), again)
    assert result.admit == (again.query_id,)


def test_parked_line_alternates_copies_and_recomputes_in_order(plan: Planning, views: Views) -> None:
    copy_first, dropped, copy_last = (
        views.parked(park_seq=1),
        views.dropped(park_seq=2),
        views.parked(park_seq=3),
    )
    result = plan(2, copy_last, dropped, copy_first)
    assert result.resume == (copy_first.query_id,)
    assert result.admit == (dropped.query_id,)


def test_reasons_are_given_for_the_head_of_the_line_only(plan: Planning, views: Views) -> None:
    waiting = [views.ready() for _ in range(20)]
    result = plan(1, views.running(), *waiting)
    assert result.blocked == {query.query_id: "row" for query in waiting[:8]}


def test_order_of_the_view_does_not_matter(plan: Planning, views: Views) -> None:
    queries = [
        views.running("batch"),
        views.running("standard"),
        views.parked("batch"),
        views.ready("interactive"),
        views.waiting("interactive"),
        views.waiting("standard"),
    ]
    assert plan(3, *queries) == plan(3, *reversed(queries))


def test_nothing_to_do_is_an_empty_plan(plan: Planning, views: Views) -> None:
    assert plan(4).empty
    assert plan(4, views.running()).empty
    assert plan(0, views.ready()).empty
