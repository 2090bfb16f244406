"""Which prompts are computed, in which order, and how far ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batond.policies.base import Phase
from batond.policies.fcfs import Fcfs
from batond.policies.priority import Priority

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.scheduler.plan import Chunk, Plan

    from .conftest import FakeEngine, Views

    Planning = Callable[..., Plan]


def as_tuples(chunks: tuple[Chunk, ...]) -> list[tuple[str, int, bool]]:
    return [(chunk.query_id, chunk.tokens, chunk.last) for chunk in chunks]


def test_budget_is_shared_in_order_and_never_exceeded(plan: Planning, views: Views) -> None:
    first, second, third = (views.waiting(prompt=100) for _ in range(3))
    result = plan(3, first, second, third, chunk_tokens=150)
    assert as_tuples(result.chunks) == [(first.query_id, 100, True), (second.query_id, 50, False)]
    assert result.admit == (first.query_id,)
    assert result.blocked == {third.query_id: "prefill"}


def test_no_bound_computes_whole_prompts(plan: Planning, views: Views) -> None:
    result = plan(2, views.waiting(prompt=5000), views.waiting(prompt=7))
    assert [chunk.tokens for chunk in result.chunks] == [5000, 7]
    assert len(result.admit) == 2


def test_no_budget_computes_nothing(plan: Planning, views: Views) -> None:
    assert plan(2, views.waiting(), chunk_tokens=0).empty


def test_nothing_is_begun_beyond_rows_and_ready_limit(plan: Planning, views: Views) -> None:
    result = plan(2, *(views.waiting() for _ in range(10)), ready_limit=1)
    assert len(result.chunks) == 3
    assert len(result.admit) == 2


def test_ready_queries_count_against_the_limit(plan: Planning, views: Views) -> None:
    rows = [views.running(), views.running()]
    assert not plan(2, *rows, views.ready(), views.waiting(), ready_limit=1).chunks
    assert len(plan(2, *rows, views.ready(), views.waiting(), ready_limit=2).chunks) == 1
    assert not plan(2, *rows, views.waiting(), ready_limit=0).chunks


def test_urgent_prompt_is_not_held_back_by_less_urgent_ones_ahead(plan: Planning, views: Views) -> None:
    rows = [views.running("interactive")]
    urgent = views.waiting("interactive")
    result = plan(1, *rows, views.ready("batch"), urgent, ready_limit=1)
    assert as_tuples(result.chunks) == [(urgent.query_id, 8, True)]
    assert not result.admit


def test_more_urgent_newcomer_takes_the_chunk_from_a_begun_prompt(plan: Planning, views: Views) -> None:
    """S9."""
    long = views.prefilling("batch", prompt=32_000, done=1024)
    urgent = views.waiting("interactive", prompt=20)
    result = plan(2, views.running(), long, urgent, chunk_tokens=256)
    assert as_tuples(result.chunks) == [(urgent.query_id, 20, True), (long.query_id, 236, False)]
    assert result.admit == (urgent.query_id,)


def test_query_without_its_last_chunk_does_not_keep_the_row_empty(plan: Planning, views: Views) -> None:
    long, ready = views.waiting("interactive", prompt=1000), views.ready("batch")
    result = plan(1, long, ready, chunk_tokens=256)
    assert as_tuples(result.chunks) == [(long.query_id, 256, False)]
    assert result.admit == (ready.query_id,)


def test_parked_query_without_copy_is_computed_again_and_admitted(plan: Planning, views: Views) -> None:
    dropped = views.dropped(prompt=10)
    result = plan(1, dropped)
    assert as_tuples(result.chunks) == [(dropped.query_id, 30, True)]
    assert result.admit == (dropped.query_id,)
    assert result.resume == ()


def test_several_one_token_queries_pass_without_rows(plan: Planning, views: Views) -> None:
    singles = [views.waiting(max_tokens=1) for _ in range(5)]
    result = plan(1, views.running(), *singles, chunk_tokens=20)
    assert as_tuples(result.chunks) == [
        (singles[0].query_id, 8, True),
        (singles[1].query_id, 8, True),
        (singles[2].query_id, 4, False),
    ]
    assert not result.admit


def test_long_low_prompt_waits_for_a_short_urgent_one_and_is_never_recomputed(
    fake_engine: type[FakeEngine],
) -> None:
    """S9: one chunk of delay at most, no chunk is repeated."""
    engine = fake_engine(Priority(), rows=2, chunk_tokens=256)
    long = engine.submit("batch", 32_000, 4)
    for _ in range(10):
        engine.step()
    done = engine.live[long].cached_tokens
    assert done == 2560
    urgent = engine.submit("interactive", 20, 8)
    engine.step()
    assert engine.live[urgent].first_token_step == 10
    assert engine.live[long].cached_tokens == done + 236
    engine.run(most_steps=200)
    assert engine.finished[long].computed_prompt_tokens == 32_000
    assert engine.park_count == 0


def test_while_queries_wait_rows_are_not_idle(fake_engine: type[FakeEngine]) -> None:
    """Near-zero idle computation: under 1 % of row-steps."""
    engine = fake_engine(Fcfs(), rows=4, chunk_tokens=256)
    for number in range(120):
        engine.submit("standard", 5 + number % 40, 10 + (number * 37) % 90)
    engine.run(most_steps=5000)
    assert engine.idle_row_steps < 0.01 * engine.steps * 4


def test_ready_queries_stay_within_the_limit(fake_engine: type[FakeEngine]) -> None:
    engine = fake_engine(Fcfs(), rows=3, chunk_tokens=64, ready_limit=2)
    for number in range(60):
        engine.submit("standard", 5 + number % 50, 4 + number % 9)
    while engine.live:
        engine.step()
        assert sum(query.view.phase is Phase.READY for query in engine.live.values()) <= 2
    assert len(engine.finished) == 60
