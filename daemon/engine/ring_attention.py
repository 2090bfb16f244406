"""Attention over a ring of columns, plugged into unmodified models.

The model builds its mask as for an end-aligned padded batch (`ring_mask` only rotates it when the window
wraps), and hands keys and values that are views on the ring to `ring_attention`. Scaling, sliding windows (in
the mask, and as a bound on what is read), soft caps, attention sinks and grouped heads are honoured as the
model passes them.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RING_ATTENTION = "batond_ring"
#: Row by row pays when the rows' own columns are less than this part of rows x window.
_RANGED_BELOW = 0.6

_local = threading.local()


class RingWindow:
    """Which columns a step reads: the live window, its place on the ring, and each row's part of it.

    Attributes:
        cursor: Newest column.
        size: Columns handed to the model.
        span: Their range [first, last) on the ring; the whole ring where the live window wraps.
        lengths: Tokens per row, the new one included.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.cursor = 0
        self.size = 1
        self.span = (0, 1)
        self.lengths: list[int] = []

    @property
    def wraps(self) -> bool:
        """Whether the live window runs over the end of the ring."""
        return self.span[1] != self.cursor + 1

    @property
    def ranged(self) -> bool:
        """Whether rows differ so much in length that reading each row's own range pays."""
        return self.wraps or sum(self.lengths) < _RANGED_BELOW * len(self.lengths) * self.size

    def advance(self, cursor: int, lengths: Sequence[int]) -> None:
        """Move to a new newest column; `lengths` counts it already."""
        longest = max(lengths)
        first = cursor + 1 - longest
        self.cursor = cursor
        self.span = (first, cursor + 1) if first >= 0 else (0, self.capacity)
        self.size = self.span[1] - self.span[0]
        self.lengths = list(lengths)

    def padding_mask(self, device: torch.device) -> torch.Tensor:
        """1 where a row has a token, in order of age (newest last); int64, shape [rows, size].

        Idle rows see the newest column: attention over nothing is not defined.
        """
        lengths = torch.tensor(self.lengths, device=device).clamp(min=1)
        age = torch.arange(self.size - 1, -1, -1, device=device)
        return (age[None] < lengths[:, None]).long()

    def pieces(self, row: int, limit: int | None) -> list[tuple[int, int]]:
        """A row's ranges in the columns handed to the model, at most the newest `limit` columns."""
        length = max(self.lengths[row], 1)
        length = length if limit is None else min(length, limit)
        newest = self.cursor - self.span[0]
        start = newest + 1 - length
        if start >= 0:
            return [(start, newest + 1)]
        return [(start + self.capacity, self.capacity), (0, newest + 1)]


@contextlib.contextmanager
def active_window(window: RingWindow) -> Iterator[None]:
    """Tell mask and attention of this thread which window they work on."""
    _local.window = window
    try:
        yield
    finally:
        _local.window = None


def ring_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """The model's mask, rotated from order of age to order on the ring where the window wraps.

    Returns:
        bool, shape [rows, 1, 1, size]; None if every row sees every column.
    """
    mask: torch.Tensor | None = sdpa_mask(*args, **kwargs)
    window: RingWindow = _local.window
    if mask is None or not window.wraps:
        return mask
    return mask.roll(window.cursor + 1, dims=-1)


def ring_attention(  # noqa: PLR0917 - the interface's signature
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one new token per row over the row's own columns.

    Args:
        module: The attention module; only passed on.
        query: Shape [rows, heads, 1, dim].
        key: Shape [rows, kv heads, columns, dim].
        value: Shape [rows, kv heads, columns, value dim].
        attention_mask: From `ring_mask`, or whatever the model made of it.
        scaling: Factor of the scores; None is dim ** -0.5.
        dropout: Ignored: batond never trains.
        **kwargs: `sliding_window`, `softcap`, `s_aux`, `sinks`, `position_bias` as models pass them.

    Returns:
        Shape [rows, 1, heads, value dim], and no weights.
    """
    window: RingWindow = _local.window
    plain = all(kwargs.get(name) is None for name in ("softcap", "s_aux", "sinks", "position_bias"))
    if plain and not window.ranged:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=False
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    limit: int | None = kwargs.get("sliding_window")
    sinks = kwargs.get("s_aux") if kwargs.get("s_aux") is not None else kwargs.get("sinks")
    rows = []
    for row in range(query.shape[0]):
        ranges = window.pieces(row, limit)
        rows.append(
            _attend_row(
                query[row, :, 0],
                [key[row, :, first:last] for first, last in ranges],
                [value[row, :, first:last] for first, last in ranges],
                _row_bias(attention_mask, kwargs.get("position_bias"), row, ranges),
                scale=scale,
                softcap=kwargs.get("softcap"),
                sinks=sinks,
            )
        )
    return torch.stack(rows)[:, None], None


def _attend_row(
    query: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    bias: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One row over one or two ranges of columns; scores are joined, keys and values never are.

    Args:
        query: Shape [heads, dim].
        keys: Each of shape [kv heads, n, dim].
        values: Each of shape [kv heads, n, value dim].
        bias: Added to the scores; float, shape [1 or heads, all n].
        scale: Factor of the scores.
        softcap: Scores are squashed to (-softcap, softcap).
        sinks: Extra score per head that takes weight and gives nothing; shape [heads].

    Returns:
        Shape [heads, value dim].
    """
    heads, dim = query.shape
    kv_heads = keys[0].shape[0]
    grouped = query.view(kv_heads, heads // kv_heads, dim)
    scores = torch.cat([torch.bmm(grouped, part.transpose(1, 2)) for part in keys], dim=-1) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(heads, -1)
    if bias is not None:
        scores = scores + bias
    columns = scores.shape[-1]
    if sinks is not None:
        scores = torch.cat([scores, sinks.reshape(heads, 1).to(scores.dtype)], dim=-1)
    weights = scores.float().softmax(dim=-1).to(query.dtype)[:, :columns].view(kv_heads, -1, columns)
    out, done = None, 0
    for part in values:
        piece = torch.bmm(weights[..., done : done + part.shape[1]], part)
        out = piece if out is None else out + piece
        done += part.shape[1]
    if out is None:
        raise RuntimeError("a row without columns")
    return out.reshape(heads, -1)


def _row_bias(
    mask: torch.Tensor | None, position_bias: torch.Tensor | None, row: int, ranges: list[tuple[int, int]]
) -> torch.Tensor | None:
    """The additive bias of one row's columns: the mask as 0 and minus infinity, and the model's own bias."""
    total = None
    for source in (mask, position_bias):
        if source is None:
            continue
        whole = source[row if source.shape[0] > 1 else 0, :, -1]
        part = torch.cat([whole[:, first:last] for first, last in ranges], dim=-1)
        if part.dtype == torch.bool:
            if bool(part.all()):
                continue
            part = torch.zeros_like(part, dtype=torch.float32).masked_fill(~part, -torch.inf)
        total = part if total is None else total + part
    return total


AttentionInterface.register(RING_ATTENTION, ring_attention)
AttentionMaskInterface.register(RING_ATTENTION, ring_mask)
