"""Copies begun before the row is there: used, given up, lost; never a token otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from batond.daemon.engine import SamplingParams
from batond.daemon.scheduler.planner import PlannerLimits
from batond.daemon.wire.messages import QueryState
from batond.offload.errors import CopyFailedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.engine import LocalEngine
    from batond.daemon.engine.queries.query import Query

PROMPT = [5, 6, 7]
LONG = SamplingParams(max_tokens=20, ignore_eos=True)
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


def parked_behind_an_urgent_one(make_engine: Callable[..., Any], model: Any) -> tuple[LocalEngine, Query]:
    """One row: the patient query was parked for an urgent one that is about to end."""
    engine: LocalEngine = make_engine(model, rows=1, limits=PlannerLimits(quantum_tokens=1))
    patient = engine.submit(PROMPT, LONG, sla_class="batch")
    for _ in range(4):
        engine.step()
    engine.submit([8, 9], SHORT, sla_class="interactive")
    while not engine.counters["loads_ahead"]:
        assert engine.counters["steps"] < 20
        engine.step()
        engine.check_integrity()
    assert patient.state is QueryState.PARKED
    return engine, patient


def finish(engine: LocalEngine, query: Query, solo: Callable[..., list[int]], model: Any) -> None:
    engine.run_until_idle()
    engine.check_integrity()
    assert query.output_token_ids == solo(model, PROMPT, 20)


def test_the_copy_begun_ahead_is_the_one_embedded(
    llama: Any, make_engine: Callable[..., Any], solo: Callable[..., list[int]]
) -> None:
    """R1: begun while the urgent query decodes its last tokens, one copy for one resume."""
    engine, query = parked_behind_an_urgent_one(make_engine, llama)
    finish(engine, query, solo, llama)
    assert engine.counters["loads_ahead"] == engine.counters["loads_ahead_used"] == 1
    assert engine.residency.store.stats.loads == 1
    assert query.recomputed_tokens == 0


def test_a_hint_that_proves_wrong_costs_the_copy_alone(
    llama: Any, make_engine: Callable[..., Any], solo: Callable[..., list[int]]
) -> None:
    """Somebody more urgent takes the row: the host copy stays, and is brought back later."""
    engine, query = parked_behind_an_urgent_one(make_engine, llama)
    late = engine.submit([4, 4], SHORT, sla_class="interactive")
    engine.step()
    engine.check_integrity()
    while late.live:
        engine.step()
        engine.check_integrity()
    finish(engine, query, solo, llama)
    assert engine.counters["loads_ahead_used"] < engine.counters["loads_ahead"]
    assert engine.residency.store.stats.aborted == 1
    assert query.recomputed_tokens == 0


def test_hints_may_change_from_query_to_query(llama: Any, make_engine: Callable[..., Any]) -> None:
    """What was begun for another is given up, at any time and also for nobody."""
    engine = make_engine(llama, rows=2)
    queries = [engine.submit([5, 6, 7 + place], LONG) for place in range(2)]
    for _ in range(3):
        engine.step()
    for query in queries:
        engine.park(query)
    store = engine.residency.store
    for likely in (queries[:1], queries[:1], queries[1:], [], queries[1:]):
        engine.residency.bring([], likely)
        engine.check_integrity()
    assert (engine.counters["loads_ahead"], store.stats.aborted) == (3, 2)
    engine.cancel(queries[1])
    engine.check_integrity()
    assert store.owners == (queries[0].query_id,)
    engine.run_until_idle()
    assert len(queries[0].output_token_ids) == 20


def test_a_cancelled_query_leaves_nothing(llama: Any, make_engine: Callable[..., Any]) -> None:
    """R9: cancelled between the copy's begin and its row."""
    engine, query = parked_behind_an_urgent_one(make_engine, llama)
    engine.cancel(query)
    engine.check_integrity()
    engine.run_until_idle()
    assert engine.residency.store.pool.used_bytes == 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), CopyFailedError("no copy")])
def test_a_copy_that_can_t_be_begun_ahead_is_made_when_the_row_is_there(
    llama: Any,
    make_engine: Callable[..., Any],
    solo: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    """M6: no room beside the batch is no reason to lose anything."""
    engine, query = parked_behind_an_urgent_one(make_engine, llama)
    engine.residency.bring([])
    store = engine.residency.store

    def refuse(*_: Any, **__: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(store, "begin_load", refuse)
        engine.residency.bring([], [query])
    finish(engine, query, solo, llama)
    assert query.recomputed_tokens == 0


def test_a_copy_of_another_layout_is_not_embedded_because_it_was_begun_ahead(
    llama: Any, make_engine: Callable[..., Any], solo: Callable[..., list[int]]
) -> None:
    """R8: records of another layout are computed again, however their copy was begun."""
    engine, query = parked_behind_an_urgent_one(make_engine, llama)
    engine.residency.batch.layout.digest = "another"
    finish(engine, query, solo, llama)
    assert query.recomputed_tokens > 0
    assert engine.snapshot().counters["corrupt_slices"] == 1


def test_a_copy_damaged_on_the_host_is_found_after_it_was_begun_ahead(
    llama: Any, make_engine: Callable[..., Any], solo: Callable[..., list[int]]
) -> None:
    """R8: the checksum is taken when the row is there; the query is computed again."""
    engine, query = parked_behind_an_urgent_one(make_engine, llama)
    entry = engine.residency.store._entries[query.query_id]
    entry.reservation.views()[0][0] ^= 1
    finish(engine, query, solo, llama)
    assert query.recomputed_tokens > 0
    assert engine.snapshot().counters["corrupt_slices"] == 1
