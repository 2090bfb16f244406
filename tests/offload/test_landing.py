"""Slices land in blocks of few sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from hypothesis import given
from hypothesis import strategies as st

from batond.offload.landing import block_bytes, empty_records

if TYPE_CHECKING:
    import pytest


@given(nbytes=st.integers(1, 1 << 40))
def test_a_block_holds_its_bytes_and_hardly_more(nbytes: int) -> None:
    size = block_bytes(nbytes)
    assert nbytes <= size < nbytes * 9 / 8
    assert block_bytes(size) == size


def test_a_growing_row_finds_few_sizes() -> None:
    """Parked after each of 512 tokens more, 512 KiB each."""
    sizes = {block_bytes(tokens << 19) for tokens in range(1024, 1537)}
    assert len(sizes) == 5


def test_records_are_contiguous_whatever_the_block() -> None:
    records = empty_records(7, 48, "cpu")
    assert records.shape == (7, 48)
    assert records.is_contiguous()
    assert records.dtype == torch.uint8


def test_where_the_block_does_not_fit_the_bytes_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """M6: short memory is no time for round sizes."""
    real, asked = torch.empty, []

    def empty(size: int, **_: object) -> torch.Tensor:
        asked.append(size)
        if len(asked) == 1:
            raise torch.OutOfMemoryError("no room")
        return real(size, dtype=torch.uint8)

    monkeypatch.setattr(torch, "empty", empty)
    records = empty_records(1025, 4096, "cuda")
    assert records.shape == (1025, 4096)
    assert asked == [block_bytes(1025 * 4096), 1025 * 4096]
