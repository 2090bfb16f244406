"""What holds for every policy and any queries."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batond.policies.base import KeepsLines, Phase, Policy, PreemptsByLevel, QueryView, TracksEnds
from batond.policies.deadline import Deadline
from batond.policies.fair import Fair
from batond.policies.fcfs import Fcfs
from batond.policies.mlfq import Mlfq
from batond.policies.priority import Priority
from batond.policies.shortest import Shortest

if TYPE_CHECKING:
    from collections.abc import Callable

FACTORIES: list[Callable[[], Policy]] = [
    Fcfs,
    Priority,
    lambda: Priority(ageing_s=1.0),
    Deadline,
    lambda: Deadline(token_s=0.0, prefill_token_s=0.0, margin_s=0.0),
    Fair,
    lambda: Fair(ageing_s=1.0),
    Shortest,
    lambda: Shortest(gain=1.01, ageing_s=1.0),
    Mlfq,
    lambda: Mlfq(quantum_tokens=1, queues=4, prompt_cost=1.0, ageing_s=1.0),
    lambda: Mlfq(quantum_tokens=2, preempt_alike=True),
]
#: Policies whose answers depend on what they were told.
factories = st.sampled_from(FACTORIES)
many = settings(max_examples=100, deadline=None)


@st.composite
def queries(draw: st.DrawFn, seq: int, phase: Phase | None = None) -> QueryView:
    """One query in any phase; small numbers, so that ties are common."""
    phase = draw(st.sampled_from(Phase)) if phase is None else phase
    order = draw(st.integers(0, 2))
    max_tokens = draw(st.sampled_from((1, 8, 40, 300)))
    prompt = draw(st.sampled_from((1, 8, 64, 900)))
    fresh = phase in {Phase.WAITING, Phase.PREFILLING}
    return QueryView(
        query_id=f"q{seq}",
        tenant=draw(st.sampled_from("ab")),
        sla_class="isb"[order],
        class_order=order,
        preemptible=draw(st.booleans()),
        arrival_s=draw(st.sampled_from((0.0, 1.0, 9.5))),
        seq=seq,
        phase=phase,
        prompt_tokens=prompt,
        prefilled_tokens=0 if fresh else prompt,
        output_tokens=0 if fresh else draw(st.integers(0, max_tokens - 1)),
        max_tokens=max_tokens,
        park_seq=seq if phase is Phase.PARKED else 0,
        to_prefill_tokens=prompt if fresh else 0,
        deadline_s=draw(st.sampled_from((2.0, 11.0, 30.0, math.inf))),
        ttft_target_s=draw(st.sampled_from((0.5, 5.0, math.inf))),
        tpot_target_s=draw(st.sampled_from((0.1, 1.0))),
        tenant_weight=draw(st.sampled_from((0.5, 1.0, 3.0))),
    )


lines = st.integers(1, 6).flatmap(lambda n: st.tuples(*(queries(seq) for seq in range(1, n + 1))))
threes = st.tuples(*(queries(seq) for seq in range(1, 4)))
#: What was told before: tokens, and ends of whole queries.
told = st.lists(st.tuples(queries(100), st.sampled_from(("prompt", "output", "end", "rank"))), max_size=6)


def tell(policy: Policy, history: list[tuple[QueryView, str]]) -> Policy:
    """Tell a policy of tokens and ends."""
    for number, (view, what) in enumerate(history):
        query = replace(view, query_id=f"old{number // 2}")
        if what == "rank":
            policy.rank(query, 5.0)
        elif what == "end":
            if isinstance(policy, TracksEnds):
                policy.on_end(query)
        else:
            policy.on_tokens(query, query.prompt_tokens * (what == "prompt"), int(what == "output"))
    return policy


@many
@given(make=factories, history=told, line=lines, now_s=st.sampled_from((0.0, 10.0, 90.0)))
def test_rank_orders_all_queries_and_ties_go_by_arrival(
    make: Callable[[], Policy],
    history: list[tuple[QueryView, str]],
    line: tuple[QueryView, ...],
    now_s: float,
) -> None:
    """Ranks are tuples of numbers without NaN, the same when asked again, all different, arrival last."""
    policy = tell(make(), history)
    for query in line:
        policy.rank(query, now_s)  # `fair` enters them into its line.
    ranks = {query.query_id: policy.rank(query, now_s) for query in line}
    assert not any(math.isnan(part) for rank in ranks.values() for part in rank)
    assert {query.query_id: policy.rank(query, now_s) for query in reversed(line)} == ranks
    assert len(set(ranks.values())) == len(line)
    assert len({len(rank) for rank in ranks.values()}) == 1
    for query in line:
        assert ranks[query.query_id][-2:] == (query.arrival_s, query.seq)


@settings(max_examples=300, deadline=None)
@given(
    make=factories,
    history=told,
    three=st.tuples(queries(1), queries(2, Phase.RUNNING), queries(3, Phase.RUNNING)),
    now_s=st.sampled_from((0.0, 10.0, 90.3)),
)
def test_bar_says_what_may_preempt_says(
    make: Callable[[], Policy],
    history: list[tuple[QueryView, str]],
    three: tuple[QueryView, QueryView, QueryView],
    now_s: float,
) -> None:
    """Rule 1: above the bar is who may be pre-empted, never the other way round; classes stay in order."""
    policy, (newcomer, victim, other) = tell(make(), history), three
    assert isinstance(policy, PreemptsByLevel)
    if newcomer.phase is Phase.RUNNING:
        newcomer = replace(newcomer, phase=Phase.READY)
    victim = replace(victim, preemptible=True)
    bar = policy.victim_bar(newcomer, victim.class_order, now_s)
    if bar is None:
        return
    level = policy.rank(victim, now_s)[0]
    assert policy.may_preempt(newcomer, victim, now_s) == (level > bar)
    if level > bar:
        assert not policy.may_preempt(replace(victim, phase=Phase.PARKED), newcomer, now_s)
        assert not policy.may_preempt(victim, newcomer, now_s)
    if bar == -math.inf and other.class_order < victim.class_order:
        assert policy.rank(other, now_s) < policy.rank(victim, now_s)


@many
@given(make=factories, history=told, query=queries(1), now_s=st.sampled_from((0.0, 10.0, 90.0)))
def test_alike_queries_are_sorted_by_arrival(
    make: Callable[[], Policy], history: list[tuple[QueryView, str]], query: QueryView, now_s: float
) -> None:
    policy = tell(make(), history)
    query = replace(query, output_tokens=0, park_seq=0, phase=Phase.WAITING)
    later = replace(query, query_id="q2", seq=2, arrival_s=query.arrival_s + 0.01)
    if query.deadline_s < math.inf:
        later = replace(later, deadline_s=query.deadline_s + 0.01)
    first, second = policy.rank(query, now_s), policy.rank(later, now_s)
    hopeless = isinstance(policy, Deadline) and query.deadline_s < math.inf
    assert first < second or hopeless  # A deadline that can't be met any more isn't rushed.


@many
@given(make=factories, history=told, three=threes, now_s=st.sampled_from((0.0, 10.0, 90.0)))
def test_preemption_is_strict_and_has_no_cycle(
    make: Callable[[], Policy], history: list[tuple[QueryView, str]], three: Any, now_s: float
) -> None:
    """S2: irreflexive, asymmetric, and no three queries chase each other; protected ones are left alone."""
    policy = tell(make(), history)
    pairs = {(n.query_id, v.query_id) for n in three for v in three if policy.may_preempt(n, v, now_s)}
    assert not any((b, a) in pairs for a, b in pairs)
    for a, b, c in permutations(("q1", "q2", "q3")):
        assert not {(a, b), (b, c), (c, a)} <= pairs
    assert not any(not query.preemptible for query in three for a, b in pairs if b == query.query_id)


@pytest.mark.parametrize("make", FACTORIES)
@settings(max_examples=60, deadline=None)
@given(
    history=told,
    query=queries(1, Phase.RUNNING).map(lambda query: replace(query, preemptible=True)),
    later_s=st.sampled_from((0.0, 0.01, 5.0)),
    now_s=st.sampled_from((10.0, 90.0)),
    newcomer_tokens=st.integers(0, 300),
)
def test_alike_queries_never_preempt_each_other(
    *,
    make: Callable[[], Policy],
    history: list[tuple[QueryView, str]],
    query: QueryView,
    later_s: float,
    now_s: float,
    newcomer_tokens: int,
) -> None:
    """S2: same tenant, class, prompt, limit and time to the deadline, at any stage of the first."""
    policy = make()
    if isinstance(policy, Mlfq) and policy._preempt_alike:
        return
    tell(policy, history)
    later = replace(
        query,
        query_id="q2",
        seq=2,
        arrival_s=query.arrival_s + later_s,
        deadline_s=query.deadline_s + later_s,
        phase=Phase.WAITING,
        output_tokens=min(newcomer_tokens, query.output_tokens),
    )
    assert not policy.may_preempt(later, query, now_s)


@many
@given(
    make=factories,
    history=told,
    newcomer=queries(1, Phase.WAITING),
    victim=queries(2, Phase.RUNNING),
    now_s=st.sampled_from((0.0, 10.0, 90.0)),
    worked_tokens=st.integers(0, 16),
)
def test_a_victim_does_not_take_its_row_back_at_once(
    *,
    make: Callable[[], Policy],
    history: list[tuple[QueryView, str]],
    newcomer: QueryView,
    victim: QueryView,
    now_s: float,
    worked_tokens: int,
) -> None:
    """No ping-pong: within the newcomer's quantum the one parked for it may not take the row back.

    FastServe's own rule is the exception: there a quantum of the queue is all that protects.
    """
    policy = make()
    if isinstance(policy, Mlfq) and policy._preempt_alike:
        return
    tell(policy, history)
    if not policy.may_preempt(newcomer, victim, now_s):
        return
    parked = replace(victim, phase=Phase.PARKED, park_seq=1, parks=1)
    tokens = min(worked_tokens, newcomer.max_tokens - 1)
    running = replace(
        newcomer,
        phase=Phase.RUNNING,
        preemptible=True,
        prefilled_tokens=newcomer.prompt_tokens,
        to_prefill_tokens=0,
        output_tokens=tokens,
        since_admission_tokens=tokens,
    )
    for wait_s in (0.0, 1.0, 1000.0):
        assert not policy.may_preempt(parked, running, now_s + wait_s)


@many
@given(
    ageing_s=st.integers(1, 50),
    kind=st.sampled_from((Shortest, Mlfq)),
    first=queries(1, Phase.WAITING),
    later=queries(2, Phase.WAITING),
    after_s=st.integers(0, 200),
    wait_s=st.integers(0, 500),
)
def test_nothing_that_comes_after_the_stated_time_overtakes(
    *, ageing_s: int, kind: Any, first: QueryView, later: QueryView, after_s: int, wait_s: int
) -> None:
    """S8: (k + 1) x ageing_s after a query of order k nothing comes that is sorted before it."""
    policy: Policy = kind(ageing_s=float(ageing_s))
    first = replace(first, arrival_s=100.0)
    later = replace(later, arrival_s=100.0 + (first.class_order + 1) * ageing_s + after_s)
    now_s = later.arrival_s + wait_s
    assert policy.rank(first, now_s) < policy.rank(later, now_s)


@many
@given(
    make=factories,
    history=told,
    meanwhile=told,
    line=st.tuples(*(queries(seq, Phase.WAITING) for seq in range(1, 5))),
    times_s=st.tuples(*(st.sampled_from((9.5, 10.0, 25.0, 90.0)),) * 2).map(sorted),
)
def test_queries_of_one_line_never_change_places(
    *,
    make: Callable[[], Policy],
    history: list[tuple[QueryView, str]],
    meanwhile: list[tuple[QueryView, str]],
    line: tuple[QueryView, ...],
    times_s: list[float],
) -> None:
    """What lets a planner sort a line once: all built-in policies keep lines."""
    policy = tell(make(), history)
    assert isinstance(policy, KeepsLines)

    def in_order(now_s: float) -> dict[object, list[str]]:
        ranks = {query.query_id: policy.rank(query, now_s) for query in line}
        lines: dict[object, list[str]] = {}
        for query in sorted(line, key=lambda query: ranks[query.query_id]):
            lines.setdefault(policy.line_of(query), []).append(query.query_id)
        return lines

    before = in_order(times_s[0])
    tell(policy, meanwhile)
    assert in_order(times_s[1]) == before


@many
@given(data=st.data(), output_weight=st.sampled_from((0.0, 1.0, 2.0)))
def test_counters_are_never_negative_and_never_fall(data: st.DataObject, output_weight: float) -> None:
    """Any order of calls, as an engine makes them; at the end nothing is remembered of any query."""
    policy = Fair(output_weight=output_weight)
    live: dict[str, QueryView] = {}
    counters: dict[tuple[str, int], float] = {}
    for number in range(data.draw(st.integers(1, 15))):
        what = data.draw(st.sampled_from(("rank", "rank", "prompt", "output", "end")))
        if what == "rank" or not live:
            query = replace(data.draw(queries(number, Phase.WAITING)), query_id=f"q{number}")
            live[query.query_id] = query
            policy.rank(query, float(number))
        else:
            query = live[data.draw(st.sampled_from(sorted(live)))]
            if what == "end":
                policy.on_end(live.pop(query.query_id))
            else:
                policy.on_tokens(query, 8 * (what == "prompt"), int(what == "output"))
        for order, tenants in policy._accounts.items():
            for tenant, account in tenants.items():
                assert policy.counter(tenant, order) >= counters.get((tenant, order), 0.0)
                counters[tenant, order] = policy.counter(tenant, order)
                places = [account.tags[query_id] for query_id in account.line]
                assert places == sorted(places), "who came first is next"
                assert account.end + account.shift - account.given == pytest.approx(
                    sum(account.line.values())
                )
    for query in live.values():
        policy.on_end(query)
    accounts = [account for tenants in policy._accounts.values() for account in tenants.values()]
    assert not any(account.tags or account.line for account in accounts)
