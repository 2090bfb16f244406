"""A shortage makes queries wait; only the culprit ends, and nobody more urgent makes room for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from batond.daemon.engine import SamplingParams
from batond.daemon.scheduler.culprits import MOST_TRIES, PATIENCE_S
from batond.daemon.wire.messages import QueryState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batond.daemon.engine import LocalEngine
    from batond.daemon.engine.queries.query import Query

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
LONG = SamplingParams(max_tokens=24, ignore_eos=True)
CULPRIT = [99] * 11
KINDS_OF_CACHE = ["llama", "gemma2", "lfm2"]


@pytest.fixture
def engine(make_stand: Callable[[str, str], Any], family: str, batch_kind: str) -> LocalEngine:
    engine: LocalEngine = make_stand(family, batch_kind).engine
    engine.on_event = None  # Other tests share the engine.
    return engine


def submit_many(engine: LocalEngine, count: int = 12) -> list[Query]:
    classes = ("batch", "standard", "interactive")
    return [
        engine.submit([5 + n, 9, 11 + n], GREEDY, sla_class=classes[n % 3], query_id=f"n{n}")
        for n in range(count)
    ]


def is_culprit(ids: torch.Tensor) -> bool:
    return ids.shape[1] > 1 and 99 in ids


def drain(engine: LocalEngine) -> int:
    """Step until all have ended; returns the steps, or fails where that takes for ever."""
    for steps in range(3000):
        if not engine.queries:
            return steps
        engine.step()
        engine.check_integrity()
    pytest.fail(f"still busy: {list(engine.queries)}")


def outputs(queries: Sequence[Query]) -> list[list[int]]:
    return [query.output_token_ids for query in queries]


@pytest.mark.parametrize("family", KINDS_OF_CACHE)
@pytest.mark.parametrize("begins_with", [0, 4])
def test_a_short_shortage_ends_nobody(
    engine: LocalEngine, forwards: Any, calm: Any, begins_with: int
) -> None:
    """A neighbour takes all memory for 3 s, before the first forward or in the middle of the work."""
    undisturbed = submit_many(engine)
    drain(engine)
    waits = calm(engine)
    queries = submit_many(engine)
    forwards.count = 0
    forwards.fails = lambda number, _: number >= begins_with and sum(waits) < 3.0
    drain(engine)
    assert engine.counters["out_of_memory_failures"] == 0
    assert outputs(queries) == outputs(undisturbed)
    assert 3.0 <= sum(waits) <= 10.0, "it went on soon after"
    assert max(waits) <= 0.2, "between two waits it hears commands"
    assert len(forwards.failed) <= 40, "it tried again and again"


@pytest.mark.parametrize("family", ["llama"])
def test_a_short_shortage_where_tokens_are_chosen_ends_nobody(
    engine: LocalEngine, calm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forwards go on, so everybody's KV is a token ahead of its record."""
    undisturbed = submit_many(engine)
    drain(engine)
    waits, sampler, calls = calm(engine), engine._sampler, 0
    choose = sampler.choose

    def short(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 6 and sum(waits) < 3.0:
            raise torch.OutOfMemoryError("no logits")
        return choose(*arguments)

    monkeypatch.setattr(sampler, "choose", short)
    monkeypatch.setattr(sampler, "takes_likeliest", lambda _: False)
    queries = submit_many(engine)
    for _ in range(3000):
        if not engine.queries:
            break
        engine.step()
        engine.check_integrity()
    assert engine.counters["out_of_memory_failures"] == 0
    assert engine.counters["out_of_memory"] > 1
    assert outputs(queries) == outputs(undisturbed)


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_a_shortage_that_lasts_ends_queries_in_the_end(engine: LocalEngine, forwards: Any, calm: Any) -> None:
    """After many tries and long enough; and those behind get as much time."""
    waits = calm(engine)
    forwards.fails = lambda *_: True
    queries = submit_many(engine, 3)
    while all(query.live for query in queries):
        engine.step()
        assert sum(waits) < 10 * PATIENCE_S
    assert sum(waits) >= PATIENCE_S
    assert len(forwards.failed) >= MOST_TRIES
    drain(engine)
    assert {query.error[0] for query in queries if query.error} == {"RESOURCE_EXHAUSTED"}
    assert all(query.state is QueryState.FAILED for query in queries)
    forwards.fails = lambda *_: False
    after = submit_many(engine, 3)
    drain(engine)
    assert all(query.state is QueryState.FINISHED for query in after)


@pytest.mark.parametrize("family", KINDS_OF_CACHE)
def test_a_prompt_takes_no_row_of_the_more_urgent(engine: LocalEngine, forwards: Any, calm: Any) -> None:
    """Rule 1: it is put off until they have ended, and they are not limited for its sake."""
    calm(engine)
    urgent = [engine.submit([5 + n, 9, 11], LONG, sla_class="interactive") for n in range(engine.rows - 1)]
    while any(query.state is not QueryState.RUNNING for query in urgent):
        engine.step()
    forwards.fails = lambda _, ids: is_culprit(ids) and bool(engine.residency.occupied)
    prompt = engine.submit(CULPRIT, GREEDY, sla_class="batch")
    while any(query.live for query in urgent):
        engine.step()
        engine.check_integrity()
        assert engine._relief.rows.most is None
    assert engine.counters["prompts_put_off"] >= 1
    assert len(forwards.failed) <= 8, "a try in every step"
    assert all(query.parks == 0 and query.state is QueryState.FINISHED for query in urgent)
    drain(engine)
    assert prompt.state is QueryState.FINISHED
    assert engine._relief.rows.most is None


@pytest.mark.parametrize("family", ["llama"])
def test_a_prompt_that_parks_the_less_urgent_teaches_no_row_limit(
    engine: LocalEngine, forwards: Any, calm: Any
) -> None:
    """What was too much is the prompt."""
    calm(engine)
    rows = [engine.submit([5 + n, 9, 11], LONG, sla_class="batch") for n in range(engine.rows - 1)]
    while any(query.state is not QueryState.RUNNING for query in rows):
        engine.step()
    forwards.fails = lambda _, ids: is_culprit(ids) and bool(engine.residency.occupied)
    prompt = engine.submit(CULPRIT, GREEDY, sla_class="interactive")
    while prompt.live:
        engine.step()
        assert engine._relief.rows.most is None
    assert prompt.state is QueryState.FINISHED
    assert all(query.parks for query in rows)
    drain(engine)
    assert all(query.state is QueryState.FINISHED for query in rows)


@pytest.mark.parametrize("family", ["llama"])
def test_a_prompt_gets_its_turn_though_equals_never_cease_to_come(
    engine: LocalEngine, forwards: Any, calm: Any
) -> None:
    """It came before them; after a while those behind it make room."""
    waits = calm(engine)

    def fill() -> None:
        while len(engine.queries) < engine.rows + 1:
            engine.submit([5, 9, 11], LONG, sla_class="batch")

    engine.submit([5, 9, 11], LONG, sla_class="batch")
    engine.step()
    forwards.fails = lambda _, ids: is_culprit(ids) and bool(engine.residency.occupied)
    prompt = engine.submit(CULPRIT, GREEDY, sla_class="batch")
    while prompt.live:
        fill()
        engine.step()
        waits.append(0.5)
        assert sum(waits) < 4 * PATIENCE_S
    assert prompt.state is QueryState.FINISHED
    assert sum(waits) >= PATIENCE_S
    drain(engine)
    assert engine.counters["out_of_memory_failures"] == 0


@pytest.mark.parametrize("family", ["llama"])
def test_a_query_that_was_put_off_can_be_cancelled(engine: LocalEngine, forwards: Any, calm: Any) -> None:
    """In the pause and behind it nothing is left of it."""
    waits = calm(engine)
    forwards.fails = lambda *_: True
    prompt = engine.submit(CULPRIT, GREEDY)
    engine.step()
    assert prompt.state is QueryState.PARKED
    waited = len(waits)
    engine.step()
    assert len(waits) > waited, "it was tried again at once"
    engine.cancel(prompt)
    forwards.fails = lambda *_: False
    [after] = submit_many(engine, 1)
    drain(engine)
    assert after.state is QueryState.FINISHED
    assert engine._relief._put_off == []
