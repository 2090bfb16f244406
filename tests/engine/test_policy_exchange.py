"""Policies in the engine: exchanged in the middle, raising, told of tokens and ends; reasons reach events."""

from __future__ import annotations

import logging
import math
import random
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import Mock

import pytest

from batond.bench.draws import CLASSES, TENANTS
from batond.bench.schedules import Arrival, Move, Player, Request
from batond.bench.solo import compare
from batond.daemon.engine import SamplingParams
from batond.daemon.engine.process import EngineProcess
from batond.daemon.errors import ConfigError, InvalidRequestError
from batond.daemon.scheduler.planner import PlannerLimits
from batond.daemon.wire.messages import (
    CommandResult,
    Finished,
    Preempted,
    Resumed,
    SetPolicy,
    Started,
    Submit,
)
from batond.policies.fcfs import Fcfs
from batond.policies.priority import Priority

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.engine import LocalEngine
    from batond.daemon.wire.channel import EngineChannel
    from batond.policies.base import QueryView, Rank

    MakeEngine = Callable[..., LocalEngine]
    MakeStand = Callable[[str, str], Any]

BUILT_IN = ("deadline", "fair", "fcfs", "mlfq", "priority", "shortest")
LONG = SamplingParams(max_tokens=24, ignore_eos=True)
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


class Raising(Priority):
    """Raises in every third call, and in all accounting."""

    name = "raising"

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def rank(self, query: QueryView, now_s: float) -> Rank:
        self.calls += 1
        if self.calls % 3 == 0:
            raise ZeroDivisionError
        return super().rank(query, now_s)

    def on_tokens(self, query: QueryView, prompt_tokens: int, output_tokens: int) -> None:
        raise KeyError(query.query_id)


class Clerk(Fcfs):
    """Writes down what it is told."""

    name = "clerk"

    def __init__(self) -> None:
        self.told: list[tuple[str, int, int]] = []
        self.ended: list[tuple[str, int]] = []

    def on_tokens(self, query: QueryView, prompt_tokens: int, output_tokens: int) -> None:
        self.told.append((query.query_id, prompt_tokens, output_tokens))

    def on_end(self, query: QueryView) -> None:
        self.ended.append((query.query_id, query.output_tokens))


@pytest.mark.parametrize("seed", range(3))
def test_exchange_in_the_middle_changes_no_tokens(make_stand: MakeStand, batch_kind: str, seed: int) -> None:
    """S4: random schedules, random policies, one that raises among them: all get what they get alone."""
    stand = make_stand("llama", batch_kind)
    dice, player = random.Random(seed), Player(stand.engine)
    requests: list[Request] = []
    before = stand.engine.counters["policy_changes"]
    for _ in range(150):
        if len(stand.engine.queries) < 9 and dice.random() < 0.25:
            requests.append(stand.draws.catalogued(dice.randrange(24)))
            player.submit(Arrival(requests[-1], dice.choice(CLASSES), dice.choice(TENANTS)))
        if dice.random() < 0.1:
            player.apply(dice.choice((Move.PARK, Move.RESUME)), dice.randrange(8))
        if dice.random() < 0.15:
            stand.engine.set_policy(dice.choice((*BUILT_IN, Raising())))
        player.step()
    player.drain()
    stand.engine.set_policy("priority")
    assert len(requests) > 10
    assert stand.engine.counters["policy_changes"] - before > 5
    for place, request in enumerate(requests):
        assert compare(player, place, request, stand.solo).faults == []


def test_a_new_policy_decides_from_the_next_step_on(llama: Any, make_engine: MakeEngine) -> None:
    engine = make_engine(llama, rows=1, policy="fcfs", limits=PlannerLimits(quantum_tokens=1))
    low = engine.submit([5, 6, 7], LONG, sla_class="batch")
    for _ in range(4):
        engine.step()
    urgent = engine.submit([8, 9], SHORT, sla_class="interactive")
    engine.step()
    assert (low.parks, urgent.row) == (0, None)
    engine.set_policy("priority")
    engine.step()
    assert (low.parks, urgent.row is not None) == (1, True)
    engine.run_until_idle()
    assert engine.counters["queries_finished"] == 2


def test_an_unknown_policy_changes_nothing(llama: Any, make_engine: MakeEngine) -> None:
    engine = make_engine(llama, policy="fcfs")
    for wrong in ("lottery", 7, None):
        with pytest.raises(ConfigError):
            engine.set_policy(cast("Any", wrong))
    assert engine.planner.policy.name == "fcfs"
    assert engine.counters["policy_changes"] == 0


@pytest.mark.parametrize("wrong", [Fcfs, object(), None, 3])
def test_what_is_no_policy_changes_nothing(llama: Any, make_engine: MakeEngine, wrong: Any) -> None:
    """A class is none either: each call of it would fail, and be somebody else's decision."""
    engine = make_engine(llama, rows=1, policy="fair")
    with pytest.raises(ConfigError, match="must be a policy"):
        engine.set_policy(wrong)
    assert engine.planner.policy.name == "fair"


def test_the_engine_process_exchanges_the_policy(llama: Any, make_engine: MakeEngine) -> None:
    """SetPolicy is answered, and the snapshot shows the policy."""
    engine = make_engine(llama)
    process = EngineProcess(engine, cast("EngineChannel", Mock()))
    assert engine.snapshot().policy == "priority"
    process._apply(SetPolicy(name="fair", request_id=7))
    process._apply(SetPolicy(name="lottery", request_id=8))
    done, refused = process._events
    assert done == CommandResult(request_id=7)
    assert isinstance(refused, CommandResult)
    assert (refused.request_id, refused.reason) == (8, "BAD_CONFIG")
    assert "lottery" in refused.message
    assert engine.snapshot().policy == "fair"


def test_a_policy_that_raises_is_replaced_and_counted(
    llama: Any, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Its queries run all the same, under `priority`; the log has the traceback once."""
    engine = make_engine(llama, rows=1, policy=Raising(), limits=PlannerLimits(quantum_tokens=1))
    low = engine.submit([5, 6, 7], LONG, sla_class="batch")
    with caplog.at_level(logging.ERROR):
        for _ in range(4):
            engine.step()
            engine.check_integrity()
        urgent = engine.submit([8, 9], SHORT, sla_class="interactive")
        engine.run_until_idle()
    assert low.parks == 1
    assert [len(query.output_token_ids) for query in (low, urgent)] == [24, 4]
    assert engine.snapshot().counters["policy_errors"] > 10
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info


def test_policies_hear_of_every_token_and_end_once(llama: Any, make_engine: MakeEngine) -> None:
    clerk = Clerk()
    engine = make_engine(llama, rows=2, policy=clerk, chunk_tokens=4)
    first = engine.submit(list(range(3, 13)), SHORT)
    second = engine.submit([3, 4, 5], LONG)
    for _ in range(6):
        engine.step()
    engine.cancel(second)
    engine.run_until_idle()
    prompt = sum(tokens for query_id, tokens, _ in clerk.told if query_id == first.query_id)
    output = sum(tokens for query_id, _, tokens in clerk.told if query_id == first.query_id)
    # The first token comes with the prompt.
    assert (prompt, output) == (10, 3)
    ends = [(query.query_id, len(query.output_token_ids)) for query in (first, second)]
    assert sorted(clerk.ended) == sorted(ends)


def test_reasons_reach_events_counters_and_log(
    llama: Any, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """S11: why somebody was parked, and why somebody got a row."""
    engine = make_engine(llama, rows=1, limits=PlannerLimits(quantum_tokens=1))
    events: list[Any] = []
    engine.on_event = events.append
    low = engine.submit([5, 6, 7], LONG, sla_class="batch")
    with caplog.at_level(logging.DEBUG, logger="batond.daemon.engine.local"):
        for _ in range(4):
            engine.step()
        urgent = engine.submit([8, 9], SHORT, sla_class="interactive")
        engine.run_until_idle()
    moves = [event for event in events if isinstance(event, Started | Preempted | Resumed)]
    assert [(type(event), event.query_id) for event in moves] == [
        (Started, low.query_id),
        (Preempted, low.query_id),
        (Started, urgent.query_id),
        (Resumed, low.query_id),
    ]
    assert [moves[0].reason, moves[2].reason, moves[3].reason] == ["row_free", "row_taken", "row_free"]
    assert (moves[1].cause, moves[1].for_query_id) == ("row", urgent.query_id)
    assert sum(isinstance(event, Finished) for event in events) == 2
    counters = engine.snapshot().counters
    assert counters["parks_for_row"] == counters["rows_row_taken"] == 1
    assert counters["rows_row_free"] == 2
    assert counters["blocked_row"] >= 1
    assert counters["prefetch_hints"] >= 1  # The urgent one's last tokens.
    assert f"{low.query_id}" in caplog.text
    assert "row_taken" in caplog.text


def test_a_change_that_is_not_noted_is_found(llama: Any, make_engine: MakeEngine) -> None:
    """The check of the books compares what the planner sees with what there is."""
    engine = make_engine(llama, rows=1)
    query = engine.submit([5, 6, 7], LONG)
    engine.submit([5, 6], LONG)
    engine.step()
    engine.step()
    waiting = next(other for other in engine.queries.values() if other is not query)
    engine.step()
    engine.check_integrity()
    waiting.planner_parks += 1
    with pytest.raises(AssertionError, match="was not told"):
        engine.check_integrity()
    waiting.planner_parks -= 1
    engine.run_until_idle()


def test_deadline_and_weight_reach_the_policy(llama: Any, make_engine: MakeEngine) -> None:
    """Of two alike, the one whose deadline comes first gets the row first; fair shares see the weight."""
    engine = make_engine(llama, rows=1, policy="deadline")
    process = EngineProcess(engine, cast("EngineChannel", Mock()))
    for query_id, left_s in (("late", 900.0), ("soon", 3.0)):
        process._apply(
            Submit(
                query_id=query_id,
                tenant="a",
                sla_class="batch",
                prompt_token_ids=[5, 6, 7],
                sampling=SHORT,
                seed=1,
                deadline_s=left_s,
                tenant_weight=2.5,
            )
        )
    engine.run_until_idle()
    assert [event.query_id for event in process._events if isinstance(event, Started)] == ["soon", "late"]
    clerk = Clerk()
    engine.set_policy(clerk)
    query = engine.submit([5, 6], SHORT, deadline_s=60.0, tenant_weight=2.5)
    engine.step()
    view = engine._roster.line.view(query.query_id)
    assert view is not None
    assert view.tenant_weight == query.tenant_weight == 2.5
    assert 50.0 < view.deadline_s - query.arrival_s <= 61.0
    engine.run_until_idle()
    for wrong in (
        {"tenant_weight": 0.0},
        {"tenant_weight": math.inf},
        {"deadline_s": math.nan},
        {"waited_s": math.nan},
    ):
        with pytest.raises(InvalidRequestError):
            engine.submit([5], SHORT, **wrong)
