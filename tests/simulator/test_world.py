"""What must hold of every run: nothing is lost, nothing depends on chance, the order is the policies'."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from batond.daemon.errors import ConfigError
from batond.daemon.queue.limits import TenantLimits
from batond.daemon.simulator.report import report, tpot_s, ttft_s
from batond.daemon.simulator.setup import Setup
from batond.daemon.simulator.trace import Request
from batond.daemon.simulator.world import saturated_s
from batond.policies.base import Phase
from batond.policies.classes import SlaClasses
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


def test_longest_queue_time_counts_until_the_first_row(simulate: Callable[..., Outcome]) -> None:
    """As in the daemon, whether a request waits in the queue or has been claimed."""
    classes = SlaClasses(replace(sla, longest_queue_s=2.0) for sla in SlaClasses())
    requests = [Request(0.0, 20, 400, sla_class="batch") for _ in range(12)]
    outcome = simulate(requests, "fcfs", classes=classes)
    late = [query for query in outcome.queries if query.late]
    assert [query.late for query in outcome.queries] == [False] * 4 + [True] * 8
    assert {query.phase for query in late} == {Phase.WAITING, Phase.READY}
    assert all(2.0 <= query.end_s < 3.1 for query in late)
    assert all(query.output_tokens == 400 for query in outcome.queries if not query.late)
    assert all(query.end_s > 3.0 for query in outcome.queries[:4])
    (group,) = report(outcome).groups
    assert (group.requests, group.late, report(outcome).late) == (4, 8, 8)
    assert group.met == pytest.approx(4 / 12)
    assert group.starved_s >= 2.0


def test_a_time_limit_ends_whoever_has_a_row_too(simulate: Callable[..., Outcome]) -> None:
    requests = [Request(0.0, 20, 4000, time_limit_s=3.0), Request(0.0, 20, 40, time_limit_s=3.0)]
    requests += [Request(0.0, 20, 500)] * 4
    outcome = simulate(requests, "priority")
    first, second, *others = outcome.queries
    assert first.late
    assert 0 < first.output_tokens < 4000
    assert 3.0 <= first.end_s < 3.1
    assert second.served
    assert all(query.served for query in others)
    assert others[-1].first_token_s > second.end_s  # Its row went to the next.


def test_who_is_late_while_parked_leaves_the_host_pool(
    simulate: Callable[..., Outcome], costs: StepCosts
) -> None:
    slow = [Request(0.0, 20, 400, "b", "batch", 3.0) for _ in range(4)]
    urgent = [Request(2.0, 20, 400, "a", "interactive") for _ in range(4)]
    again = [Request(10.0, 20, 400, "b", "batch") for _ in range(4)]
    more = [Request(12.0, 20, 40, "a", "interactive") for _ in range(4)]
    room = 4 * 400 * costs.kv_token_bytes
    outcome = simulate([*slow, *urgent, *again, *more], host_pool_bytes=room)
    assert [query.late for query in outcome.queries] == [True] * 4 + [False] * 12
    assert outcome.usage[0].parks == 8
    assert outcome.usage[0].recomputes == 0


def test_quotas_bound_what_runs_and_what_waits(simulate: Callable[..., Outcome]) -> None:
    requests = [Request(0.0, 20, 100, "a") for _ in range(8)] + [Request(0.0, 20, 100, "b")]
    tight = {"a": TenantLimits(running=1, queued=5)}
    outcome = simulate(requests, tenants=tight, daemons=2)
    *mine, other = outcome.queries
    assert [query.refused for query in mine] == [False] * 5 + [True] * 3
    assert report(outcome).refused == 3
    # One after the other, the next at once when the one before ends.
    served = mine[:5]
    for before, after in itertools.pairwise(served):
        assert before.end_s < after.first_token_s < before.end_s + 0.5
    assert other.end_s < served[1].end_s


def test_a_minutes_tokens_are_spread_over_minutes(simulate: Callable[..., Outcome]) -> None:
    requests = [Request(0.0, 100, 100, "a") for _ in range(6)]
    free, tight = (
        simulate(requests, tenants={"a": TenantLimits(tokens_per_minute=most)}, rows=1) for most in (0, 300)
    )
    assert free.end_s < 60
    # 200 tokens each: two fit into a minute, for which one more may be begun while tokens are left.
    assert 90 < tight.end_s < 240
    assert all(query.served for query in tight.queries)


def test_a_full_queue_refuses(simulate: Callable[..., Outcome]) -> None:
    requests = [Request(0.0, 20, 100, f"t{number}") for number in range(10)]
    outcome = simulate(requests, max_queued=7)
    assert [query.refused for query in outcome.queries] == [False] * 7 + [True] * 3


def test_auto_chunks_leave_a_running_request_its_pace(simulate: Callable[..., Outcome]) -> None:
    """Long prompts beside an urgent output: auto keeps to its target, a large number of tokens does not."""
    urgent = Request(0.0, 10, 60, "a", "interactive")
    prompts = [Request(0.2, 3000, 1, "b", "batch") for _ in range(50)]
    auto, large = (simulate([urgent, *prompts], chunk_tokens=tokens) for tokens in ("auto", 20_000))
    target_s = auto.queries[0].sla.tpot_target_s
    assert 0.5 * target_s < tpot_s(auto.queries[0]) <= target_s < tpot_s(large.queries[0])
    assert all(query.served for query in auto.queries)


@pytest.mark.parametrize("tokens", [0, -1])
def test_chunks_of_no_tokens_are_refused(costs: StepCosts, tokens: int) -> None:
    with pytest.raises(ConfigError, match="chunk_tokens"):
        Setup(costs=costs, chunk_tokens=tokens)
