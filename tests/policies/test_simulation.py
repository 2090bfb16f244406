"""Policies over many steps, through the real planner."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from batond.daemon.scheduler.planner import PlannerLimits
from batond.policies.ageing import worst_finish_s, worst_first_row_s
from batond.policies.deadline import Deadline
from batond.policies.fair import Fair
from batond.policies.fcfs import Fcfs
from batond.policies.mlfq import Mlfq
from batond.policies.priority import Priority
from batond.policies.registry import load_policy
from batond.policies.shortest import Shortest

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.policies.base import Policy

    from .conftest import Simulation

BUILT_IN = ("deadline", "fair", "fcfs", "mlfq", "priority", "shortest")
every_policy = pytest.mark.parametrize("name", BUILT_IN)
ageing_policy = pytest.mark.parametrize("kind", [Priority, Shortest, Mlfq, Fair])


@every_policy
@pytest.mark.parametrize("sla", ["interactive", "batch"])
def test_two_equals_on_one_row(simulation: type[Simulation], name: str, sla: str) -> None:
    """S2: arrivals 10 ms apart."""
    run = simulation(load_policy(name), rows=1)
    first = run.submit(sla, length=500)
    run.step()
    second = run.submit(sla, length=500)
    run.run(most_steps=1100)
    assert run.park_count == 0
    assert run.ended[first].finish_s < run.ended[second].first_row_s + run.step_s


@every_policy
def test_a_thousand_equals(simulation: type[Simulation], name: str) -> None:
    """S2: a burst, then one each 10 ms, past quanta and targets, with a history of the flow."""
    run = simulation(load_policy(name), rows=100)
    for _ in range(500):
        run.submit("batch", length=60)

    def arrive() -> bool:
        if len(run.live) + len(run.ended) < 1000:
            run.submit("batch", length=60)
        return False

    run.run(2000, arrive)
    assert run.park_count == 0
    assert len(run.ended) == 1000


def test_equals_are_found_by_the_ceiling_alone(simulation: type[Simulation]) -> None:
    """What S2 guards against: FastServe's own rule parks the first of two equals after a quantum."""
    run = simulation(Mlfq(preempt_alike=True), rows=1)
    run.submit(length=500)
    run.step()
    run.submit(length=500)
    run.run(most_steps=1100)
    assert run.park_count > 0


@every_policy
def test_equals_that_end_early_at_random(simulation: type[Simulation], name: str) -> None:
    """S2: who outlives the others is still their equal, whatever history says."""
    dice = random.Random(2)
    run = simulation(load_policy(name), rows=8)

    def arrive() -> bool:
        if len(run.live) + len(run.ended) < 300:
            run.submit("batch", length=min(400, int(dice.paretovariate(1.1) * 5)), max_tokens=400)
            return True
        return False

    run.run(5000, arrive)
    assert run.park_count == 0


@every_policy
def test_every_query_of_a_mixed_load_ends(simulation: type[Simulation], name: str) -> None:
    """Park cap and quantum end all churn; nobody is lost."""
    dice = random.Random(name)
    run = simulation(load_policy(name), rows=4, chunk_tokens=64, limits=PlannerLimits(quantum_tokens=4))

    def arrive() -> bool:
        if run.now_s < 8 and dice.random() < 0.15:
            run.submit(
                dice.choice(("interactive", "standard", "batch")),
                prompt=dice.randint(1, 200),
                length=dice.randint(1, 60),
                max_tokens=dice.choice((60, 120)),
                tenant=dice.choice("abc"),
                deadline_s=run.now_s + dice.choice((2.0, 20.0, float("inf"))),
            )
        if run.live and dice.random() < 0.01:
            run.cancel(dice.choice(list(run.live)))
        return run.now_s < 8

    run.run(5000, arrive)
    assert max(query.view.parks for query in run.ended.values()) <= PlannerLimits().max_parks


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name != "fcfs"])
def test_urgent_arrival_in_a_full_batch(simulation: type[Simulation], name: str) -> None:
    """S1: its first token comes in the next step, one low query is parked once."""
    run = simulation(load_policy(name), rows=4)
    for _ in range(4):
        run.submit("batch", prompt=16, length=2000)
    for _ in range(100):
        run.step()
    urgent = run.submit("interactive", prompt=20, length=50)
    run.step()
    assert run.live[urgent].first_row_s == run.now_s
    run.run(most_steps=4000)
    assert run.park_count == 1


@ageing_policy
def test_low_query_under_urgent_overload_ends_within_the_bound(
    simulation: type[Simulation], kind: Callable[..., Policy]
) -> None:
    """S8: 110 % urgent load from 20-token queries, one batch query of 200 tokens, the bound of `ageing`."""
    ageing_s, rows, urgent_tokens, limits = 4.0, 2, 20, PlannerLimits()
    run = simulation(kind(ageing_s=ageing_s), rows=rows, limits=limits)
    due = [1.0 * rows]
    low = ""

    def arrive() -> bool:
        due[0] += 1.1 * rows / urgent_tokens
        while due[0] >= 1 and low not in run.ended:
            run.submit("interactive", prompt=4, length=urgent_tokens)
            due[0] -= 1
        return False

    for _ in range(50):
        arrive()
        run.step()
    low = run.submit("batch", length=200)
    run.run(20_000, arrive)
    tokens_per_s = rows / run.step_s
    levels = 2 if kind is Priority else 3
    # At 10 % above capacity that much more has arrived than was done, and as much is running.
    backlog = 0.1 * tokens_per_s * (levels * ageing_s + 0.5) + 2 * rows * urgent_tokens
    first_row_s = worst_first_row_s(levels, ageing_s, backlog, tokens_per_s)
    bound_s = worst_finish_s(
        first_row_s,
        longest_turn_s=urgent_tokens * run.step_s,
        own_tokens=200,
        token_s=run.step_s,
        max_parks=limits.max_parks,
    )
    query = run.ended[low]
    assert ageing_s < query.first_row_s - query.view.arrival_s <= first_row_s
    assert query.finish_s - query.view.arrival_s <= bound_s


# -- fair ---------------------------------------------------------------------------------------------------


def keep_in_line(run: Simulation, depth: int, **tenants: int) -> Callable[[], None]:
    """Keep `depth` queries of every tenant alive, each with a prompt of the given length."""
    ids: dict[str, list[str]] = {tenant: [] for tenant in tenants}

    def arrive() -> None:
        for tenant, prompt in tenants.items():
            ids[tenant] = [query_id for query_id in ids[tenant] if query_id in run.live]
            while len(ids[tenant]) < depth:
                ids[tenant].append(run.submit("standard", prompt=prompt, length=20, tenant=tenant))

    return arrive


def test_long_and_short_prompts_get_equal_shares(simulation: type[Simulation]) -> None:
    """S10: tenants of 8k-token and of 100-token prompts; under `fcfs` the long ones take nearly all."""
    shares = {}
    for policy in (Fair(), Fcfs()):
        run = simulation(policy, rows=16, chunk_tokens=2048)
        arrive = keep_in_line(run, 40, long=8000, short=100)
        for _ in range(1500):
            arrive()
            run.step()
        shares[policy.name] = run.tokens["short"] / sum(run.tokens.values())
    assert shares["fair"] == pytest.approx(0.5, rel=0.1)
    assert shares["fcfs"] < 0.1


def test_weights_divide_the_tokens(simulation: type[Simulation]) -> None:
    run = simulation(Fair(), rows=8, chunk_tokens=512)
    for _ in range(400):
        run.submit(prompt=100, length=20, tenant="one", tenant_weight=1.0)
        run.submit(prompt=300, length=20, tenant="three", tenant_weight=3.0)
    for _ in range(200):
        run.step()
    assert run.tokens["three"] / run.tokens["one"] == pytest.approx(3, rel=0.1)


def test_tenant_that_was_idle_has_no_monopoly(simulation: type[Simulation]) -> None:
    """S10: an hour's tokens of others give no credit; the burst of who comes back gets its share at once."""
    policy = Fair()
    run = simulation(policy, rows=8, chunk_tokens=512, step_s=1.0)
    run.submit(prompt=100, length=20, tenant="idle")
    arrive = keep_in_line(run, 20, busy=200)
    while run.now_s < 3600:
        arrive()
        run.step()
    before = dict(run.tokens)
    assert policy.counter("idle", 1) < 0.01 * policy.counter("busy", 1)
    arrive = keep_in_line(run, 20, busy=200, idle=200)
    for steps in (100, 500):
        for _ in range(steps):
            arrive()
            run.step()
        got = {tenant: run.tokens[tenant] - before[tenant] for tenant in before}
        assert got["idle"] / sum(got.values()) == pytest.approx(0.5, abs=0.1)


def test_tenant_that_comes_back_to_a_batch_without_line_has_no_monopoly(
    simulation: type[Simulation],
) -> None:
    """S10: nobody is in line when it returns; rows of others run on."""
    policy = Fair()
    run = simulation(policy, rows=4)
    run.submit(length=10, tenant="idle")
    run.submit(length=3000, tenant="busy")
    for _ in range(1000):
        run.step()
    run.submit(length=10, tenant="idle")
    run.step()
    assert policy.counter("idle", 1) >= policy.counter("busy", 1)


# -- mean completion ----------------------------------------------------------------------------------------


def heavy_tailed(run: Simulation, *, honest: bool, tenants: int = 1) -> float:
    """Run 300 queries with Pareto lengths at 90 % load; mean completion time is returned.

    `honest` clients ask for what they need; others all ask for the same, and each tenant has lengths of its
    own kind.
    """
    dice = random.Random(7)
    due = [0.0]
    left = [300]

    def arrive() -> bool:
        due[0] += 0.9 * run.rows / 60
        while due[0] >= 1 and left[0]:
            due[0] -= 1
            left[0] -= 1
            tenant = dice.randrange(tenants)
            if tenants > 1:
                length = dice.randint(8, 24) if tenant % 2 == 0 else dice.randint(60, 180)
            else:
                length = min(1500, max(4, int(dice.paretovariate(1.1) * 8)))
            run.submit("batch", length=length, max_tokens=length if honest else 1500, tenant=f"t{tenant}")
        return left[0] > 0

    run.run(30_000, arrive)
    return run.mean_completion_s()


@pytest.mark.parametrize("policy", [Shortest(), Mlfq()], ids=["shortest", "mlfq"])
def test_mean_completion_beats_arrival_order(simulation: type[Simulation], policy: Policy) -> None:
    base = heavy_tailed(simulation(Fcfs(), rows=4), honest=True)
    assert heavy_tailed(simulation(policy, rows=4), honest=True) < 0.8 * base


def test_history_stands_in_for_honest_limits(simulation: type[Simulation]) -> None:
    """All ask for 1500 tokens; what tenants used before tells the short from the long."""
    base = heavy_tailed(simulation(Fcfs(), rows=4), honest=False, tenants=2)
    assert heavy_tailed(simulation(Shortest(), rows=4), honest=False, tenants=2) < 0.9 * base


def test_feedback_alone_helps_where_alike_queries_may_preempt(simulation: type[Simulation]) -> None:
    """FastServe's own rule, with limits that say nothing."""
    base = heavy_tailed(simulation(Fcfs(), rows=4), honest=False)
    classic = simulation(Mlfq(preempt_alike=True), rows=4)
    assert heavy_tailed(classic, honest=False) < 0.9 * base


# -- deadline -----------------------------------------------------------------------------------------------


def met_deadlines(run: Simulation) -> int:
    """Run 200 queries with tight and loose deadlines at 80 % load; gives how many were met."""
    dice = random.Random(11)
    due = [0.0]
    left = [200]

    def arrive() -> bool:
        due[0] += 0.8 * run.rows / 62.5
        while due[0] >= 1 and left[0]:
            due[0] -= 1
            left[0] -= 1
            long = dice.random() < 0.25
            length = 160 if long else 30
            own_s = length * run.step_s
            run.submit("batch", length=length, deadline_s=run.now_s + own_s * (12 if long else 1.5))
        return left[0] > 0

    run.run(20_000, arrive)
    return sum(
        query.finish_s <= query.view.deadline_s + 1e-9 for query in run.ended.values() if query.finish_s
    )


def test_feasible_deadlines_are_met(simulation: type[Simulation]) -> None:
    base = met_deadlines(simulation(Fcfs(), rows=4))
    policy = Deadline(token_s=0.01, prefill_token_s=0.0, margin_s=0.1)
    met = met_deadlines(simulation(policy, rows=4))
    assert met > base
    assert met >= 0.95 * 200
