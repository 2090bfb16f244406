"""A line that is kept from step to step decides as one that is sorted from scratch, and is cheap."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING

import pytest

from batond.bench.faults.counts import full_or
from batond.daemon.scheduler.claims import in_parked_line
from batond.daemon.scheduler.draft import MAX_BLOCKED, Draft
from batond.daemon.scheduler.lanes import Walk
from batond.daemon.scheduler.line import EXACT_UP_TO, MOST_LINES, RENEWED_A_STEP, Line
from batond.daemon.scheduler.plan import BatchView, Plan
from batond.daemon.scheduler.planner import Planner, PlannerLimits
from batond.policies.base import Phase, Policy, QueryView
from batond.policies.fcfs import Fcfs
from batond.policies.priority import Priority
from batond.policies.registry import load_policy, policy_names

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batond.policies.base import Rank

    from .conftest import FakeEngine, Views

SLAS = ("interactive", "standard", "batch")
LIMITS = PlannerLimits(quantum_tokens=8, max_parks=3)


class Plain:
    """Another policy without its lines: what somebody else's policy may look like."""

    def __init__(self, policy: Policy) -> None:
        self.rank, self.may_preempt, self.on_tokens = policy.rank, policy.may_preempt, policy.on_tokens
        self.name = policy.name
        self.ranks = 0


class Counting(Priority):
    """Counts how often it is asked."""

    ranks = 0

    def rank(self, query: QueryView, now_s: float) -> Rank:
        self.ranks += 1
        return super().rank(query, now_s)


def plain_order(queries: Iterable[QueryView], policy: Policy, now_s: float) -> list[str]:
    """The rule, said plainly: level, parked before fresh, park order, rest of the rank, seq."""
    ranks = {query.query_id: policy.rank(query, now_s) for query in queries}
    fresh_levels: dict[int, float] = {}
    for query in queries:
        if not in_parked_line(query):
            known = fresh_levels.get(query.class_order, math.inf)
            fresh_levels[query.class_order] = min(known, ranks[query.query_id][0])
    keyed = []
    for query in queries:
        level, *rest = ranks[query.query_id]
        if in_parked_line(query):
            level = min(level, fresh_levels.get(query.class_order, math.inf))
            keyed.append(((level, 0, query.park_seq, *rest, query.seq), query.query_id))
        else:
            keyed.append(((level, 1, 0, *rest, query.seq), query.query_id))
    return [query_id for _, query_id in sorted(keyed, key=itemgetter(0))]


def any_query(dice: random.Random, number: int, now_s: float) -> QueryView:
    """A consistent query of one byte a token; most wait."""
    phase = dice.choices(list(Phase), [8, 1, 1, 2, 2])[0]
    order, prompt, room = dice.randrange(3), dice.randint(1, 40), dice.randint(1, 40)
    begun = phase in {Phase.READY, Phase.RUNNING, Phase.PARKED}
    output = dice.randint(1, room - 1) if begun and room > 1 else 0
    copy = phase is Phase.PARKED and dice.random() < 0.7
    whole = cached = prompt + output
    if phase is Phase.WAITING or (phase is Phase.PARKED and not copy):
        cached = 0
    elif phase is Phase.PREFILLING:
        cached = dice.randint(0, prompt - 1)
    computing = phase in {Phase.WAITING, Phase.PREFILLING} or (phase is Phase.PARKED and not copy)
    return QueryView(
        query_id=f"q{number}",
        tenant=f"t{dice.randrange(3)}",
        sla_class=f"c{order}",
        class_order=order,
        preemptible=order > 0 and dice.random() < 0.8,
        arrival_s=now_s - dice.choice((0.0, 0.5, 7.0, 20.0)),
        seq=number,
        phase=phase,
        prompt_tokens=prompt,
        prefilled_tokens=cached,
        output_tokens=output,
        max_tokens=room,
        parks=dice.randint(0, 4),
        since_admission_tokens=dice.randint(0, 20) if phase is Phase.RUNNING else 0,
        park_seq=number if phase is Phase.PARKED else 0,
        held=phase is not Phase.RUNNING and dice.random() < 0.05,
        kv_bytes=0 if copy else cached,
        reserved_bytes=prompt + room,
        park_bytes=cached,
        to_prefill_tokens=whole - cached if computing else 0,
    )


def a_policy(name: str, *, lines: bool) -> Policy:
    """A policy by name whose ageing shows within a second."""
    options = {} if name in {"fcfs", "deadline"} else {"ageing_s": 0.7}
    policy = load_policy(name, **options)
    return policy if lines else Plain(policy)


@pytest.mark.parametrize("lines", [True, False], ids=["lines", "no lines"])
@pytest.mark.parametrize("name", policy_names())
def test_order_after_any_history_is_the_plain_order(name: str, *, lines: bool) -> None:
    """Queries come, change, go; time passes, the policy is told of tokens: the order is the sorted one."""
    if name not in {"deadline", "fair", "fcfs", "mlfq", "priority", "shortest"}:
        pytest.skip("not built in")
    for seed in range(12):
        dice = random.Random(seed)
        policy = a_policy(name, lines=lines)
        line, live, now_s = Line(policy), {}, 100.0
        for number in range(1, 80):
            query = any_query(dice, number, now_s)
            live[query.query_id] = query
            line.put(query)
            if dice.random() < 0.3:
                query = dice.choice(list(live.values()))
                live[query.query_id] = query = replace(
                    query, held=query.phase is not Phase.RUNNING and not query.held
                )
                line.put(query)
            if dice.random() < 0.3:
                line.remove(live.pop(dice.choice(list(live))).query_id)
            if dice.random() < 0.3:
                now_s += dice.random()
                line.settle(now_s)
                claims = [q for q in live.values() if q.phase is not Phase.RUNNING and not q.held]
                assert [query.query_id for query in Walk(line)] == plain_order(claims, policy, now_s)
                assert len(claims) <= EXACT_UP_TO


def test_places_that_change_while_others_are_taken_are_seen_in_the_same_step(views: Views) -> None:
    """Under `fair` a query that leaves a class by an update lets those behind it in its old line move up."""
    policy = load_policy("fair")
    line = Line(policy)
    first, second = (views.waiting("standard", prompt=100, tenant="a") for _ in range(2))
    other = views.waiting("standard", prompt=50, tenant="b")
    behind = views.waiting("standard", prompt=50, tenant="b")
    came = views.waiting("batch", prompt=10, tenant="a")
    queries = {query.query_id: query for query in (first, second, other, behind, came)}
    for query in queries.values():
        line.put(query)
    line.settle(100.0)
    for query, order in ((came, 1), (first, 2)):
        queries[query.query_id] = moved = replace(query, class_order=order)
        line.put(moved)
    line.settle(100.0)
    assert [query.query_id for query in Walk(line)] == plain_order(queries.values(), policy, 100.0)


class Twin(Planner):
    """Plans twice, from scratch and from a line that is kept; both must be the same."""

    line: Line | None = None
    plans = 0

    def plan(self, view: BatchView, line: Line | None = None) -> Plan:
        assert line is None
        kept = self.line = self.line or Line(self.policy)
        for query in view.queries:
            kept.put(query)
        for query_id in {query.query_id for query in kept.views} - {query.query_id for query in view.queries}:
            kept.remove(query_id)
        incremental = super().plan(replace(view, queries=()), kept)
        scratch = super().plan(view)
        assert incremental == scratch
        running = [query for query in view.queries if query.phase is Phase.RUNNING]
        assert kept.unwritten_bytes == sum(query.reserved_bytes - query.kv_bytes for query in running)
        self.plans += 1
        return scratch


@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize("name", ["deadline", "fair", "fcfs", "mlfq", "priority", "shortest", "plain"])
def test_incremental_plan_equals_plan_from_scratch(
    fake_engine: type[FakeEngine], name: str, *, tight: bool
) -> None:
    """Random lives of queries, policies exchanged in the middle: the same plan in every step."""
    dice = random.Random(len(name) + tight)
    policy = a_policy("priority" if name == "plain" else name, lines=name != "plain")
    engine = fake_engine(
        policy,
        rows=4,
        kv_bytes=260 if tight else None,
        host_bytes=120 if tight else 1 << 30,
        chunk_tokens=24,
        ready_limit=2,
    )
    twin = engine.planner = Twin(policy, engine.limits)
    for step in range(500):
        if len(engine.live) < 30 and dice.random() < 0.3:
            engine.submit(dice.choice(SLAS), dice.randint(1, 80), dice.randint(1, 60))
        if engine.live and dice.random() < 0.05:
            query_id = dice.choice(list(engine.live))
            dice.choice([engine.hold, engine.release, engine.release, engine.cancel])(query_id)
        if dice.random() < 0.02:
            engine.rows = dice.randint(1, 6)
        if step % 150 == 149:
            engine.planner.policy = a_policy(
                dice.choice(("fcfs", "priority", name.replace("plain", "fair"))), lines=True
            )
        engine.step()
    assert twin.plans == 500


def test_what_is_passed_over_would_have_got_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Crowded views of any kind: a walk that leaves shut lanes decides as one that goes to the end."""

    def serve_all(self: Draft, query: QueryView, *, in_line: bool = True) -> None:
        # Reasons are given for the first eight. Who comes behind and needs what is given out already holds
        # nothing that others could miss.
        out_of_tokens = self._chunk_tokens <= 0
        no_row = self._free_rows <= 0 and query.class_order in self._stuck_orders and query.max_tokens > 1
        if query.phase is Phase.WAITING and len(self._blocked) == MAX_BLOCKED and (out_of_tokens or no_row):
            return
        serve(self, query, in_line=in_line)

    serve = Draft.serve
    for seed in range(150):
        dice = random.Random(seed)
        view = BatchView(
            20.0,
            dice.randint(0, 40),
            tuple(any_query(dice, number, 20.0) for number in range(1, dice.randint(20, 120))),
            chunk_tokens=dice.choice((None, dice.randint(0, 400))),
            ready_limit=dice.randint(0, 3),
            kv_free_bytes=dice.choice((None, dice.randint(-50, 900))),
            host_free_bytes=dice.randint(0, 200),
            fixed_chunks=dice.random() < 0.2,
        )
        planner = Planner(dice.choice((Fcfs(), Priority(5.0), Priority())), LIMITS)
        plan = planner.plan(view)
        with monkeypatch.context() as patch:
            patch.setattr(Draft, "serve", serve_all)
            patch.setattr(Draft, "shut", lambda *_: False)
            whole = planner.plan(view)
        for part in ("chunks", "park", "resume", "admit", "blocked"):
            assert getattr(plan, part) == getattr(whole, part)


@pytest.mark.parametrize("name", ["deadline", "fair", "fcfs", "mlfq", "priority", "shortest"])
def test_victims_are_those_that_asking_one_by_one_would_find(name: str) -> None:
    """Lines and bars save questions; a policy without them gets the same plan."""
    parks = 0
    for seed in range(full_or(50, 1000)):
        dice = random.Random(seed)
        queries = [any_query(dice, number, 20.0) for number in range(1, dice.randint(10, 70))]
        queries = [replace(query, deadline_s=20.0 + dice.choice((1.0, 9.0, math.inf))) for query in queries]
        view = BatchView(
            20.0,
            sum(query.phase is Phase.RUNNING for query in queries) + dice.choice((-1, 0, 0, 1)),
            tuple(queries),
            chunk_tokens=400,
            ready_limit=dice.randint(0, 3),
            kv_free_bytes=dice.choice((None, dice.randint(0, 100))),
            host_free_bytes=dice.randint(0, 200),
        )
        plan = Planner(a_policy(name, lines=True), LIMITS).plan(view)
        assert plan == Planner(a_policy(name, lines=False), LIMITS).plan(view)
        parks += sum(order.cause != "row_limit" for order in plan.park)
    assert (parks == 0) == (name == "fcfs")


class Gentle(Priority):
    """Inherits the bar of what it does otherwise."""

    def may_preempt(self, newcomer: QueryView, victim: QueryView, now_s: float) -> bool:
        return victim.tenant != "dear" and super().may_preempt(newcomer, victim, now_s)


def test_inherited_bar_does_not_speak_for_another_may_preempt(views: Views) -> None:
    urgent, dear, other = views.ready("interactive"), views.running(tenant="dear"), views.running()
    assert [order.query_id for order in Planner(Priority()).plan(BatchView(100.0, 1, (urgent, dear))).park]
    assert not Planner(Gentle()).plan(BatchView(100.0, 1, (urgent, dear))).park
    plan = Planner(Gentle()).plan(BatchView(100.0, 2, (urgent, other, dear)))
    assert [order.query_id for order in plan.park] == [other.query_id]


@pytest.mark.parametrize("kv_free_bytes", [None, 0, 500, 1 << 30])
@pytest.mark.parametrize("free_rows", [0, 4])
def test_a_plan_looks_at_the_head_of_the_line_only(
    views: Views, kv_free_bytes: int | None, free_rows: int
) -> None:
    """Three thousand wait: a step in which little has changed asks for few ranks."""
    policy = Counting()
    running = [views.running("batch", since=4) for _ in range(32)]
    waiting = [views.waiting(sla) for _ in range(1000) for sla in SLAS]
    line = Line.of((*waiting, *running), policy)
    planner = Planner(policy)
    view = BatchView(
        1e4, 32 + free_rows, (), chunk_tokens=64, kv_free_bytes=kv_free_bytes, host_free_bytes=1 << 30
    )
    planner.plan(view, line)
    policy.ranks = 0
    line.remove(waiting[0].query_id)
    line.put(views.waiting("interactive"))
    planner.plan(replace(view, now_s=1e4 + 1), line)
    assert policy.ranks < 300


def test_more_lines_than_are_kept_apart(views: Views) -> None:
    """Thousands of deadlines or tenants: further lines share one, whose ranks are renewed bit by bit."""
    policy = load_policy("deadline")
    waiting = [views.waiting(deadline_s=500.0 + number % 7) for number in range(600)]
    line = Line.of(waiting, policy)
    line.settle(100.0)
    assert len(line.lanes()) <= MOST_LINES + 1
    order = [query.query_id for query in Walk(line)]
    assert order == plain_order(waiting, policy, 100.0)
    for step in range(600 // RENEWED_A_STEP + 1):
        line.settle(101.0 + step / 1e3)
    assert sorted(query.query_id for query in Walk(line)) == sorted(order)


def test_a_policy_without_lines_is_renewed_in_turn(views: Views) -> None:
    """Every rank is at most n / RENEWED_A_STEP steps old."""
    policy = Plain(Priority(ageing_s=10.0))
    old = views.waiting("batch", arrival_s=0.0)
    young = [views.waiting("standard", arrival_s=95.0) for _ in range(3 * EXACT_UP_TO)]
    line = Line.of((*young, old), policy)
    line.settle(0.0)
    first = [next(iter(Walk(line))).query_id]
    for step in range(len(young) // RENEWED_A_STEP + 1):
        line.settle(100.0 + step / 1e3)
        first.append(next(iter(Walk(line))).query_id)
    assert first[0] == young[0].query_id
    assert first[-1] == old.query_id


def test_bytes_below_zero_are_no_room(views: Views) -> None:
    """A budget lowered under what is promised: nobody new comes in, and nobody is parked for nothing."""
    planner = Planner(Priority())
    running, fresh = views.running("batch"), views.waiting("batch")
    plan = planner.plan(BatchView(100.0, 4, (running, fresh), kv_free_bytes=-60))
    assert plan.empty
    assert plan.blocked == {fresh.query_id: "kv_bytes"}
    # An urgent one must make good what is missing too: 108 bytes of the victim do, at 0 missing, not at 60.
    urgent = views.waiting("interactive")
    assert planner.plan(BatchView(100.0, 4, (running, urgent), chunk_tokens=None, kv_free_bytes=0)).park
    assert not planner.plan(BatchView(100.0, 4, (running, urgent), chunk_tokens=None, kv_free_bytes=-60)).park


def test_likely_resumes_are_foreseen(views: Views) -> None:
    """A row about to come free is for the first in line; if that is a parked one, it can be brought ahead."""
    planner = Planner(Priority())
    ending = views.running("batch", max_tokens=53, since=50)
    busy = views.running("batch", max_tokens=500)
    parked = [views.parked("batch", park_seq=number) for number in (1, 2)]
    plan = planner.plan(BatchView(100.0, 2, (ending, busy, *parked)))
    assert plan.prefetch == (parked[0].query_id,)
    assert plan.reasons == {parked[0].query_id: "row_soon"}
    assert plan.empty
    assert planner.plan(BatchView(100.0, 2, (busy, busy, *parked))).prefetch == ()
    # Without bytes for it, it would come for nothing.
    assert planner.plan(BatchView(100.0, 2, (ending, busy, *parked), kv_free_bytes=10)).prefetch == ()


def test_every_row_given_has_a_reason(views: Views) -> None:
    planner = Planner(Priority())
    running, urgent, parked = views.running("batch"), views.ready("interactive"), views.parked("batch")
    taken = planner.plan(BatchView(100.0, 1, (running, urgent, parked)))
    assert taken.reasons == {urgent.query_id: "row_taken"}
    assert taken.park[0].cause == "row"
    assert taken.blocked[parked.query_id] == "row"
    free = planner.plan(BatchView(100.0, 3, (running, urgent, parked)))
    assert free.reasons == {urgent.query_id: "row_free", parked.query_id: "row_free"}
