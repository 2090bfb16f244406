"""The claim of the engine benchmark, on steps: near-zero idle computation, ideal list scheduling."""

from __future__ import annotations

import pytest
import torch

from batond.bench import models, workloads
from batond.bench.engine import MODES, ideal_steps, run
from batond.bench.faults.counts import full_or
from batond.bench.schedule import list_schedule_steps


@pytest.mark.slow
@pytest.mark.parametrize("rows", full_or((6,), (2, 6)))
def test_decoupled_wastes_nothing_while_queries_wait(rows: int) -> None:
    torch.set_num_threads(1)
    model = models.load("tiny")
    requests = workloads.short(model.vocab_size, queries=16, low=8, high=65)
    results = {mode: run(model, requests, mode, rows) for mode in MODES}
    decoupled, whole = results["decoupled"], results["run_to_completion"]
    assert decoupled.waiting_idle_share < 0.01
    assert decoupled.decode_steps <= 1.02 * ideal_steps(requests, rows)
    assert whole.decode_steps / decoupled.decode_steps > 1.1
    assert whole.waiting_idle_share > 0.05
    assert len({result.output_tokens for result in results.values()}) == 1


def test_list_scheduling_gives_the_row_that_is_free_first() -> None:
    assert list_schedule_steps([5, 1, 1, 1], rows=2) == 5
    assert list_schedule_steps([1, 1, 1, 5], rows=2) == 6
    assert list_schedule_steps([3], rows=4) == 3


def test_workloads_are_the_same_everywhere() -> None:
    first, again = workloads.short(1000), workloads.short(1000)
    assert first == again
    assert len(first) == 30
    assert all(32 <= len(one.prompt_token_ids) <= 260 and 32 <= one.output_tokens <= 260 for one in first)
