"""What outputs are expected to be, and how a reserve follows them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batond.bench.faults.counts import full_or
from batond.daemon.scheduler.expected import (
    LEAST_OUTPUTS,
    QUANTILE,
    STEP_TOKENS,
    WINDOW_OUTPUTS,
    ExpectedOutput,
    raised,
)
from batond.policies.fcfs import Fcfs
from batond.policies.priority import Priority

if TYPE_CHECKING:
    from .conftest import FakeEngine


def test_everything_is_reserved_until_enough_is_known() -> None:
    expected = ExpectedOutput()
    for _ in range(LEAST_OUTPUTS - 1):
        expected.note("batch", 10)
    assert expected.tokens("batch", 500) == 500
    expected.note("batch", 10)
    assert expected.tokens("batch", 500) == 10
    assert expected.tokens("interactive", 500) == 500


def test_never_more_than_may_be_emitted() -> None:
    expected = ExpectedOutput()
    for _ in range(LEAST_OUTPUTS):
        expected.note("batch", 400)
    assert expected.tokens("batch", 30) == 30


@settings(max_examples=full_or(50, 1000), deadline=None)
@given(lengths=st.lists(st.integers(1, 50), min_size=LEAST_OUTPUTS, max_size=3 * WINDOW_OUTPUTS))
def test_expectation_is_the_quantile_of_the_latest(lengths: list[int]) -> None:
    expected = ExpectedOutput()
    for length in lengths:
        expected.note("batch", length)
    latest = lengths[-WINDOW_OUTPUTS:]
    tokens = expected.tokens("batch", 1000)
    assert sum(length <= tokens for length in latest) >= QUANTILE * len(latest)
    assert sum(length < tokens for length in latest) < QUANTILE * len(latest)


def test_what_a_class_does_may_change() -> None:
    expected = ExpectedOutput()
    for length in [900] * WINDOW_OUTPUTS + [20] * WINDOW_OUTPUTS:
        expected.note("batch", length)
    assert expected.tokens("batch", 1000) == 20


@pytest.mark.parametrize("reserved", [1, 10, 100, 1000])
def test_a_reserve_is_raised_in_few_steps(reserved: int) -> None:
    """Ten times what was expected takes a handful of raises, each for a good while."""
    raises, now = 0, reserved
    for output in range(1, 10 * reserved + 1):
        larger = raised(now, output, 10_000)
        assert larger >= output
        if larger > now:
            assert output == now + 1
            assert larger - now >= min(STEP_TOKENS, 10_000 - now)
            raises, now = raises + 1, larger
    assert raises <= 7
    assert raised(990, 991, 1000) == 1000


def test_kept_as_it_is_until_it_is_outgrown() -> None:
    assert raised(50, 50, 100) == 50
    assert raised(50, 51, 100) == 50 + STEP_TOKENS
    assert raised(10, 300, 1000) >= 300


@pytest.mark.parametrize("policy", [Fcfs(), Priority(ageing_s=1.0)], ids=lambda policy: policy.name)
@pytest.mark.parametrize("factor", [1, 2, 6])
def test_outputs_beyond_the_expectation_do_not_thrash(
    fake_engine: type[FakeEngine], policy: Fcfs | Priority, factor: int
) -> None:
    """M8, S2: twice and six times as long as expected, for good: few parks a query, every token once.

    The fake engine holds each step to the budget. Strict reserves would let one run at a time.
    """
    dice = random.Random(factor)
    engine = fake_engine(policy, rows=12, kv_bytes=480, expects=20, chunk_tokens=64, step_s=0.05)
    for number in range(60):
        output = dice.randint(1, 20) if factor == 1 else dice.randint(15 * factor, 20 * factor)
        engine.submit(("standard", "batch")[number % 2], dice.randint(1, 30), 240, output_tokens=output)
    engine.run(most_steps=3000)
    parks = [query.limit_parks for query in engine.finished.values()]
    assert all(query.view.output_tokens == query.output_tokens for query in engine.finished.values())
    assert (sum(parks) == 0) == (factor == 1)
    assert sum(parks) <= 1.5 * len(parks)
    assert max(parks) <= 6


def test_expected_reserves_let_more_run_than_strict_ones(fake_engine: type[FakeEngine]) -> None:
    """M8: the same work in fewer steps, for all that is parked."""
    steps = {}
    for expects in (None, 40):
        dice = random.Random(1)
        engine = fake_engine(Fcfs(), rows=12, kv_bytes=900, expects=expects, chunk_tokens=64)
        for _ in range(60):
            engine.submit("standard", dice.randint(1, 20), 250, output_tokens=dice.randint(10, 80))
        engine.run(most_steps=5000)
        steps[expects] = engine.steps
    assert steps[40] < 0.6 * steps[None]
