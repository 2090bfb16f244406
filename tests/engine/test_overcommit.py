"""Memory is reserved for the output that is expected of a class, where there is a budget for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from batond.daemon.errors import ConfigError, RequestTooLargeError
from batond.daemon.requests.params import SamplingParams
from batond.daemon.scheduler.expected import LEAST_OUTPUTS, STEP_TOKENS
from batond.daemon.wire.messages import QueryState

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.engine import LocalEngine

    MakeEngine = Callable[..., LocalEngine]
    Solo = Callable[..., list[int]]

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
LONG = SamplingParams(max_tokens=90, ignore_eos=True)


def learned(make_engine: MakeEngine, llama: Any, **options: Any) -> LocalEngine:
    """An engine of a class whose outputs had 4 tokens so far, with room for 180 tokens."""
    nbytes = make_engine(llama).residency.batch.layout.nbytes(180)
    engine = make_engine(llama, rows=8, **{"kv_budget_bytes": nbytes, **options})
    for _ in range(LEAST_OUTPUTS):
        engine.submit([5, 6], SHORT)
    engine.run_until_idle()
    return engine


def test_more_run_and_who_outgrows_its_reserve_gets_more(
    llama: Any, make_engine: MakeEngine, solo: Solo
) -> None:
    """M8: one at a time by what is asked for, eight by what is expected; they grow, some are parked."""
    engine = learned(make_engine, llama)
    layout = engine.residency.batch.layout
    prompts = [[5 + number, 6, 7] for number in range(8)]
    queries = [engine.submit(prompt, LONG) for prompt in prompts]
    reserves: set[int] = set()
    most_running = 0
    while engine.queries:
        engine.step()
        engine.check_integrity()
        line = engine._roster.refresh()
        most_running = max(most_running, len(line.running))
        views = [view for view in line.views if view.query_id == queries[0].query_id]
        reserves.update(view.reserved_bytes for view in views)
        assert all(view.reserved_bytes >= view.kv_bytes for view in line.views)
        assert line.taken_bytes - line.unwritten_bytes <= layout.nbytes(180)
    assert most_running == 8
    assert {layout.nbytes(3 + tokens) for tokens in (4, 4 + STEP_TOKENS, 4 + 2 * STEP_TOKENS)} <= reserves
    assert engine.counters["parks_for_kv_limit"]
    assert [query.output_token_ids for query in queries] == [solo(llama, prompt, 90) for prompt in prompts]
    assert max(query.parks for query in queries) <= 4


@pytest.mark.parametrize(
    "options", [{"overcommit": False}, {"kv_budget_bytes": None}], ids=["strict", "no budget"]
)
def test_all_that_is_asked_for_is_reserved(
    llama: Any, make_engine: MakeEngine, options: dict[str, Any]
) -> None:
    """M8: switched off, and where nothing bounds memory."""
    engine = learned(make_engine, llama, **options)
    query = engine.submit([5, 6, 7], LONG)
    view = engine._roster.refresh().view(query.query_id)
    assert view is not None
    assert view.reserved_bytes == engine.residency.batch.layout.nbytes(93)
    assert query.reserved_tokens is None


def test_tokens_emitted_elsewhere_count_against_the_reserve(
    llama: Any, make_engine: MakeEngine, solo: Solo
) -> None:
    """D3: a job that goes on here has its reserve for what it has emitted already, and more."""
    engine = learned(make_engine, llama)
    tokens = solo(llama, [5, 6, 7], 90)
    query = engine.submit([5, 6, 7], LONG, emitted_token_ids=tokens[:50])
    view = engine._roster.refresh().view(query.query_id)
    assert view is not None
    assert view.reserved_bytes >= engine.residency.batch.layout.nbytes(3 + 50)
    engine.run_until_idle()
    assert query.output_token_ids == tokens


def test_only_outputs_that_came_to_their_end_teach(llama: Any, make_engine: MakeEngine) -> None:
    engine = learned(make_engine, llama)
    for _ in range(300):
        query = engine.submit([5], LONG)
        engine.cancel(query)
    assert engine.submit([5, 6, 7], LONG).reserved_tokens == 4


def test_what_can_never_fit_is_refused_by_one_number(llama: Any, make_engine: MakeEngine) -> None:
    """M7: the configured budget counts, not what is free now; the limit is told in tokens, and why."""
    layout = make_engine(llama).residency.batch.layout
    engine = make_engine(llama, kv_budget_bytes=layout.nbytes(41) - 1, max_query_tokens=100)
    assert engine.max_query_tokens == 40
    running = engine.submit([5] * 10, SamplingParams(max_tokens=30, ignore_eos=True))
    engine.step()
    with pytest.raises(
        RequestTooLargeError, match=r"= 41 tokens; the limit is 40, as many as kv_budget"
    ) as caught:
        engine.submit([5] * 11, SamplingParams(max_tokens=30))
    assert caught.value.details["limit"] == "40"
    waits = engine.submit([5] * 10, SamplingParams(max_tokens=30, ignore_eos=True))
    assert waits.state is QueryState.WAITING
    engine.run_until_idle()
    assert len(running.output_token_ids) == len(waits.output_token_ids) == 30
    assert make_engine(llama, kv_budget_bytes=1 << 30, max_query_tokens=100).max_query_tokens == 100
    with pytest.raises(ConfigError, match="hold no query"):
        make_engine(llama, kv_budget_bytes=layout.record_bytes)
