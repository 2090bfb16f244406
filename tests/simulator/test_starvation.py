"""Nobody starves: whoever waits under an overload of more urgent work gets its row within the stated bound.

The bounds are those of `docs/policies.md`, "The longest wait": ageing, then what is left to do before it.
Each class has one tenant here: of several, the queue first serves who got fewer tokens, whatever the policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from batond.daemon.simulator.setup import Setup
from batond.daemon.simulator.trace import Request, rebased
from batond.daemon.simulator.world import WINDOW_S, saturated_s
from batond.policies.ageing import worst_first_row_s

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.simulator.costs import StepCosts
    from batond.daemon.simulator.engine import Query
    from batond.daemon.simulator.world import Outcome
    from batond.policies.classes import SlaClass

AGEING_S = 60.0  # The default of all policies that age.
#: Seconds after which nothing that arrives is sorted before a query of a class; so many of it are before it.
PASSED_S: dict[str, Callable[[SlaClass, int], float]] = {
    "fcfs": lambda _, __: 0.0,
    "priority": lambda sla, _: sla.order * AGEING_S,
    "mlfq": lambda sla, _: (sla.order + 1) * AGEING_S,
    "shortest": lambda sla, _: (sla.order + 1) * AGEING_S,
    "fair": lambda sla, before: (before + 1) * (sla.order + 1) * AGEING_S,
    "deadline": lambda sla, _: sla.ttft_target_s,
}
BATCH_AT_S = (10.0, 130.0)
#: The step under way when it came, and its own prompt.
STEPS_S = 0.1


@pytest.fixture(scope="module")
def overload() -> Callable[[StepCosts], list[Request]]:
    """Seven minutes of interactive work, 110 % of what four rows can do, and two batch requests in it."""

    def make(costs: StepCosts) -> list[Request]:
        urgent = [
            Request(float(number), 30 + 7 * number % 40, 60 + 13 * number % 80, "quick", "interactive")
            for number in range(1400)
        ]
        setup = Setup(costs=costs, rows=4, chunk_tokens=64)
        urgent = rebased(urgent, 1.1 * urgent[-1].arrival_s / saturated_s(setup, urgent))
        batch = [Request(at_s, 40, 150, "slow", "batch") for at_s in BATCH_AT_S]
        return sorted([*urgent, *batch], key=lambda request: request.arrival_s)

    return make


def bound_s(outcome: Outcome, query: Query, policy: str) -> float:
    """Longest wait of a query: until it can't be passed any more, and what has come and not ended by then."""
    came_s = query.request.arrival_s
    before = sum(
        other.request.arrival_s <= came_s < other.first_token_s
        for other in outcome.queries
        if other is not query and other.sla is query.sla
    )
    passed_s = PASSED_S[policy](query.sla, before)
    backlog = sum(
        other.request.prompt_tokens + other.request.output_tokens
        for other in outcome.queries
        if other is not query and other.request.arrival_s <= came_s + passed_s < other.end_s
    )
    full = int(outcome.queries[-1].request.arrival_s // WINDOW_S)
    slowest = min(window.served.total() for window in outcome.windows[1:full]) / WINDOW_S
    return worst_first_row_s(1, passed_s, backlog + takers_tokens(outcome, query, passed_s), slowest)


def takers_tokens(outcome: Outcome, query: Query, passed_s: float) -> int:
    """Most tokens of those that may take rows from the queries before one, and so pass it."""
    until_s = query.request.arrival_s + passed_s
    before = [
        other
        for other in outcome.queries
        if other is not query and other.sla.preemptible and other.request.arrival_s <= until_s < other.end_s
    ]
    longest = max(
        other.request.prompt_tokens + other.request.output_tokens
        for other in outcome.queries
        if other.sla.order == 0
    )
    return len(before) * outcome.setup.limits.max_parks * longest


@pytest.mark.parametrize("policy", sorted(PASSED_S))
def test_no_query_waits_longer_than_its_policy_says(
    simulate: Callable[..., Outcome], costs: StepCosts, overload: Callable[..., list[Request]], policy: str
) -> None:
    """S8: through the real planner and policy, beside the queue's order."""
    outcome = simulate(overload(costs), policy)
    assert outcome.queries[-1].request.arrival_s > 400
    assert all(query.served for query in outcome.queries)
    # Every seventh of the urgent ones will do; all of the others.
    for query in outcome.queries:
        if query.sla.order or query.seq % 7 == 0:
            wait_s = query.first_token_s - query.request.arrival_s
            assert wait_s <= bound_s(outcome, query, policy) + STEPS_S
    waits_s = [query.first_token_s - query.request.arrival_s for query in outcome.queries if query.sla.order]
    # The urgent ones do go first, but under `fcfs`; without ageing it would be for seven minutes.
    assert max(waits_s) > (5 if policy == "fcfs" else 50)


@pytest.mark.parametrize("policy", ["mlfq", "priority", "shortest"])
def test_who_takes_rows_from_those_before_is_part_of_the_bound(
    simulate: Callable[..., Outcome], costs: StepCosts, policy: str
) -> None:
    """S8: one row and six batch queries; urgent ones that came later pass the last by parking the others."""
    urgent = [Request(float(number), 30, 100, "quick", "interactive") for number in range(400)]
    capacity_s = saturated_s(Setup(costs=costs, rows=1, chunk_tokens=64), urgent)
    urgent = rebased(urgent, 1.1 * urgent[-1].arrival_s / capacity_s)
    batch = [Request(10 + place / 100, 40, 200, "slow", "batch") for place in range(6)]
    requests = sorted([*urgent, *batch], key=lambda request: request.arrival_s)
    outcome = simulate(requests, policy, rows=1)
    last = max((query for query in outcome.queries if query.sla.order), key=lambda query: query.seq)
    wait_s = last.first_token_s - last.request.arrival_s
    assert wait_s <= bound_s(outcome, last, policy) + STEPS_S
    assert sum(query.parks for query in outcome.queries if query is not last) > 30
