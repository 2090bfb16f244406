"""Step times: measured through jobs, fitted by straight lines."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Self

import pytest

from batond.bench.traces.step_costs import DECODED_TOKENS, Prober, fit, measure, measurements
from batond.clients import Chunk
from batond.daemon.errors import StateError
from batond.daemon.simulator.costs import StepCosts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

COSTS = StepCosts(
    step_s=0.02,
    row_s=0.003,
    cached_token_s=2e-6,
    prefill_s=0.01,
    prefill_token_s=1e-4,
    park_byte_s=3e-10,
    kv_token_bytes=4096,
)


def decode_steps(costs: StepCosts) -> list[tuple[int, int, float]]:
    return [
        (rows, rows * length, costs.decode_s(rows, rows * length))
        for rows in (1, 2, 4)
        for length in (30, 300)
    ]


def test_costs_that_made_the_times_are_found_again() -> None:
    alone = [(tokens, 0.005 + COSTS.prompts_s(tokens)) for tokens in (1, 40, 80, 128)]
    found = fit(decode_steps(COSTS), alone, (128, COSTS.prompts_s(128)), 4096)
    for name in ("step_s", "row_s", "cached_token_s", "prefill_s", "prefill_token_s"):
        assert getattr(found.costs, name) == pytest.approx(getattr(COSTS, name))
    assert found.overhead_s == pytest.approx(0.005)
    assert found.error == pytest.approx(0, abs=1e-6)


def test_noise_makes_no_negative_costs_and_nonsense_is_refused() -> None:
    faster_with_more = [(1, 30, 0.020), (1, 300, 0.021), (4, 120, 0.019), (4, 1200, 0.018)]
    found = fit(faster_with_more, [(1, 0.01), (100, 0.02)], (100, 0.012), 4096)
    assert found.costs.row_s == 0.0
    assert 0.018 <= found.costs.step_s <= 0.021
    with pytest.raises(StateError, match="quiet machine"):
        fit([(1, 30, 0.02), (2, 60, 0.04)], [(1, 0.01), (100, 0.02)], (100, 0.0), 4096)


class Clock:
    """Times of jobs as `COSTS` gives them, without any waiting: a prober that only adds up."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []

    async def times_s(self, prompt_tokens: int, output_tokens: int) -> list[float]:
        return [COSTS.prompts_s(prompt_tokens) + number * COSTS.step_s for number in range(output_tokens)]

    async def decode_s(self, rows: int, prompt_tokens: int) -> float:
        self.steps.append((rows, prompt_tokens))
        return COSTS.decode_s(rows, rows * (prompt_tokens + DECODED_TOKENS))

    async def idle_s(self, prompt_tokens: int) -> float:
        return 0.005 + COSTS.prompts_s(prompt_tokens)

    async def prompts_s(self, prompt_tokens: int, jobs: int) -> float:
        assert jobs > 1
        return COSTS.prompts_s(prompt_tokens)


async def test_a_measurement_takes_rows_and_lengths_that_tell_the_parts_apart() -> None:
    clock, told = Clock(), []
    found = await measure(
        clock,  # type: ignore[arg-type] # a prober in all that is asked of it
        rows=4,
        chunk_tokens=64,
        longest_tokens=500,
        kv_token_bytes=4096,
        on_done=lambda: told.append(1),
    )
    assert len(told) == measurements(4)
    assert {rows for rows, _ in clock.steps} == {1, 2, 4}
    assert found.costs.row_s == pytest.approx(COSTS.row_s)
    assert found.costs.cached_token_s == pytest.approx(COSTS.cached_token_s)
    assert found.overhead_s == pytest.approx(0.005)


class Stream:
    """A job's stream that brings its tokens at once."""

    def __init__(self, tokens: int) -> None:
        self._left = list(range(tokens))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._left.clear()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._chunks()

    async def _chunks(self) -> AsyncIterator[Chunk]:
        while self._left:
            yield Chunk(self._left.pop(0), (7, 8), "")


async def test_a_prober_asks_for_what_it_times() -> None:
    asked: list[dict[str, object]] = []

    class Client:
        def generate(self, **options: object) -> Stream:
            asked.append(options)
            return Stream(3)

    prober = Prober(Client(), 50, random.Random(1))  # type: ignore[arg-type]
    assert len(await prober.times_s(9, 6)) == 6
    assert asked[0]["max_tokens"] == 6
    assert asked[0]["ignore_eos"] is True
    prompt = asked[0]["token_ids"]
    assert isinstance(prompt, list)
    assert len(prompt) == 9
    assert max(prompt) < 50
