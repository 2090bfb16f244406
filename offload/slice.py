"""A query's KV as opaque bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class KVSlice:
    """The cached tokens of one query, on one device.

    Attributes:
        tokens: uint8, shape [n, record_bytes], contiguous: one record per token, oldest first.
        state: uint8, shape [state_bytes]: what doesn't grow with tokens (recurrent layers); may be empty.
    """

    tokens: torch.Tensor
    state: torch.Tensor

    @property
    def n_tokens(self) -> int:
        """Number of tokens held."""
        return int(self.tokens.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of records and state together."""
        return self.tokens.numel() + self.state.numel()
