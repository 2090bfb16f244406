"""Rule 2: need in bytes, the minimal set of victims, or nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from batond.daemon.scheduler.line import Line
from batond.daemon.scheduler.victims import VictimPool
from batond.policies.fcfs import Fcfs
from batond.policies.priority import Priority

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.scheduler.plan import Plan

    from .conftest import FakeEngine, Views

    Planning = Callable[..., Plan]


def parked_ids(plan: Plan) -> set[str]:
    return {order.query_id for order in plan.park}


def test_free_rows_but_no_bytes_preempts_with_that_cause(plan: Planning, views: Views) -> None:
    """S5."""
    low, urgent = views.running("batch"), views.ready("interactive")
    result = plan(4, low, urgent, kv_free_bytes=0)
    assert [(o.query_id, o.cause, o.for_query_id) for o in result.park] == [
        (low.query_id, "kv_bytes", urgent.query_id)
    ]
    assert result.admit == (urgent.query_id,)


def test_fresh_urgent_arrival_without_bytes_is_computed_in_what_is_not_written_yet(
    plan: Planning, views: Views
) -> None:
    """S5: the victim's reserve that was never written takes the newcomer's prompt."""
    low = views.running("batch", reserved_bytes=500)
    urgent = views.waiting("interactive", prompt=8, max_tokens=20)
    result = plan(4, low, urgent, kv_free_bytes=0)
    assert parked_ids(result) == {low.query_id}
    assert result.admit == (urgent.query_id,)


def test_room_is_made_first_where_not_even_the_prompt_fits(plan: Planning, views: Views) -> None:
    """S5: chunks run before rows are taken, so they may not count on bytes of this step's victims."""
    low = views.running("batch", reserved_bytes=58, kv_bytes=58)
    urgent = views.waiting("interactive", prompt=20, max_tokens=20)
    result = plan(4, low, urgent, kv_free_bytes=0)
    assert [o.cause for o in result.park] == ["kv_bytes"]
    assert result.chunks == ()
    assert result.admit == ()


def test_bytes_made_free_ahead_of_the_chunk_are_kept_for_it(fake_engine: type[FakeEngine]) -> None:
    """S5: one step later the newcomer runs; its victim comes back after it, parked once."""
    engine = fake_engine(Priority(), rows=4, kv_bytes=60)
    low = engine.submit("batch", 10, 50)
    for _ in range(48):
        engine.step()
    urgent = engine.submit("interactive", 20, 10)
    engine.step()
    engine.step()
    assert engine.live[urgent].first_token_step == 49
    engine.run(most_steps=100)
    assert engine.finished[low].history == ["row", "park:offload", "row"]


def test_nobody_is_parked_if_no_set_suffices(plan: Planning, views: Views) -> None:
    """S6."""
    low = [views.running("batch", reserved_bytes=100) for _ in range(3)]
    urgent = views.ready("interactive", reserved_bytes=409)
    result = plan(4, *low, urgent, kv_free_bytes=100)
    assert not result.park
    assert result.blocked == {urgent.query_id: "kv_bytes"}
    assert len(plan(4, *low, views.ready("interactive", reserved_bytes=408), kv_free_bytes=100).park) == 3


def test_nobody_is_parked_for_a_row_that_the_bytes_would_not_fill(plan: Planning, views: Views) -> None:
    """S6."""
    low = views.running("batch", reserved_bytes=100)
    assert not plan(1, low, views.ready("interactive", reserved_bytes=500), kv_free_bytes=50).park


def test_a_victim_that_is_not_needed_is_spared(plan: Planning, views: Views) -> None:
    big = views.running("batch", reserved_bytes=300)
    small = views.running("batch", reserved_bytes=60)
    result = plan(2, big, small, views.ready("interactive", reserved_bytes=208), kv_free_bytes=0)
    assert parked_ids(result) == {big.query_id}


def test_only_what_is_missing_counts_for_a_prefilled_query(plan: Planning, views: Views) -> None:
    result = plan(2, views.running("batch"), views.ready(prompt=80, reserved_bytes=100), kv_free_bytes=20)
    assert not result.park
    assert len(result.admit) == 1


def test_parked_copy_needs_its_whole_reserve(plan: Planning, views: Views) -> None:
    parked = views.parked(reserved_bytes=100, kv_bytes=28)
    assert plan(1, parked, views.waiting(), kv_free_bytes=100).resume == (parked.query_id,)
    assert plan(2, views.running(), parked, kv_free_bytes=99).resume == ()


def test_head_of_the_line_is_not_overtaken_by_smaller_ones(plan: Planning, views: Views) -> None:
    """Rule 3."""
    running = views.running("interactive")
    parked = views.parked("standard", reserved_bytes=500)
    small = [views.ready("standard"), views.parked("standard", park_seq=2), views.ready("batch")]
    result = plan(8, running, parked, *small, kv_free_bytes=499)
    assert result.empty
    assert result.blocked[parked.query_id] == "kv_bytes"


def test_smaller_query_does_not_overtake_by_preempting(plan: Planning, views: Views) -> None:
    low = views.running("batch", reserved_bytes=100)
    big = views.ready("interactive", reserved_bytes=120)
    result = plan(4, low, big, views.ready("interactive"), views.ready("standard"), kv_free_bytes=0)
    assert result.empty


def test_urgent_query_passes_an_aged_one_on_bytes_of_its_own_victim(plan: Planning, views: Views) -> None:
    """S1: an aged head of the line that can't preempt must not shut out those who can."""
    low = views.running("batch", reserved_bytes=200)
    aged = views.parked("batch", reserved_bytes=400, arrival_s=0.0)
    urgent = views.ready("interactive", arrival_s=9_999.0, reserved_bytes=100)
    result = plan(4, low, aged, urgent, kv_free_bytes=300, now_s=10_000.0)
    assert parked_ids(result) == {low.query_id}
    assert result.admit == (urgent.query_id,)


def test_prefill_is_begun_only_if_everything_it_may_need_is_free(plan: Planning, views: Views) -> None:
    rows = [views.running("interactive")]
    assert not plan(1, *rows, views.waiting(prompt=8, max_tokens=92), kv_free_bytes=99).chunks
    assert plan(1, *rows, views.waiting(prompt=8, max_tokens=92), kv_free_bytes=100).chunks


def test_slices_ahead_count_against_the_bytes(plan: Planning, views: Views) -> None:
    rows = [views.running("interactive")]
    ready = views.ready("standard", prompt=40, reserved_bytes=100)
    fresh = views.waiting("standard", prompt=8, max_tokens=92)
    assert not plan(1, *rows, ready, fresh, kv_free_bytes=159, ready_limit=2).chunks
    assert plan(1, *rows, ready, fresh, kv_free_bytes=160, ready_limit=2).chunks


def test_bytes_held_by_less_urgent_slices_never_stop_everything(plan: Planning, views: Views) -> None:
    """Rule 7: nobody runs and the head lacks bytes, so those who hold some go first."""
    head = views.waiting("interactive", prompt=20, max_tokens=70)
    fresh = views.waiting("batch", prompt=5, max_tokens=5)
    holder = views.ready("batch", prompt=20, reserved_bytes=30)
    result = plan(2, head, fresh, holder, kv_free_bytes=80)
    assert result.admit == (holder.query_id,)
    assert not result.chunks


def test_query_that_can_never_fit_does_not_stop_the_others(plan: Planning, views: Views) -> None:
    """Rule 7: such a query is refused at submit; should one come through, it must not block."""
    fresh = views.waiting("batch")
    result = plan(2, views.waiting("interactive", prompt=10_000, arrival_s=90.0), fresh, kv_free_bytes=500)
    assert result.admit == (fresh.query_id,)


def test_overcommitted_bytes_are_no_reason_to_stop_what_needs_none(plan: Planning, views: Views) -> None:
    ready = views.ready(reserved_bytes=8)
    assert plan(2, views.running(), ready, kv_free_bytes=-5).admit == (ready.query_id,)


@pytest.mark.parametrize("policy", [Fcfs(), Priority(ageing_s=1.0)], ids=lambda policy: policy.name)
def test_tight_bytes_are_worked_off(fake_engine: type[FakeEngine], policy: Fcfs | Priority) -> None:
    """Rule 7, S4: mixed sizes and classes near the size of the whole store; all finish."""
    engine = fake_engine(policy, rows=4, kv_bytes=300, host_bytes=150, chunk_tokens=32, ready_limit=3)
    for number in range(60):
        sla = ("interactive", "standard", "batch")[number % 3]
        engine.submit(sla, 1 + (number * 53) % 150, 1 + (number * 31) % 150)
        engine.step()
    engine.run(most_steps=20_000)


# The factory only counts: sharing it between examples changes nothing.
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    running=st.lists(
        st.tuples(
            st.sampled_from(["interactive", "standard", "batch"]),
            st.integers(0, 40),
            st.integers(0, 10),
            st.integers(1, 50),
        ),
        max_size=8,
    ),
    sla=st.sampled_from(["interactive", "standard", "batch"]),
    rows=st.integers(0, 3),
    nbytes=st.integers(0, 200),
)
def test_victims_suffice_none_can_be_spared_and_refusal_is_right(
    *,
    views: Views,
    running: list[tuple[str, int, int, int]],
    sla: str,
    rows: int,
    nbytes: int,
) -> None:
    """Rule 2, S6."""
    assume(rows or nbytes)
    queries = [
        views.running(name, since=since, parks=parks, reserved_bytes=reserved)
        for name, since, parks, reserved in running
    ]
    policy = Priority()
    newcomer = views.ready(sla)
    choice = VictimPool(Line.of(queries, policy), 0.0).choose(newcomer, rows, nbytes)
    eligible = [
        query
        for query in queries
        if policy.may_preempt(newcomer, query, 0.0) and query.since_admission_tokens >= 16 and query.parks < 8
    ]

    def suffices(victims: list[object]) -> bool:
        return len(victims) >= rows and sum(query.reserved_bytes for query in victims) >= nbytes

    assert (choice.reason is None) == suffices(eligible)
    if choice.reason is not None:
        assert choice.victims == ()
        return
    victims = list(choice.victims)
    assert all(victim in eligible for victim in victims)
    assert suffices(victims)
    for victim in victims:
        assert not suffices([other for other in victims if other is not victim])
    # A spared query is never less urgent than one that was taken, unless it gives too little.
    if nbytes == 0 and victims:
        ranks = sorted((policy.rank(query, 0.0) for query in eligible), reverse=True)
        assert sorted((policy.rank(v, 0.0) for v in victims), reverse=True) == ranks[: len(victims)]
