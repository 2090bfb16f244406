"""The KV budget moves: rows, slices and half computed prompts are put off, and no token changes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from batond.daemon.requests.params import SamplingParams
from batond.daemon.wire.messages import ParkCause, Preempted, QueryState, Started

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.engine import LocalEngine

    MakeEngine = Callable[..., LocalEngine]
    Solo = Callable[..., list[int]]

SLAS = ("interactive", "standard", "batch")


@pytest.mark.parametrize("host_pool_bytes", [1 << 24, 1 << 13])
def test_tokens_are_the_same_while_the_budget_moves_in_every_step(
    llama: Any, make_engine: MakeEngine, solo: Solo, host_pool_bytes: int
) -> None:
    """M8: written bytes stay within the budget of the step, unless a single query is left on the device."""
    dice = random.Random(7)
    token_bytes = make_engine(llama).residency.batch.layout.record_bytes
    engine = make_engine(
        llama, kv_budget_bytes=1000 * token_bytes, rows=4, chunk_tokens=8, host_pool_bytes=host_pool_bytes
    )
    parked_from: set[QueryState] = set()
    states: dict[str, QueryState] = {}
    engine.on_plan = lambda plan: parked_from.update(
        states[order.query_id] for order in plan.park if order.cause == ParkCause.KV_LIMIT
    )
    prompts = [[dice.randrange(5, 150) for _ in range(dice.randint(3, 40))] for _ in range(12)]
    queries = [
        engine.submit(prompt, SamplingParams(max_tokens=12, ignore_eos=True), sla_class=SLAS[number % 3])
        for number, prompt in enumerate(prompts)
    ]
    for step in range(2000):
        if not engine.queries:
            break
        budget = dice.choice((20, 60, 120, 300)) if step < 120 else 300
        engine._bounds.kv_budget_bytes = budget * token_bytes
        states = {query_id: query.state for query_id, query in engine.queries.items()}
        engine.step()
        engine.check_integrity()
        line = engine._roster.refresh()
        written = line.taken_bytes - line.unwritten_bytes
        assert written <= budget * token_bytes or len(line.running) + len(line.holders) == 1
    for query, prompt in zip(queries, prompts, strict=True):
        assert query.output_token_ids == solo(llama, prompt, 12)
        assert query.planner_parks <= query.parks
    assert {QueryState.RUNNING, QueryState.PREFILLING} <= parked_from
    assert engine.counters["parks_for_kv_limit"] > len(parked_from)


def test_a_slice_that_never_had_a_row_tells_its_tenant(llama: Any, make_engine: MakeEngine) -> None:
    """M8: parked with its cause, for nobody, not counted against the cap; its first row is its start."""
    engine = make_engine(llama, kv_budget_bytes=1 << 30, rows=1)
    layout = engine.residency.batch.layout
    events: list[object] = []
    engine.on_event = events.append
    running = engine.submit([5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True))
    ready = engine.submit([5, 6, 7, 8] * 6, SamplingParams(max_tokens=20, ignore_eos=True))
    while ready.state is not QueryState.READY:
        engine.step()
    engine._bounds.kv_budget_bytes = layout.nbytes(20)
    engine.step()
    assert ready.state is QueryState.PARKED
    assert running.state is QueryState.RUNNING
    parked = [event for event in events if isinstance(event, Preempted)]
    assert [(event.cause, event.for_query_id, event.kept) for event in parked] == [("kv_limit", "", True)]
    assert ready.planner_parks == 0
    engine.run_until_idle()
    assert ready.query_id in {event.query_id for event in events if isinstance(event, Started)}
    assert ready.usage().recomputed_tokens == 0
