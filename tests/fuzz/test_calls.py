"""Malformed calls leave the daemon serving, with nothing in its log that it did not expect."""

from __future__ import annotations

from importlib import util
from typing import TYPE_CHECKING

import pytest

from batond.bench.fuzz_calls import fuzz

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Fuzzed, Plan

#: After 100,000 calls: 57 MiB with Python's own rule for its garbage collector, 105 with the front's calmer
#: one, 161 on a busy machine. Cycles of calls wait for its next look; gRPC's memory is never in one piece.
MOST_GROWTH_BYTES = 250 << 20
pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(3600)]


async def test_malformed_calls_leave_the_daemon_serving(
    fuzzed: Fuzzed, plan: Plan, say: Callable[..., None]
) -> None:
    """Q1, C5: every call gets a proper status, others' jobs are right meanwhile, nothing is left behind."""
    await fuzzed.good_job()
    if util.find_spec("xgrammar"):
        await fuzzed.good_job(1, json_schema="true")  # Loads what is loaded on first use.
    before_bytes = fuzzed.rss_bytes
    numbers = plan.numbers(1500, 100_000)
    tally = await fuzz(fuzzed.target, fuzzed.tokens, plan.seed, numbers, between=fuzzed.good_job)
    say(f"seed {plan.seed}: {tally.calls} calls", *tally.lines())
    faults = [*tally.faults, *fuzzed.faults_in_log()]
    assert not faults, "\n".join(faults[:20])
    assert tally.calls == len(numbers)
    await fuzzed.good_job(len(numbers))
    fuzzed.wait_for_metric("batond_open_streams", 0)
    growth_bytes = fuzzed.rss_bytes - before_bytes
    say(f"the front grew by {growth_bytes >> 20} MiB")
    assert growth_bytes < MOST_GROWTH_BYTES
