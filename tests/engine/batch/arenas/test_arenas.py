"""What a ring may rely on, whatever its arena is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

ROWS, CAPACITY, RECORD = 3, 100, 384


def fill(arena: Any, row: int, first: int, last: int, value: int) -> None:
    arena.tensor[row, first:last] = value


def test_records_lie_as_the_kernels_expect(arena: Any) -> None:
    assert arena.tensor.shape == (ROWS, CAPACITY, RECORD)
    assert arena.tensor.dtype == torch.uint8
    assert arena.tensor.stride()[1:] == (RECORD, 1)
    assert arena.tensor.stride(0) >= CAPACITY * RECORD
    assert arena.tensor.stride(0) % 16 == 0


def test_what_is_committed_keeps_what_is_written(arena: Any) -> None:
    """R4: whatever other rows do meanwhile."""
    arena.commit(1, 20, 70)
    fill(arena, 1, 20, 70, 7)
    for row in (0, 2):
        arena.commit(row, 0, CAPACITY)
        fill(arena, row, 0, CAPACITY, 3)
        arena.release(row, [(0, CAPACITY)])
        arena.trim()
    arena.commit(1, 70, 90)
    assert bool((arena.tensor[1, 20:70] == 7).all())


def test_a_commit_tells_how_far_it_reaches(arena: Any) -> None:
    for first, last in [(0, 1), (3, 4), (10, 31), (95, 96), (99, 100), (0, 100)]:
        behind = arena.commit(0, first, last)
        assert 0 <= behind <= CAPACITY - last
        assert arena.holds(0, first, last + behind)
        fill(arena, 0, first, last + behind, 5)
        arena.release(0, [(first, last + behind)])


def test_what_was_released_and_may_be_read_behind_a_mask_is_zero(arena: Any) -> None:
    if arena.tensor.device.type == "cuda" or type(arena).__name__ == "CardArena":
        pytest.skip("nothing reads it")
    arena.commit(1, 5, 80)
    fill(arena, 1, 5, 80, 0xFF)
    arena.release(1, [(5, 80)])
    assert not arena.tensor.any()


def test_memory_follows_the_rows(arena: Any) -> None:
    """M5: what a freed row held is nobody's, and can be had by the system."""
    use = arena.use
    if not use.elastic:
        assert use.committed_bytes == use.reserved_bytes == ROWS * CAPACITY * RECORD
        pytest.skip("a plain arena holds all of it from the start")
    assert use.committed_bytes == 0
    arena.commit(0, 40, 60)
    one = arena.use.committed_bytes
    assert 20 * RECORD <= one <= arena.use.reserved_bytes
    assert one == arena.row_bytes(0)
    arena.commit(0, 40, 60)
    arena.expect(0, 61)
    arena.commit(2, 0, 60)
    assert arena.use.committed_bytes == one + arena.row_bytes(2)
    arena.release(0, [(40, 60)])
    assert arena.row_bytes(0) == 0
    assert not arena.holds(0, 40, 41)
    arena.release(2, [(0, 60)])
    assert arena.use.committed_bytes == 0
    pooled = arena.use.pooled_bytes
    assert arena.trim() == pooled
    assert arena.use.pooled_bytes == 0


def test_a_row_that_holds_nothing_can_be_released(arena: Any) -> None:
    arena.release(2, [])
    arena.release(2, [])
    arena.commit(2, 0, 1)
