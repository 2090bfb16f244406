"""A live query gets another class or deadline, and is ranked anew wherever it is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from batond.daemon.engine import SamplingParams
from batond.daemon.errors import InvalidRequestError, StateError
from batond.daemon.scheduler.planner import PlannerLimits
from batond.daemon.wire.messages import Preempted, QueryState

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.engine import LocalEngine

    MakeEngine = Callable[..., LocalEngine]
    Solo = Callable[..., list[int]]

LONG = SamplingParams(max_tokens=24, ignore_eos=True)
NO_QUANTUM = PlannerLimits(quantum_tokens=0)


def prompt(seed: int) -> list[int]:
    return [(seed + 7 * place) % 90 + 3 for place in range(6)]


def steps(engine: LocalEngine, count: int) -> None:
    for _ in range(count):
        engine.step()
        engine.check_integrity()


def test_a_lowered_running_query_gives_its_row_to_its_former_equal(
    make_engine: MakeEngine, llama: Any, solo: Solo
) -> None:
    """S2 before, S1 after: equals never pre-empt each other, and a lowered one is no equal."""
    engine = make_engine(llama, rows=1, limits=NO_QUANTUM)
    parked: list[Preempted] = []
    engine.on_event = lambda event: parked.append(event) if isinstance(event, Preempted) else None
    first = engine.submit(prompt(1), LONG, sla_class="standard")
    steps(engine, 3)
    second = engine.submit(prompt(2), LONG, sla_class="standard")
    steps(engine, 3)
    assert (first.state, parked) == (QueryState.RUNNING, [])
    engine.update(first, sla_class="batch")
    steps(engine, 3)
    assert (first.state, second.state) == (QueryState.PARKED, QueryState.RUNNING)
    assert [(event.query_id, event.for_query_id) for event in parked] == [(first.query_id, second.query_id)]
    engine.run_until_idle()
    for query, seed in ((first, 1), (second, 2)):
        assert query.output_token_ids == solo(llama, prompt(seed), 24)


def test_a_lowered_waiting_query_lets_others_go_first(make_engine: MakeEngine, llama: Any) -> None:
    engine = make_engine(llama, rows=1)
    engine.submit(prompt(1), LONG, sla_class="interactive")
    steps(engine, 2)
    early, late = (engine.submit(prompt(seed), LONG, sla_class="standard") for seed in (2, 3))
    engine.update(early, sla_class="batch")
    while late.state is not QueryState.RUNNING:
        assert early.state is not QueryState.RUNNING
        steps(engine, 1)
    engine.close()


def test_a_deadline_counts_from_now(make_engine: MakeEngine, llama: Any) -> None:
    engine = make_engine(llama, rows=1, policy="deadline")
    engine.submit(prompt(1), LONG, sla_class="interactive")
    steps(engine, 2)
    early, late = (engine.submit(prompt(seed), LONG, sla_class="batch", deadline_s=600) for seed in (2, 3))
    engine.update(late, deadline_s=1.0)
    assert late.sla_class.name == "batch"
    while late.state is not QueryState.RUNNING:
        assert early.state is not QueryState.RUNNING
        steps(engine, 1)
    engine.update(early, deadline_s=math.inf)
    assert early.deadline_s == math.inf
    engine.close()


def test_what_is_wrong_changes_nothing(make_engine: MakeEngine, llama: Any) -> None:
    engine, other = make_engine(llama, rows=1), make_engine(llama, rows=1)
    query = engine.submit(prompt(1), LONG, sla_class="standard")
    with pytest.raises(InvalidRequestError, match="gold"):
        engine.update(query, sla_class="gold")
    with pytest.raises(InvalidRequestError, match="deadline_s"):
        engine.update(query, sla_class="batch", deadline_s=math.nan)
    with pytest.raises(InvalidRequestError, match="not in this engine"):
        other.update(query, sla_class="batch")
    assert (query.sla_class.name, query.deadline_s) == ("standard", math.inf)
    engine.cancel(query)
    with pytest.raises(StateError, match="ended"):
        engine.update(query, sla_class="batch")
