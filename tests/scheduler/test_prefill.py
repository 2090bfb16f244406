"""Which prompts are computed, in which order, and how far ahead."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

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


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_all_free_rows_are_filled_in_one_step(plan: Planning, views: Views, rows: int) -> None:
    """Short prompts that fit the budget are due together, and can share a forward."""
    waiting = [views.waiting(prompt=16) for _ in range(8)]
    result = plan(rows, *waiting, chunk_tokens=128, ready_limit=0)
    assert as_tuples(result.chunks) == [(query.query_id, 16, True) for query in waiting[:rows]]
    assert result.admit == tuple(query.query_id for query in waiting[:rows])


def test_only_the_last_of_several_chunks_is_partial(plan: Planning, views: Views) -> None:
    order = ["batch", "interactive", "standard", "interactive"]
    waiting = [views.waiting(sla, prompt=40) for sla in order]
    result = plan(8, *waiting, chunk_tokens=100)
    assert as_tuples(result.chunks) == [
        (waiting[1].query_id, 40, True),
        (waiting[3].query_id, 40, True),
        (waiting[2].query_id, 20, False),
    ]


def test_fixed_chunks_are_whole_or_wait(plan: Planning, views: Views) -> None:
    """What doesn't fit leaves its tokens to others; the cuts never move."""
    short, long, last = views.waiting(prompt=20), views.waiting(prompt=1000), views.waiting(prompt=44)
    result = plan(4, short, long, last, chunk_tokens=64, fixed_chunks=True)
    assert as_tuples(result.chunks) == [(short.query_id, 20, True), (last.query_id, 44, True)]
    assert result.blocked == {long.query_id: "prefill"}
    begun, rest = views.prefilling(prompt=1000, done=70), views.prefilling(prompt=1000, done=960)
    result = plan(4, begun, rest, chunk_tokens=64, fixed_chunks=True)
    assert as_tuples(result.chunks) == [(begun.query_id, 58, False)]
    assert result.blocked == {rest.query_id: "prefill"}


def test_fixed_chunks_without_a_bound_are_whole_prompts(plan: Planning, views: Views) -> None:
    result = plan(2, views.waiting(prompt=5000), views.prefilling(prompt=70, done=9), fixed_chunks=True)
    assert [chunk.tokens for chunk in result.chunks] == [5000, 61]


def test_a_prompt_is_cut_at_the_same_places_whatever_the_load(fake_engine: type[FakeEngine]) -> None:
    """The ground of bit-equal results: same tokens, same cuts, same kernels."""
    dice = random.Random(3)
    for load in (0.0, 0.3, 0.9):
        engine = fake_engine(Priority(ageing_s=0.5), rows=3, chunk_tokens=32, fixed_chunks=True)
        watched = engine.submit("batch", 203, 3)
        cuts = []
        for _ in range(2000):
            if dice.random() < load:
                engine.submit(dice.choice(["interactive", "standard"]), dice.randint(1, 70), 4)
            chunks = engine.step().chunks
            cuts += [chunk.tokens for chunk in chunks if chunk.query_id == watched]
            if watched in engine.finished:
                break
        assert cuts == [32, 32, 32, 32, 32, 32, 11]


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
