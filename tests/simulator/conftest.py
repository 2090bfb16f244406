"""Small traces, costs that are easy to sum up in the head, and a run of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from batond.daemon.simulator.costs import StepCosts
from batond.daemon.simulator.setup import Setup
from batond.daemon.simulator.trace import Request
from batond.daemon.simulator.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batond.daemon.simulator.world import Outcome

COSTS = StepCosts(
    step_s=0.01,
    row_s=0.001,
    cached_token_s=1e-6,
    prefill_s=0.002,
    prefill_token_s=1e-4,
    park_byte_s=1e-9,
    kv_token_bytes=100,
)


@pytest.fixture
def costs() -> StepCosts:
    """Costs in round numbers."""
    return COSTS


@pytest.fixture
def simulate() -> Callable[..., Outcome]:
    """Run requests: `simulate(requests, policy, **fields of Setup)`."""

    def run(requests: Sequence[Request], policy: str = "priority", **fields: object) -> Outcome:
        values: dict[str, object] = {"costs": COSTS, "rows": 4, "chunk_tokens": 64} | fields
        return World(Setup(**values), policy, requests).run()

    return run


@pytest.fixture
def mixed() -> list[Request]:
    """Urgent and less urgent requests of three tenants, more than four rows can take as they come."""
    return [
        Request(
            arrival_s=number * 0.05,
            prompt_tokens=20 + 37 * number % 150,
            output_tokens=1 + 53 * number % 90,
            tenant=f"t{number % 3}",
            sla_class="interactive" if number % 4 == 0 else "batch",
        )
        for number in range(240)
    ]
