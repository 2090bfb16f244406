"""Step times of a running daemon, for the simulator: measured on an idle one through gRPC, fitted.

What is measured is what a trace will meet: the engine's steps with all that the front, Redis and the clients
take beside them on the same machine.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from batond.clients import Chunk
from batond.daemon.errors import StateError
from batond.daemon.simulator.costs import PRESETS, StepCosts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from batond.clients import AsyncClient

DECODED_TOKENS = 24  # Of each job whose steps are timed.
SHORT_TOKENS = 8  # A short prompt.
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Fit:
    """What was measured.

    Attributes:
        costs: For the simulator.
        overhead_s: From a client's call to the engine and back, without any step; not in `costs`.
        error: Mean of |fitted - measured| / measured over the measured steps and prompts.
    """

    costs: StepCosts
    overhead_s: float
    error: float


class Prober:
    """Sends jobs of given lengths and times their tokens.

    Args:
        client: Of some tenant.
        vocab_size: Prompts are random ids below it.
        dice: For the prompts.
    """

    def __init__(self, client: AsyncClient, vocab_size: int, dice: Random) -> None:
        self._client, self._vocab_size, self._dice = client, vocab_size, dice

    async def times_s(self, prompt_tokens: int, output_tokens: int) -> list[float]:
        """When each token of one job came, from its submission on."""
        prompt = [self._dice.randrange(self._vocab_size) for _ in range(prompt_tokens)]
        began_s, came_s = time.perf_counter(), []
        stream = self._client.generate(
            token_ids=prompt, max_tokens=output_tokens, ignore_eos=True, sla_class="batch"
        )
        async with stream:
            async for event in stream:
                if isinstance(event, Chunk):
                    came_s += [time.perf_counter() - began_s] * len(event.token_ids)
        return came_s

    async def decode_s(self, rows: int, prompt_tokens: int) -> float:
        """Median time of a step while so many rows decode."""
        jobs = await asyncio.gather(*(self.times_s(prompt_tokens, DECODED_TOKENS * 2) for _ in range(rows)))
        # All begin and end nearly together; the middle of each has all rows.
        middle = slice(DECODED_TOKENS // 2, DECODED_TOKENS * 3 // 2)
        return statistics.median(
            after - before for came_s in jobs for before, after in itertools.pairwise(came_s[middle])
        )

    async def idle_s(self, prompt_tokens: int) -> float:
        """From submission to the first token on an idle daemon; the job has no second one."""
        return statistics.median([(await self.times_s(prompt_tokens, 1))[0] for _ in range(ROUNDS)])

    async def prompts_s(self, prompt_tokens: int, jobs: int) -> float:
        """Time of a step that computes prompts alone, a full chunk: so many jobs at once, a token each."""
        came_s = await asyncio.gather(*(self.times_s(prompt_tokens, 1) for _ in range(jobs)))
        ends = sorted(times[0] for times in came_s)
        return (ends[-1] - ends[0]) / (jobs - 1)


def measurements(rows: int) -> int:
    """How many times `measure` tells that it got on."""
    return 2 * len(_row_counts(rows)) + 2


async def measure(
    prober: Prober,
    *,
    rows: int,
    chunk_tokens: int,
    longest_tokens: int,
    kv_token_bytes: int,
    on_done: Callable[[], None] = lambda: None,
) -> Fit:
    """Measure an idle daemon; about half a minute on a laptop with a small model.

    Args:
        prober: Sends the jobs.
        rows: Of the batch.
        chunk_tokens: Of the engine.
        longest_tokens: Longest prompt of the trace.
        kv_token_bytes: As the daemon says.
        on_done: Told after each of `measurements(rows)`.
    """
    await prober.times_s(SHORT_TOKENS, DECODED_TOKENS)  # Warms up.
    decoded: list[tuple[int, int, float]] = []
    for count in _row_counts(rows):
        for length in (SHORT_TOKENS, longest_tokens):
            cached = count * (length + DECODED_TOKENS)
            decoded.append((count, cached, await prober.decode_s(count, length)))
            on_done()
    lengths = sorted({1 + part * (chunk_tokens - 1) // 3 for part in range(4)})
    alone = [(length, await prober.idle_s(length)) for length in lengths]
    on_done()
    full_s = await prober.prompts_s(chunk_tokens, jobs=12)
    on_done()
    return fit(decoded, alone, (chunk_tokens, full_s), kv_token_bytes)


def _row_counts(rows: int) -> list[int]:
    return sorted({1, max(1, rows // 2), rows})


def fit(
    decoded: Sequence[tuple[int, int, float]],
    alone: Sequence[tuple[int, float]],
    full: tuple[int, float],
    kv_token_bytes: int,
) -> Fit:
    """Fit straight lines; a part that comes out negative is 0.

    Args:
        decoded: Rows, cached tokens and seconds of a decode step.
        alone: Prompt tokens and seconds from submission to the only token, of prompts within a chunk.
        full: Prompt tokens and seconds of a step that computes prompts alone.
        kv_token_bytes: KV of a token.

    Raises:
        StateError: The times make no sense; the machine was too busy with something else.
    """
    steps = [[1.0, float(rows), float(cached)] for rows, cached, _ in decoded]
    taken = [seconds for *_, seconds in decoded]
    step_s, row_s, cached_token_s = _least_squares(steps, taken)
    prompts = [[1.0, float(tokens)] for tokens, _ in alone]
    intercept_s, prefill_token_s = _least_squares(prompts, [seconds for _, seconds in alone])
    tokens, seconds = full
    if prefill_token_s == 0:
        prefill_token_s = seconds / tokens
    if step_s <= 0 or seconds <= 0:
        raise StateError("steps take no time, or less the more is in them: measure again on a quiet machine")
    prefill_s = max(0.0, seconds - prefill_token_s * tokens)
    costs = StepCosts(
        step_s=step_s,
        row_s=row_s,
        cached_token_s=cached_token_s,
        prefill_s=prefill_s,
        prefill_token_s=prefill_token_s,
        park_byte_s=PRESETS["cpu"].park_byte_s,
        kv_token_bytes=kv_token_bytes,
    )
    errors = [abs(costs.decode_s(rows, cached) - took_s) / took_s for rows, cached, took_s in decoded]
    errors.append(abs(costs.prompts_s(tokens) - seconds) / seconds)
    return Fit(costs, max(0.0, intercept_s - prefill_s), statistics.mean(errors))


def _least_squares(terms: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Coefficients by relative error; terms that come out negative are 0, and the rest is fitted again."""
    weights = 1 / np.asarray(values)
    matrix = np.asarray(terms) * weights[:, None]
    kept = list(range(matrix.shape[1]))
    while kept:
        found = np.linalg.lstsq(matrix[:, kept], np.ones(len(values)), rcond=None)[0]
        if (found >= 0).all():
            break
        del kept[int(found.argmin())]
    else:
        found = np.empty(0)
    given = dict(zip(kept, found.tolist(), strict=True))
    return [given.get(place, 0.0) for place in range(matrix.shape[1])]
