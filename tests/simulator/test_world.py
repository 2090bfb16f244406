"""What must hold of every run: nothing is lost, nothing depends on chance, the order is the policies'."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from batond.daemon.simulator.report import report, ttft_s
from batond.daemon.simulator.setup import Setup
from batond.daemon.simulator.trace import Request
from batond.daemon.simulator.world import saturated_s
from batond.policies.registry import policy_names

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.simulator.costs import StepCosts
    from batond.daemon.simulator.world import Outcome

BUILT_IN = ("deadline", "fair", "fcfs", "mlfq", "priority", "shortest")


def ends(outcome: Outcome) -> list[tuple[float, float, int]]:
    return [(query.first_token_s, query.end_s, query.parks) for query in outcome.queries]


def test_all_built_in_policies_are_simulated() -> None:
    assert set(BUILT_IN) <= set(policy_names())


@pytest.mark.parametrize("daemons", [1, 3])
@pytest.mark.parametrize("policy", BUILT_IN)
def test_every_request_ends_once_with_all_its_tokens(
    simulate: Callable[..., Outcome], mixed: list[Request], policy: str, daemons: int
) -> None:
    outcome = simulate(mixed, policy, daemons=daemons)
    assert [query.request for query in outcome.queries] == mixed
    for query in outcome.queries:
        assert query.output_tokens == query.request.output_tokens
        assert query.request.arrival_s < query.first_token_s <= query.end_s
    emitted = sum(sum(window.output.values()) for window in outcome.windows)
    assert emitted == sum(request.output_tokens for request in mixed)
    served = sum(sum(window.served.values()) for window in outcome.windows)
    recomputed = served - emitted - sum(request.prompt_tokens for request in mixed)
    assert recomputed == 0
    assert sum(one.computed_tokens for one in outcome.usage) == served
    assert sum(query.parks for query in outcome.queries) == sum(one.parks for one in outcome.usage)


def test_the_same_seed_gives_the_same_run(simulate: Callable[..., Outcome], mixed: list[Request]) -> None:
    runs = [ends(simulate(mixed, daemons=3, noise=0.2, seed=seed)) for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_an_idle_fleet_gives_the_time_of_prompt_and_step(
    simulate: Callable[..., Outcome], costs: StepCosts
) -> None:
    requests = [Request(100.0 * number, 50 + number, 10) for number in range(4)]
    for query in simulate(requests).queries:
        tokens = query.request.prompt_tokens
        # Tokens leave the engine at the end of a step, which has already decoded the second one.
        assert ttft_s(query) == pytest.approx(costs.prompts_s(tokens) + costs.decode_s(1, tokens))
        rest = costs.decode_s(1, tokens + 1, 8)
        assert query.end_s - query.first_token_s == pytest.approx(rest)


def test_leaps_take_as_long_as_single_steps(costs: StepCosts) -> None:
    single = sum(costs.decode_s(3, 100 + 3 * step) for step in range(7))
    assert costs.decode_s(3, 100, 7) == pytest.approx(single)


def test_urgent_requests_park_others_under_priority_alone(simulate: Callable[..., Outcome]) -> None:
    slow = [Request(0.0, 20, 400, "b", "batch") for _ in range(4)]
    urgent = [Request(2.0, 20, 10, "a", "interactive")]
    by_policy = {name: simulate([*slow, *urgent], name) for name in ("priority", "fcfs")}
    fast, late = (by_policy[name].queries[-1].end_s - 2.0 for name in ("priority", "fcfs"))
    assert fast < 0.3
    assert late > 10 * fast
    assert sum(query.parks for query in by_policy["priority"].queries) == 1
    assert sum(query.parks for query in by_policy["fcfs"].queries) == 0
    assert by_policy["priority"].usage[0].recomputes == 0


def test_without_host_memory_parked_tokens_are_computed_again(simulate: Callable[..., Outcome]) -> None:
    slow = [Request(0.0, 20, 400, "b", "batch") for _ in range(4)]
    urgent = [Request(2.0, 20, 10, "a", "interactive")]
    outcome = simulate([*slow, *urgent], host_pool_bytes=0)
    needed = sum(request.prompt_tokens + request.output_tokens for request in (*slow, *urgent))
    assert outcome.usage[0].recomputes == 1
    assert outcome.usage[0].computed_tokens > needed
    assert all(query.output_tokens == query.request.output_tokens for query in outcome.queries)


def test_two_daemons_do_twice_the_work(mixed: list[Request], costs: StepCosts) -> None:
    one, two = (saturated_s(Setup(costs=costs, rows=4, daemons=daemons), mixed) for daemons in (1, 2))
    assert one / two == pytest.approx(2, rel=0.05)


def test_what_never_fits_is_refused(simulate: Callable[..., Outcome], costs: StepCosts) -> None:
    tight = replace(costs, kv_bytes=100 * 200)
    requests = [Request(0.0, 150, 40), Request(0.0, 180, 40), Request(0.0, 30, 40), Request(1.0, 200, 1)]
    outcome = simulate(requests, costs=tight)
    assert [query.refused for query in outcome.queries] == [False, True, False, True]
    assert report(outcome).refused == 2
    assert math.isnan(outcome.queries[1].end_s)
    assert not math.isnan(outcome.queries[2].end_s)
