"""The budget of prompt tokens: it follows the target of the most urgent class that has a row."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batond.daemon.scheduler.chunks import FIRST_TOKENS, LEAST_TOKENS, MOST_TOKENS, ChunkBudget
from batond.policies.classes import DEFAULT_CLASSES

INTERACTIVE, STANDARD, BATCH = DEFAULT_CLASSES


def learned(
    decode_s: float, prompt_s: float, token_s: float, chunk: int = 256, steps: int = 30
) -> ChunkBudget:
    """A budget that has seen steps of those costs."""
    budget = ChunkBudget()
    for _ in range(steps):
        budget.note(decode_s, 0)
        budget.note(decode_s + prompt_s + token_s * chunk, chunk)
    return budget


def test_nothing_bounds_a_prompt_that_nobody_waits_for() -> None:
    assert learned(0.01, 0.0, 1e-3).tokens([]) == MOST_TOKENS


def test_before_anything_was_timed_chunks_are_moderate() -> None:
    assert ChunkBudget().tokens([INTERACTIVE]) == FIRST_TOKENS


def test_the_step_stays_within_the_target_of_the_most_urgent_row() -> None:
    """Interactive 0.1 s a token, standard 0.25: 20 ms of decode leave room for 70 and 205 tokens of 1 ms."""
    budget = learned(0.02, 0.0, 1e-3)
    assert budget.tokens([BATCH, INTERACTIVE, STANDARD]) == pytest.approx(70, abs=1)
    assert budget.tokens([BATCH, STANDARD]) == pytest.approx(205, abs=1)
    assert budget.tokens([BATCH]) == pytest.approx(880, abs=1)


def test_a_target_out_of_reach_still_lets_prompts_through() -> None:
    assert learned(0.5, 0.01, 1e-3).tokens([INTERACTIVE]) == LEAST_TOKENS


def test_what_a_forward_costs_whatever_its_length_is_spread_as_chunks_grow() -> None:
    """Chunks of a learned size end near the room there is, and are never above the target."""
    decode_s, forward_s, token_s = 0.01, 0.02, 1e-4
    budget = ChunkBudget()
    tokens = FIRST_TOKENS
    for _ in range(60):
        step_s = decode_s + forward_s + token_s * tokens
        assert step_s <= INTERACTIVE.tpot_target_s
        budget.note(decode_s, 0)
        budget.note(step_s, tokens)
        tokens = budget.tokens([INTERACTIVE])
    assert tokens == pytest.approx((0.09 - decode_s - forward_s) / token_s, rel=0.05)


def test_a_short_prompt_does_not_tell_what_a_token_costs() -> None:
    budget = learned(0.01, 0.005, 1e-4)
    before = budget.tokens([INTERACTIVE])
    budget.note(0.01 + 0.005 + 1e-4, 1)
    assert budget.tokens([INTERACTIVE]) > 0.8 * before


def test_a_slow_first_step_is_forgotten_although_every_later_one_computes_prompts() -> None:
    """Kernels are built in the first; no decode step is longer than a whole one that had chunks beside it."""
    budget = ChunkBudget()
    budget.note(3.0, 0)
    for _ in range(60):
        tokens = budget.tokens([INTERACTIVE])
        budget.note(0.01 + 1e-4 * tokens, tokens)
    assert budget.tokens([INTERACTIVE]) > 4 * LEAST_TOKENS


def test_of_equal_classes_the_tighter_target_counts() -> None:
    """Two classes may have one order; it does not matter who has the first row."""
    budget = learned(0.02, 0.0, 1e-3)
    equal = replace(STANDARD, name="equal", tpot_target_s=0.1)
    assert budget.tokens([STANDARD, equal]) == budget.tokens([equal, STANDARD]) == budget.tokens([equal])


@given(
    steps=st.lists(st.tuples(st.floats(0, 100), st.integers(0, 5000)), max_size=20),
    running=st.lists(st.sampled_from(DEFAULT_CLASSES), max_size=4),
)
def test_a_budget_is_always_within_its_bounds(steps: list[tuple[float, int]], running: list[object]) -> None:
    """Also after clocks that stood still, and steps that took a minute."""
    budget = ChunkBudget()
    for step_s, tokens in steps:
        budget.note(step_s, tokens)
    assert LEAST_TOKENS <= budget.tokens(running) <= MOST_TOKENS  # type: ignore[arg-type] # classes
