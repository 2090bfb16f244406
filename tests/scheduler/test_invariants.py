"""What holds for every plan, of whatever view."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batond.bench.faults.counts import full_or
from batond.daemon.scheduler.claims import needed_bytes
from batond.daemon.scheduler.plan import BatchView, Gate, Plan
from batond.daemon.scheduler.planner import Planner, PlannerLimits
from batond.policies.base import Phase, QueryView
from batond.policies.fcfs import Fcfs
from batond.policies.priority import Priority

if TYPE_CHECKING:
    from collections.abc import Callable

# Factories only: sharing them between examples changes nothing.
many = settings(
    max_examples=full_or(200, 2000),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
POLICIES = st.sampled_from([Fcfs(), Priority(ageing_s=5.0), Priority(ageing_s=1e9)])
LIMITS = PlannerLimits(quantum_tokens=8, max_parks=3)


@st.composite
def queries(draw: st.DrawFn, number: int, phase: Phase | None = None) -> QueryView:
    """One consistent query of one byte a token."""
    phase = phase or draw(st.sampled_from(Phase))
    order = draw(st.integers(0, 2))
    prompt, room = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    output = 0
    if phase in {Phase.READY, Phase.RUNNING, Phase.PARKED} and room > 1:
        output = draw(st.integers(1, room - 1))
    copy = phase is Phase.PARKED and draw(st.booleans())
    whole = prompt + output
    cached = whole
    if phase is Phase.WAITING or (phase is Phase.PARKED and not copy):
        cached = 0
    elif phase is Phase.PREFILLING:
        cached = draw(st.integers(0, prompt - 1))
    computing = phase in {Phase.WAITING, Phase.PREFILLING} or (phase is Phase.PARKED and not copy)
    return QueryView(
        query_id=f"q{number}",
        tenant="t0",
        sla_class=f"c{order}",
        class_order=order,
        preemptible=order > 0 and draw(st.booleans()),
        arrival_s=float(draw(st.integers(0, 20))),
        seq=number,
        phase=phase,
        prompt_tokens=prompt,
        prefilled_tokens=cached,
        output_tokens=output,
        max_tokens=room,
        parks=draw(st.integers(0, 4)),
        since_admission_tokens=draw(st.integers(0, 20)) if phase is Phase.RUNNING else 0,
        park_seq=number if phase is Phase.PARKED else 0,
        held=phase is not Phase.RUNNING and draw(st.integers(0, 9)) == 0,
        kv_bytes=0 if copy else cached,
        reserved_bytes=prompt + room,
        park_bytes=cached,
        to_prefill_tokens=whole - cached if computing else 0,
    )


@st.composite
def batch_views(draw: st.DrawFn) -> BatchView:
    """Any view: also with more running queries than rows, and with too few bytes."""
    count = draw(st.integers(0, 12))
    return BatchView(
        now_s=20.0,
        rows=draw(st.integers(0, 6)),
        queries=tuple(draw(queries(number)) for number in range(1, count + 1)),
        chunk_tokens=draw(st.none() | st.integers(0, 100)),
        ready_limit=draw(st.integers(0, 3)),
        kv_free_bytes=draw(st.none() | st.integers(-100, 200)),
        row_step_bytes=draw(st.integers(0, 3)),
        host_free_bytes=draw(st.integers(0, 200)),
        gate=draw(st.sampled_from(Gate)),
        recompute_only=draw(st.booleans()),
        fixed_chunks=draw(st.booleans()),
    )


@many
@given(view=batch_views(), policy=POLICIES)
def test_every_plan_keeps_the_contract(
    check_plan: Callable[..., None], view: BatchView, policy: Fcfs | Priority
) -> None:
    """S4: lists disjoint, rows, bytes, chunk tokens and host pool kept, victims strictly less urgent."""
    plan = Planner(policy, LIMITS).plan(view)
    check_plan(view, plan, policy, LIMITS)


@many
@given(view=batch_views(), policy=POLICIES)
def test_planning_is_a_function_of_the_view(view: BatchView, policy: Fcfs | Priority) -> None:
    """No side effects: the same view gives the same plan, in whatever order it lists the queries."""
    planner = Planner(policy, LIMITS)
    first = planner.plan(view)
    planner.plan(replace(view, rows=1))
    assert planner.plan(replace(view, queries=tuple(reversed(view.queries)))) == first


@many
@given(view=batch_views(), policy=POLICIES)
def test_rows_are_never_wasted_and_never_all_blocked(view: BatchView, policy: Fcfs | Priority) -> None:
    """Rule 7: with a row, tokens and bytes for anybody, and nobody running, something is done."""
    claims = [q for q in view.queries if q.phase is not Phase.RUNNING and not q.held]
    running = [q for q in view.queries if q.phase is Phase.RUNNING]
    fits = [q for q in claims if view.kv_free_bytes is None or needed_bytes(q) <= view.kv_free_bytes]
    if running or not fits or not view.rows or view.chunk_tokens == 0:
        return
    assert not Planner(policy, LIMITS).plan(view).empty


@many
@given(
    running=st.integers(0, 6).flatmap(
        lambda n: st.tuples(*(queries(number, Phase.RUNNING) for number in range(1, n + 1)))
    ),
    newcomer=queries(99).filter(lambda q: q.phase is not Phase.RUNNING and not q.held),
    spare_rows=st.integers(0, 1),
    kv_free_bytes=st.none() | st.integers(0, 120),
)
def test_no_victim_of_a_plan_can_be_spared(
    running: tuple[QueryView, ...], newcomer: QueryView, spare_rows: int, kv_free_bytes: int | None
) -> None:
    """Rule 2: without any one of its victims, the newcomer would not fit."""
    rows = len(running) + spare_rows
    view = BatchView(20.0, rows, (*running, newcomer), chunk_tokens=None, kv_free_bytes=kv_free_bytes)
    plan = Planner(Priority(), LIMITS).plan(view)
    reserved = {query.query_id: query.reserved_bytes for query in running}
    victims = [order.query_id for order in plan.park]
    if not victims:
        assert_needless_or_hopeless(plan, view, newcomer, spare_rows)
        return
    no_row_needed = newcomer.to_prefill_tokens > 0 and newcomer.max_tokens - newcomer.output_tokens <= 1
    rows_needed = 0 if no_row_needed else 1
    for spared in victims:
        rows_left = spare_rows + len(victims) - 1
        bytes_left = sum(reserved[victim] for victim in victims if victim != spared)
        lacks_bytes = kv_free_bytes is not None and needed_bytes(newcomer) > kv_free_bytes + bytes_left
        assert rows_left < rows_needed or lacks_bytes


def assert_needless_or_hopeless(plan: Plan, view: BatchView, newcomer: QueryView, spare_rows: int) -> None:
    """S6: nobody is parked because nobody has to be, or because all that may be parked do not suffice."""
    policy = Priority()
    may_go = [
        query
        for query in view.queries
        if query.phase is Phase.RUNNING
        and policy.may_preempt(newcomer, query, view.now_s)
        and query.since_admission_tokens >= LIMITS.quantum_tokens
        and query.parks < LIMITS.max_parks
    ]
    served = newcomer.query_id in {*plan.admit, *plan.resume, *(chunk.query_id for chunk in plan.chunks)}
    total = None if view.kv_free_bytes is None else view.kv_free_bytes + sum(q.reserved_bytes for q in may_go)
    hopeless = spare_rows + len(may_go) < 1 or (total is not None and needed_bytes(newcomer) > total)
    assert served or hopeless
