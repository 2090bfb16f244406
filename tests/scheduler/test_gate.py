"""Run-to-completion: the batch is filled at once, and only when it is empty."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batond.daemon.scheduler.plan import Gate
from batond.policies.base import Phase
from batond.policies.fcfs import Fcfs
from batond.policies.priority import Priority

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.scheduler.plan import Plan

    from .conftest import FakeEngine, Views

    Planning = Callable[..., Plan]


def test_nobody_is_admitted_while_one_runs(plan: Planning, views: Views) -> None:
    ready = views.ready()
    result = plan(4, views.running(), ready, gate=Gate.BATCH)
    assert result.empty
    assert result.blocked == {ready.query_id: "row"}


def test_nobody_is_preempted(plan: Planning, views: Views) -> None:
    assert plan(1, views.running("batch"), views.ready("interactive"), gate=Gate.BATCH).empty


def test_next_batch_is_computed_ahead_up_to_the_rows(plan: Planning, views: Views) -> None:
    waiting = [views.waiting() for _ in range(6)]
    result = plan(3, views.running(), *waiting, gate=Gate.BATCH)
    assert [chunk.query_id for chunk in result.chunks] == [query.query_id for query in waiting[:3]]
    assert not result.admit


def test_all_rows_are_filled_at_once(plan: Planning, views: Views) -> None:
    parked, ready, waiting, late = views.parked(), views.ready(), views.waiting(), views.waiting()
    result = plan(3, parked, ready, waiting, late, gate=Gate.BATCH)
    assert result.resume == (parked.query_id,)
    assert result.admit == (ready.query_id, waiting.query_id)


def test_admission_waits_until_the_whole_group_is_computed(plan: Planning, views: Views) -> None:
    ready, long = views.ready(), views.waiting(prompt=100)
    result = plan(2, ready, long, chunk_tokens=64, gate=Gate.BATCH)
    assert [chunk.tokens for chunk in result.chunks] == [64]
    assert result.admit == ()
    assert result.blocked == {ready.query_id: "row", long.query_id: "prefill"}


def test_fewer_than_the_rows_run_alone(plan: Planning, views: Views) -> None:
    assert len(plan(8, views.waiting(), views.ready(), gate=Gate.BATCH).admit) == 2


def test_one_token_query_takes_no_row_of_the_group(plan: Planning, views: Views) -> None:
    single, first, second = views.waiting(max_tokens=1), views.waiting(), views.waiting()
    result = plan(2, single, first, second, gate=Gate.BATCH)
    assert len(result.chunks) == 3
    assert result.admit == (first.query_id, second.query_id)


def test_group_is_cut_where_the_bytes_end(plan: Planning, views: Views) -> None:
    queries = [views.waiting(prompt=8, max_tokens=92) for _ in range(4)]
    result = plan(4, *queries, kv_free_bytes=250, gate=Gate.BATCH)
    assert result.admit == tuple(query.query_id for query in queries[:2])
    assert result.blocked == {queries[2].query_id: "kv_bytes"}


def test_held_bytes_do_not_stop_everything(plan: Planning, views: Views) -> None:
    """Rule 7."""
    holder = views.ready("batch", prompt=20, reserved_bytes=30)
    head = views.waiting("interactive", prompt=20, max_tokens=70)
    assert plan(2, head, holder, kv_free_bytes=80, gate=Gate.BATCH).admit == (holder.query_id,)


def test_lowered_row_limit_holds_here_too(plan: Planning, views: Views) -> None:
    assert len(plan(1, views.running(), views.running(), gate=Gate.BATCH).park) == 1


def test_bytes_of_a_row_above_the_limit_are_written_to_in_the_next_step(plan: Planning, views: Views) -> None:
    """S4: chunks run before rows are taken, and what a victim has written is still there."""
    running = [views.running("interactive", prompt=8, since=40, reserved_bytes=60) for _ in range(2)]
    short, long = (views.waiting(prompt=prompt, max_tokens=1) for prompt in (23, 24))
    assert plan(1, *running, short, kv_free_bytes=0, gate=Gate.BATCH).chunks
    result = plan(1, *running, long, kv_free_bytes=0, gate=Gate.BATCH)
    assert (len(result.park), result.chunks) == (1, ())


def test_batches_run_to_completion(fake_engine: type[FakeEngine]) -> None:
    engine = fake_engine(Priority(), rows=4, gate=Gate.BATCH, chunk_tokens=16)
    lengths = [3 + (number * 29) % 40 for number in range(22)]
    for number, length in enumerate(lengths):
        engine.submit(("interactive", "batch")[number % 2], 1 + number, length)
    while engine.live:
        before = sum(query.view.phase is Phase.RUNNING for query in engine.live.values())
        result = engine.step()
        assert not (before and (result.admit or result.resume))
    assert engine.park_count == 0


def test_continuous_batching_takes_fewer_steps(fake_engine: type[FakeEngine]) -> None:
    """The point of the comparison."""
    steps = []
    for gate in (Gate.BATCH, Gate.ITERATION):
        engine = fake_engine(Fcfs(), rows=4, gate=gate)
        for number in range(40):
            engine.submit("standard", 4, 5 + (number * 29) % 60)
        engine.run(most_steps=5000)
        steps.append(engine.steps)
    assert steps[1] < 0.8 * steps[0]
