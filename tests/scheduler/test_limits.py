"""Limits that move while queries run: bytes above the budget are given back, and nobody is lost by it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batond.bench.faults.counts import full_or
from batond.daemon.scheduler.plan import Gate, ParkMode
from batond.daemon.scheduler.planner import PlannerLimits
from batond.policies.base import Phase
from batond.policies.fcfs import Fcfs
from batond.policies.priority import Priority

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.scheduler.plan import Plan

    from .conftest import FakeEngine, Views

    Planning = Callable[..., Plan]

SLAS = ("interactive", "standard", "batch")


def shed(plan: Plan) -> list[str]:
    return [order.query_id for order in plan.park if order.cause == "kv_limit"]


def test_lowered_budget_parks_the_least_urgent_until_it_fits(plan: Planning, views: Views) -> None:
    """M8: three rows of 58 written bytes, 174 in all, under a budget of 120."""
    urgent, middle, low = (views.running(sla) for sla in SLAS)
    result = plan(4, urgent, middle, low, kv_free_bytes=120 - 3 * 108)
    assert [(one.query_id, one.mode, one.for_query_id) for one in result.park] == [
        (low.query_id, ParkMode.OFFLOAD, "")
    ]
    assert shed(result) == [low.query_id]


def test_what_is_promised_alone_parks_nobody(plan: Planning, views: Views) -> None:
    """M8: 216 bytes are promised, 116 are written: under a budget of 116 both go on, and nobody new comes."""
    running, fresh = [views.running("batch"), views.running("batch")], views.waiting("batch")
    result = plan(4, *running, fresh, kv_free_bytes=116 - 216)
    assert result.empty
    assert result.blocked == {fresh.query_id: "kv_bytes"}
    assert len(shed(plan(4, *running, kv_free_bytes=115 - 216))) == 1


def test_tokens_of_this_step_count(plan: Planning, views: Views) -> None:
    """M8: two rows write two bytes more before anybody looks again; a parked one writes none."""
    running = [views.running("batch"), views.running("batch")]
    assert not shed(plan(4, *running, kv_free_bytes=118 - 216, row_step_bytes=1))
    assert len(shed(plan(4, *running, kv_free_bytes=117 - 216, row_step_bytes=1))) == 1


def test_neither_class_nor_quantum_nor_park_cap_protects(plan: Planning, views: Views) -> None:
    """M8: memory that is not there can't be had from anybody else."""
    kept = views.running("interactive", since=50)
    young = views.running("interactive", since=1)
    capped = views.running("batch", parks=8)
    result = plan(4, kept, young, capped, kv_free_bytes=60 - 324, policy=Fcfs())
    assert set(shed(result)) == {young.query_id, capped.query_id}


def test_the_last_running_query_is_never_parked(plan: Planning, views: Views) -> None:
    """M8, rule 7: under a budget below its need it goes on alone; slices give way to it."""
    running, ready = views.running("batch"), views.ready("interactive")
    result = plan(4, running, ready, kv_free_bytes=1 - 108 - 8)
    assert shed(result) == [ready.query_id]


@pytest.mark.parametrize("make", ["ready", "prefilling"])
def test_slices_without_a_row_are_put_off_too(plan: Planning, views: Views, make: str) -> None:
    """M8: a less urgent slice on the device goes before a row, and is not served in the same step."""
    urgent = views.running("interactive")
    slice_ = getattr(views, make)("batch", prompt=30, park_bytes=30)
    written = 58 + slice_.kv_bytes
    result = plan(4, urgent, slice_, kv_free_bytes=written - 1 - 108 - slice_.kv_bytes)
    assert shed(result) == [slice_.query_id]
    assert not result.admit
    assert not result.chunks
    assert slice_.query_id not in result.blocked


def test_who_is_held_by_hand_gives_way_first(plan: Planning, views: Views) -> None:
    held = views.prefilling("interactive", held=True, phase=Phase.PARKED, park_seq=1)
    running = [views.running("batch"), views.running("batch")]
    assert shed(plan(4, held, *running, kv_free_bytes=117 - 216 - 4)) == [held.query_id]


def test_who_is_not_needed_is_spared(plan: Planning, views: Views) -> None:
    """M8: a small less urgent row is not parked where a larger one has to go anyhow."""
    small = views.running("batch", prompt=2, since=2)
    big, urgent = views.running("batch"), views.running("interactive")
    result = plan(4, urgent, big, small, kv_free_bytes=70 - 108 - 108 - 102)
    assert shed(result) == [big.query_id]


def test_bytes_that_come_free_are_not_given_to_others_in_the_same_step(plan: Planning, views: Views) -> None:
    """Rule 3: who is parked stands in line from the next step on; a smaller one must not pass it before."""
    rows = [views.running("batch", prompt=100, reserved_bytes=300), views.running("batch", reserved_bytes=60)]
    small = views.waiting("batch", prompt=5, max_tokens=5)
    result = plan(4, views.running("interactive"), *rows, small, kv_free_bytes=198 - 468)
    assert shed(result) == [rows[0].query_id]
    assert not result.admit
    assert not result.chunks


def test_no_room_in_the_host_pool_is_no_reason_to_stay(plan: Planning, views: Views) -> None:
    """Rule 6."""
    rows = [views.running("batch"), views.running("batch")]
    result = plan(4, *rows, kv_free_bytes=100 - 216, host_free_bytes=10)
    assert [order.mode for order in result.park] == [ParkMode.RECOMPUTE]


def test_who_needs_more_than_there_is_stops_nobody(plan: Planning, views: Views) -> None:
    """Rule 7: the head of the line fits into no budget of today; those behind it do."""
    running = views.running("interactive")
    head = views.parked("standard", reserved_bytes=500, arrival_s=90.0)
    small = views.ready("standard")
    result = plan(8, running, head, small, kv_free_bytes=200)
    assert result.admit == (small.query_id,)
    assert result.blocked == {head.query_id: "kv_bytes"}


def test_who_needs_more_than_there_is_is_not_passed_for_ever(plan: Planning, views: Views) -> None:
    """Rule 5, S8: after a minute it stops the line, and is served alone once nobody runs."""
    head = views.parked("standard", reserved_bytes=500, park_bytes=20, arrival_s=39.0)
    small = views.ready("standard")
    waits = plan(8, views.running("interactive"), head, small, kv_free_bytes=200)
    assert waits.empty
    assert waits.blocked == {head.query_id: "kv_bytes", small.query_id: "kv_bytes"}
    alone = plan(8, head, small, kv_free_bytes=200)
    assert alone.resume == (head.query_id,)
    assert not alone.admit


def test_a_large_query_is_served_among_small_ones_that_never_end(fake_engine: type[FakeEngine]) -> None:
    """Rule 5, S8: memory stays short, and there is always somebody small who fits."""
    engine = fake_engine(Fcfs(), rows=4, kv_bytes=100, limits=PlannerLimits(pass_over_s=2.0))
    large = engine.submit("standard", 60, 60)
    for _ in range(200):
        engine.submit("standard", 5, 10)
        engine.step()
    assert engine.phase(large) is Phase.WAITING
    assert len(engine.finished) > 60
    for _ in range(100):
        engine.submit("standard", 5, 10)
        engine.step()
    assert large in engine.finished


@pytest.mark.parametrize("gate", list(Gate))
def test_one_that_needs_more_than_there_is_runs_alone(fake_engine: type[FakeEngine], gate: Gate) -> None:
    """Rule 7: nobody else is there, so it goes beyond the budget rather than stall."""
    engine = fake_engine(Priority(), rows=2, kv_bytes=20, chunk_tokens=8, gate=gate)
    query_id = engine.submit("batch", 30, 30)
    engine.run(most_steps=60)
    assert engine.finished[query_id].history == ["row"]


def test_slices_that_lock_each_other_out_give_way_to_one(fake_engine: type[FakeEngine]) -> None:
    """Rule 7: two prefilled queries under a budget that serves neither beside the other."""
    engine = fake_engine(Fcfs(), rows=1, kv_bytes=400, ready_limit=3)
    first = engine.submit("standard", 10, 12)
    ahead = [engine.submit("standard", 20, 60) for _ in range(3)]
    while any(engine.phase(query_id) is not Phase.READY for query_id in ahead):
        engine.step()
    engine.kv_bytes = 75
    engine.rows = 3
    engine.run(most_steps=400)
    assert set(engine.finished) == {first, *ahead}


def test_lowered_once_parks_everybody_once_at_most(fake_engine: type[FakeEngine]) -> None:
    """S2: no ping-pong. Who came back has its whole reserve, and is not parked for the limit again."""
    engine = fake_engine(Priority(), rows=8, kv_bytes=900)
    for number in range(24):
        engine.submit(SLAS[number % 3], 10, 40 + number)
    for _ in range(12):
        engine.step()
    engine.kv_bytes = 120
    engine.step()
    assert sum(query.limit_parks for query in engine.live.values()) >= 2
    engine.run(most_steps=4000)
    limit_parks = [query.limit_parks for query in engine.finished.values()]
    assert max(limit_parks) == 1
    assert engine.park_count == sum(query.view.parks for query in engine.finished.values())


def test_who_was_parked_comes_back_in_order_once_the_budget_is_raised(fake_engine: type[FakeEngine]) -> None:
    """S3: lowered to a third and raised again, the parked run before whoever came after them."""
    engine = fake_engine(Fcfs(), rows=6, kv_bytes=700)
    first = [engine.submit("standard", 10, 80) for _ in range(6)]
    for _ in range(10):
        engine.step()
    engine.kv_bytes = 60
    engine.step()
    parked = [query_id for query_id in first if engine.phase(query_id) is Phase.PARKED]
    assert len(parked) == 4
    late = engine.submit("standard", 5, 5)
    engine.step()
    assert engine.phase(late) is Phase.WAITING
    engine.kv_bytes = 700
    plan = engine.step()
    order = {query_id: engine.live[query_id].view.seq for query_id in parked}
    assert list(plan.resume) == sorted(parked, key=order.__getitem__, reverse=True)
    assert not plan.park


def test_rows_follow_the_limit_down_and_up(fake_engine: type[FakeEngine]) -> None:
    """M8: the row limit is lowered and raised; READY and parked queries get rows in order, all of them."""
    engine = fake_engine(Priority(), rows=6, ready_limit=2)
    for number in range(16):
        engine.submit(SLAS[number % 3], 6, 60)
    for _ in range(4):
        engine.step()
    for rows in (2, 6, 1, 6):
        engine.rows = rows
        engine.step()
        engine.step()
        running = [query for query in engine.live.values() if query.view.phase is Phase.RUNNING]
        assert len(running) == rows
    engine.run(most_steps=2000)
    assert engine.park_count == sum(query.view.parks for query in engine.finished.values())


LIMITS = PlannerLimits(quantum_tokens=4, max_parks=3, pass_over_s=0.2)
ARRIVALS = st.lists(
    st.tuples(st.integers(0, 60), st.sampled_from(SLAS), st.integers(1, 30), st.integers(1, 30)),
    min_size=1,
    max_size=14,
)
MOVES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 200)), min_size=1, max_size=40)


@settings(
    max_examples=full_or(60, 2000),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    arrivals=ARRIVALS,
    moves=MOVES,
    policy=st.sampled_from([Fcfs, lambda: Priority(ageing_s=0.3), Priority]),
    chunk_tokens=st.sampled_from([None, 7]),
    gate=st.sampled_from([Gate.ITERATION, Gate.ITERATION, Gate.BATCH]),
    host_bytes=st.sampled_from([0, 60, 1 << 30]),
    expects=st.sampled_from([None, 4]),
)
def test_all_finish_while_limits_move_in_every_step(  # noqa: PLR0917 - hypothesis passes by name
    fake_engine: type[FakeEngine],
    arrivals: list[tuple[int, str, int, int]],
    moves: list[tuple[int, int]],
    policy: Callable[[], Fcfs | Priority],
    chunk_tokens: int | None,
    gate: Gate,
    host_bytes: int,
    expects: int | None,
) -> None:
    """M8: rows and budget change every step; nobody stalls, no token is lost or counted twice.

    The fake engine holds every step to the budget, unless a single query is left, and every plan to the
    contract: who gets a row has all bytes it is expected to need.
    """
    engine = fake_engine(
        policy(),
        rows=3,
        limits=LIMITS,
        host_bytes=host_bytes,
        expects=expects,
        chunk_tokens=chunk_tokens,
        gate=gate,
        kv_bytes=100,
    )
    coming = sorted(arrivals, reverse=True)
    for step in range(4000):
        engine.rows, engine.kv_bytes = moves[step % len(moves)]
        while coming and coming[-1][0] <= step:
            _, sla, prompt, tokens = coming.pop()
            engine.submit(sla, prompt, tokens)
        running = any(query.view.phase is Phase.RUNNING for query in engine.live.values())
        if engine.live:
            plan = engine.step()
            assert running or not plan.empty, f"nobody moves: {plan.blocked}"
        if not (engine.live or coming):
            break
    assert len(engine.finished) == len(arrivals)
    for query in engine.finished.values():
        assert query.view.output_tokens == query.view.max_tokens
