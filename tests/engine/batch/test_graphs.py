"""Which steps are captured, and which one is replayed; without a card."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch

from batond.daemon.engine.batch.graphs import (
    CaptureLimits,
    StepGraphs,
    StepOutput,
    capture_steps,
    row_buckets,
)

if TYPE_CHECKING:
    from collections.abc import Callable

AMPLE = CaptureLimits(nbytes=1 << 30)


class Step:
    """Replays by counting."""

    def __init__(self, rows: int) -> None:
        self.output = StepOutput(torch.zeros(rows, 2), torch.zeros(rows, dtype=torch.int64))

    def replay(self) -> None:
        self.output.logits.add_(1)


def ticking(*seconds: float) -> Callable[[], float]:
    moments = itertools.accumulate(seconds)
    return lambda: next(moments)


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (24, (1, 2, 4, 8, 16, 24)),
        (64, (1, 2, 4, 8, 16, 24, 32, 48, 64)),
        (100, (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100)),
    ],
)
def test_buckets_are_few_and_the_last_holds_all_rows(rows: int, sizes: tuple[int, ...]) -> None:
    assert row_buckets(rows) == sizes


@pytest.mark.parametrize("rows", range(1, 130))
def test_every_row_has_a_bucket_less_than_twice_as_large(rows: int) -> None:
    sizes = row_buckets(rows)
    assert sizes[-1] == rows
    for needed in range(1, rows + 1):
        assert next(size for size in sizes if size >= needed) < 2 * needed


def test_the_smallest_step_that_holds_the_rows_is_replayed() -> None:
    graphs = capture_steps([1, 2, 4], Step, AMPLE, free_bytes=lambda: 0)
    assert graphs.sizes == [1, 2, 4]
    for needed, rows in ((1, 1), (2, 2), (3, 4), (4, 4)):
        output = graphs.run(needed)
        assert output is not None
        assert output.logits.shape[0] == rows
    assert graphs.run(3)[0][0, 0] == 3.0  # type: ignore[index]
    assert graphs.run(5) is None
    assert StepGraphs().run(1) is None


def test_the_largest_is_captured_first_and_time_ends_the_list() -> None:
    clock = ticking(0.0, 30.0, 0.0, 25.0, 0.0)
    graphs = capture_steps([1, 2, 4], Step, AMPLE, free_bytes=lambda: 0, clock=clock)
    assert graphs.sizes == [2, 4]
    assert "longer than 60 s" in graphs.why_no_more
    assert graphs.run(1) is not None


def test_memory_ends_the_list() -> None:
    free = iter([100, 70, 30, 20])
    graphs = capture_steps([1, 2, 4], Step, CaptureLimits(nbytes=50), free_bytes=lambda: next(free))
    assert graphs.sizes == [2, 4]
    assert graphs.nbytes == 70
    assert "70 bytes" in graphs.why_no_more


@pytest.mark.parametrize("fails_at", [4, 2])
def test_a_failed_capture_leaves_what_was_captured_before(fails_at: int) -> None:
    def capture(rows: int) -> Step:
        if rows == fails_at:
            raise RuntimeError("the step waits\nmore words")
        return Step(rows)

    graphs = capture_steps([1, 2, 4], capture, AMPLE, free_bytes=lambda: 0)
    assert graphs.sizes == ([4] if fails_at == 2 else [])
    assert graphs.why_no_more == "RuntimeError: the step waits"


def test_a_capture_may_fail_without_a_word() -> None:
    """As `assert` and `NotImplementedError` do: steps are taken one by one, and the engine starts."""

    def capture(rows: int) -> Step:
        raise NotImplementedError

    graphs = capture_steps([1, 2], capture, AMPLE, free_bytes=lambda: 0)
    assert (graphs.sizes, graphs.why_no_more) == ([], "NotImplementedError: ")
