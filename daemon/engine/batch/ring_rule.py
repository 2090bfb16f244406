"""What the card's kernels are told of a layer: where keys and values are, and how scores are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Ring:
    """One layer's keys and values, and which of them the rows own.

    Attributes:
        key: Shape [rows, capacity, kv heads, dim]; any strides, but the last is 1.
        value: Shape [rows, capacity, kv heads, value dim].
        lengths: Tokens by row, the new one included, 0 where idle; int32, shape [rows].
        cursor: The newest column, where every range ends; int32, shape [1].
        most_tokens: The most a row may ever own: how the work is cut follows from it, not from who is there.
    """

    key: torch.Tensor
    value: torch.Tensor
    lengths: torch.Tensor
    cursor: torch.Tensor
    most_tokens: int

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements between rows, columns and heads, of keys, then of values."""
        return (*self.key.stride()[:3], *self.value.stride()[:3])


@dataclass(frozen=True, slots=True)
class Rule:
    """How scores are made of products.

    Attributes:
        scale: Factor of the products.
        softcap: Scores are squashed to (-softcap, softcap); None leaves them.
        sinks: An extra score per head that takes weight and gives nothing; shape [heads].
        window: Most columns that a row sees; None is all of its own.
    """

    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Fresh:
    """A layer's keys and values of a chunk, and where records are.

    Attributes:
        key: As computed, shape [kv heads, tokens, dim]; any strides, but the last is 1.
        value: The same, shape [kv heads, tokens, value dim].
        key_anchor: The layer's keys in the anchor, a record from which distances count: [kv heads, dim].
        value_anchor: Its values there, [kv heads, value dim].
        record_bytes: Between a prompt's columns.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_anchor: torch.Tensor
    value_anchor: torch.Tensor
    record_bytes: int
