"""Planner and policy over many steps, on the fake engine."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest

from batond.bench.faults.counts import full_or
from batond.daemon.scheduler.plan import BatchView
from batond.daemon.scheduler.planner import Planner
from batond.policies.base import Phase
from batond.policies.fcfs import Fcfs
from batond.policies.priority import Priority

if TYPE_CHECKING:
    from batond.policies.base import QueryView, Rank

    from .conftest import FakeEngine, Views

SLAS = ("interactive", "standard", "batch")


def test_urgent_arrival_in_a_full_batch(fake_engine: type[FakeEngine]) -> None:
    """S1: the first token comes with its own prefill, exactly one is parked once, all finish."""
    engine = fake_engine(Priority(), rows=4)
    low = [engine.submit("batch", 16, 2000) for _ in range(4)]
    for _ in range(100):
        engine.step()
    urgent = engine.submit("interactive", 20, 50)
    engine.step()
    assert engine.live[urgent].first_token_step == 100
    assert engine.live[urgent].first_row_step == 100
    engine.run(most_steps=4000)
    assert engine.park_count == 1
    assert [engine.finished[query_id].history.count("park:offload") for query_id in low] == [0, 0, 0, 1]


@pytest.mark.parametrize("policy", [Fcfs(), Priority(), Priority(ageing_s=0.01)])
def test_two_equals_on_one_row(fake_engine: type[FakeEngine], policy: Fcfs | Priority) -> None:
    """S2."""
    engine = fake_engine(policy, rows=1)
    engine.submit("standard", 8, 500)
    engine.step()
    engine.submit("standard", 8, 500)
    engine.run(most_steps=1100)
    assert engine.park_count == 0


@pytest.mark.parametrize("policy", [Fcfs(), Priority(ageing_s=1.0)])
def test_a_thousand_equals(fake_engine: type[FakeEngine], policy: Fcfs | Priority) -> None:
    """S2."""
    engine = fake_engine(policy, rows=32)
    for number in range(1000):
        engine.submit("batch", 1 + number % 16, 5 + number % 20)
    engine.run(most_steps=2000)
    assert engine.park_count == 0
    assert len(engine.finished) == 1000


def test_park_cap_ends_the_churn(fake_engine: type[FakeEngine]) -> None:
    """Rule 3: under a stream of urgent queries a low one is parked eight times, then runs to its end."""
    engine = fake_engine(Priority(ageing_s=1e9), rows=1)
    low = engine.submit("batch", 8, 400)
    for _ in range(2000):
        if engine.phase(low) is Phase.RUNNING and not any(
            query.view.sla_class == "interactive" for query in engine.live.values()
        ):
            engine.submit("interactive", 4, 5)
        engine.step()
        if low in engine.finished:
            break
    assert engine.finished[low].history.count("park:offload") == 8


def test_every_admission_earns_a_quantum(fake_engine: type[FakeEngine]) -> None:
    """Rule 4: parked only after 16 tokens, however many urgent queries come."""
    engine = fake_engine(Priority(), rows=2)
    low = [engine.submit("batch", 8, 300) for _ in range(2)]
    tokens = dict.fromkeys(low, 0)
    for step in range(400):
        if step % 5 == 0:
            engine.submit("interactive", 4, 3)
        running = {query_id for query_id in low if engine.phase(query_id) is Phase.RUNNING}
        tokens = {query_id: engine.live[query_id].view.since_admission_tokens for query_id in running}
        for order in engine.step().park:
            assert tokens[order.query_id] >= 16
    assert engine.park_count > 0


def test_low_query_under_urgent_overload_finishes_within_the_bound(fake_engine: type[FakeEngine]) -> None:
    """S8 at planner level: 110 % urgent load, one 200-token batch query, the bound of `Priority`."""
    ageing_s = 5.0
    engine = fake_engine(Priority(ageing_s=ageing_s), rows=2, step_s=0.01)
    low, urgent_steps = engine.submit("batch", 8, 200), 0.0
    while low in engine.live:
        urgent_steps += 2 * 1.1
        while urgent_steps >= 20:
            engine.submit("interactive", 4, 20)
            urgent_steps -= 20
        engine.step()
        assert engine.now_s < 60.0
    # Its first row: k * ageing_s, and what had arrived by then at 10 % above capacity. Then at most eight
    # waits of one urgent query each, and its own 200 tokens.
    backlog_s = 0.1 * 2 * ageing_s + 1.0
    assert engine.now_s <= 2 * ageing_s + backlog_s + 9 * 0.2 + 200 * 0.01


def test_policy_can_be_exchanged_between_steps(fake_engine: type[FakeEngine]) -> None:
    engine = fake_engine(Fcfs(), rows=1)
    engine.submit("batch", 8, 100)
    for _ in range(30):
        engine.step()
    engine.submit("interactive", 8, 10)
    engine.step()
    assert engine.park_count == 0
    engine.planner.policy = Priority()
    assert engine.planner.policy.name == "priority"
    engine.step()
    assert engine.park_count == 1
    engine.run(most_steps=200)


def test_host_pool_of_one_slice_three_parks_all_finish(fake_engine: type[FakeEngine]) -> None:
    """M1 at planner level."""
    engine = fake_engine(Priority(), rows=3, host_bytes=60)
    low = [engine.submit("batch", 8, 100) for _ in range(3)]
    for _ in range(30):
        engine.step()
    for _ in range(3):
        engine.submit("interactive", 8, 20)
    engine.step()
    engine.run(most_steps=500)
    histories = [engine.finished[query_id].history[1] for query_id in low]
    assert sorted(histories) == ["park:offload", "park:recompute", "park:recompute"]
    copied = low[histories.index("park:offload")]
    assert engine.finished[copied].computed_prompt_tokens == 8


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("steps", [full_or(10_000, 200_000)])
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
def test_random_life(fake_engine: type[FakeEngine], steps: int, *, tight: bool) -> None:
    """S4: sets stay disjoint, every row that was not parked gets exactly one token a step, nobody is lost."""
    dice = random.Random(steps + tight)
    engine = fake_engine(
        Priority(ageing_s=0.5),
        rows=4,
        kv_bytes=260 if tight else None,
        host_bytes=120 if tight else 1 << 30,
        chunk_tokens=24,
        ready_limit=2,
    )
    for _ in range(steps):
        if len(engine.live) < 12 and dice.random() < 0.2:
            engine.submit(dice.choice(SLAS), dice.randint(1, 80), dice.randint(1, 120))
        if engine.live and dice.random() < 0.05:
            query_id = dice.choice(list(engine.live))
            dice.choice([engine.hold, engine.release, engine.release, engine.cancel])(query_id)
        if dice.random() < 0.02:
            engine.rows = dice.randint(1, 6)
        if dice.random() < 0.01:
            engine.planner.policy = dice.choice([Fcfs(), Priority(ageing_s=0.5), Priority()])
        engine.step()
    for query_id in list(engine.live):
        engine.release(query_id)
    engine.run(most_steps=5_000)
    assert engine.park_count > steps / 200


class Counting(Priority):
    """Counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks = self.questions = 0

    def rank(self, query: QueryView, now_s: float) -> Rank:
        self.ranks += 1
        return super().rank(query, now_s)

    def may_preempt(self, newcomer: QueryView, victim: QueryView, now_s: float) -> bool:
        self.questions += 1
        return super().may_preempt(newcomer, victim, now_s)


@pytest.mark.parametrize("kv_free_bytes", [None, 0, 500, 1 << 30])
@pytest.mark.parametrize("since", [0, 50])
@pytest.mark.parametrize("kind", ["waiting", "ready"])
def test_work_is_linear_in_waiting_and_running(
    views: Views, kv_free_bytes: int | None, since: int, kind: str
) -> None:
    """A thousand claims, 64 rows: ranked once a query, asked about a row once a class and park."""
    running = [views.running("batch", since=since, parks=8 * (number % 2)) for number in range(64)]
    claims = [getattr(views, kind)(sla) for _ in range(334) for sla in SLAS]
    view = BatchView(
        now_s=1e4,
        rows=64,
        queries=(*claims, *running),
        kv_free_bytes=kv_free_bytes,
        host_free_bytes=1 << 30,
        chunk_tokens=None,
    )
    policy = Counting()
    start_s = time.perf_counter()
    plan = Planner(policy).plan(view)
    assert time.perf_counter() - start_s < 1.0
    assert policy.ranks <= len(view.queries)
    assert policy.questions <= 2 * 64 * (len(SLAS) + len(plan.park))
