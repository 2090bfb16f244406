"""Marks bytes that nobody may read, so that a stale read shows. For tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

POISON: Final = 0xFF  # All ones are NaN in every float format, integer -1, and a token id nobody has.


def fill(tensors: Iterable[torch.Tensor]) -> None:
    """Poison all of them."""
    for tensor in tensors:
        tensor.fill_(POISON)
