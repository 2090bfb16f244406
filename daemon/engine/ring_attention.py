"""Attention over a ring of columns, plugged into unmodified models.

The model builds its mask as for an end-aligned padded batch (`ring_mask` only rotates it when the window
wraps), and hands keys and values that are views on the ring to `ring_attention`. Scaling, sliding windows (in
the mask, and as a bound on what is read), soft caps, attention sinks and grouped heads are honoured as the
model passes them.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RING_ATTENTION = "batond_ring"
#: What one more attention call costs, in columns of one row read (CPU; measured with 3 heads of 64).
_CALL_COLUMNS = 256

_local = threading.local()


def ranges_up_to(newest: int, length: int, capacity: int) -> tuple[tuple[int, int], ...]:
    """Ranges [first, last) of the `length` columns that end at `newest`, oldest first; two if they wrap."""
    start = newest + 1 - length
    if start >= 0:
        return ((start, newest + 1),)
    return ((start + capacity, capacity), (0, newest + 1))


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring rows that are read together.

    Attributes:
        rows: Range [first, last) of rows.
        ranges: Column ranges [first, last) of the longest of them, in the columns handed to the model, oldest
            first: one, or two for a single row that wraps.
        seen: Which of those columns each row owns; bool, shape [rows, 1, 1, columns]. None: all.
    """

    rows: tuple[int, int]
    ranges: tuple[tuple[int, int], ...]
    seen: torch.Tensor | None


class RingWindow:
    """Which columns a step reads: the live window, its place on the ring, and each row's part of it.

    Where the live window wraps, the model gets the whole ring as it lies, which costs nothing because
    attention reads the rows' ranges alone. A model that computes keys from what the cache keeps (MLA expands
    latents) would do so for the whole ring; it gets the live columns in order of age instead (`in_order`).

    Args:
        storage: The ring's records, shape [rows, capacity, record].

    Attributes:
        in_order: Whether a wrapped window is copied together; set by the first attention over computed keys.
        cursor: Newest column.
        size: Columns handed to the model.
        spans: Their ranges [first, last) on the ring, oldest first; the whole ring, in one, where the live
            window wraps and is read as it lies.
        lengths: Tokens per row, the new one included; an idle row sees the newest column only, because
            attention over nothing is not defined.
        runs: All rows, in order, as they are read.
    """

    def __init__(self, storage: torch.Tensor) -> None:
        self.capacity = storage.shape[1]
        self.device = storage.device
        self._storage_start = storage.untyped_storage().data_ptr()
        self.in_order = False
        self.cursor = 0
        self.size = 1
        self.spans: tuple[tuple[int, int], ...] = ((0, 1),)
        self.lengths: list[int] = []
        self.runs: list[Run] = []

    @property
    def rotated(self) -> bool:
        """Whether the columns handed to the model don't end with the newest."""
        return self.spans[-1][1] != self.cursor + 1

    def advance(self, cursor: int, lengths: Sequence[int]) -> None:
        """Move to a new newest column; `lengths` counts it already."""
        self.cursor = cursor
        self.spans = ranges_up_to(cursor, max(lengths), self.capacity)
        if len(self.spans) > 1 and not self.in_order:
            self.spans = ((0, self.capacity),)
        self.size = sum(last - first for first, last in self.spans)
        self.lengths = [max(length, 1) for length in lengths]
        self.runs = [self._run(rows) for rows in self._groups()]

    def read(self, store: torch.Tensor) -> torch.Tensor:
        """The columns handed to the model; a view, unless they are copied together.

        Args:
            store: Shape [rows, capacity, ...].
        """
        parts = [store[:, first:last] for first, last in self.spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def note_keys(self, key: torch.Tensor) -> None:
        """Learn from the keys of an attention whether the model computes them from what the ring keeps."""
        if not self.in_order and key.untyped_storage().data_ptr() != self._storage_start:
            self.in_order = True  # From the next step on.

    def padding_mask(self) -> torch.Tensor:
        """1 where a row has a token, in order of age (newest last); int64, shape [rows, size]."""
        lengths = torch.tensor(self.lengths, device=self.device)
        age = torch.arange(self.size - 1, -1, -1, device=self.device)
        return (age[None] < lengths[:, None]).long()

    def ranges(self, length: int) -> tuple[tuple[int, int], ...]:
        """Where the newest `length` columns lie in those handed to the model, oldest first."""
        if not self.rotated:
            return ((self.size - length, self.size),)
        return ranges_up_to(self.cursor, length, self.capacity)

    def _groups(self) -> list[tuple[int, int]]:
        """Split the rows into neighbours that cost less together than one by one."""
        groups: list[tuple[int, int]] = []
        for row, length in enumerate(self.lengths):
            if groups and self._joins(groups[-1], length):
                groups[-1] = (groups[-1][0], row + 1)
            else:
                groups.append((row, row + 1))
        return groups

    def _joins(self, group: tuple[int, int], length: int) -> bool:
        have = max(self.lengths[slice(*group)])
        longest, count = max(have, length), group[1] - group[0]
        in_one_piece = len(self.ranges(longest)) == 1
        return in_one_piece and (count + 1) * longest <= count * have + length + _CALL_COLUMNS

    def _run(self, rows: tuple[int, int]) -> Run:
        lengths = self.lengths[slice(*rows)]
        longest = max(lengths)
        seen = None
        if min(lengths) < longest:
            age = torch.arange(longest - 1, -1, -1, device=self.device)
            seen = (age[None] < torch.tensor(lengths, device=self.device)[:, None])[:, None, None]
        return Run(rows, self.ranges(longest), seen)


@contextlib.contextmanager
def active_window(window: RingWindow) -> Iterator[None]:
    """Tell mask and attention of this thread which window they work on."""
    _local.window = window
    try:
        yield
    finally:
        _local.window = None


def ring_mask(*args: Any, mask_function: Any = causal_mask_function, **kwargs: Any) -> torch.Tensor | None:
    """The model's mask where it says more than the rows' ranges do.

    Returns:
        None for plain causal attention: each row's own range says it all. Otherwise bool, shape
        [rows, 1, 1, size], rotated from order of age to order on the ring where the window wraps.
    """
    if mask_function is causal_mask_function:
        return None
    mask: torch.Tensor | None = sdpa_mask(*args, mask_function=mask_function, **kwargs)
    window: RingWindow = _local.window
    if mask is None or not window.rotated:
        return mask
    return mask.roll(window.cursor + 1, dims=-1)


def ring_attention(  # noqa: PLR0917 - the interface's signature
    module: torch.nn.Module,  # noqa: ARG001 - the interface's signature
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001 - batond never trains
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one new token per row over the rows' own columns.

    Args:
        module: The attention module.
        query: Shape [rows, heads, 1, dim].
        key: Shape [rows, kv heads, columns, dim].
        value: Shape [rows, kv heads, columns, value dim].
        attention_mask: From `ring_mask`, or whatever the model made of it; None is causal.
        scaling: Factor of the scores; None is dim ** -0.5.
        dropout: Ignored.
        **kwargs: `softcap`, `s_aux`, `sinks`, `position_bias` as models pass them; a `sliding_window` is in
            the mask.

    Returns:
        Shape [rows, 1, heads, value dim], and no weights.
    """
    window: RingWindow = _local.window
    window.note_keys(key)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows, heads, _, dim = query.shape
    grouped = query.view(rows, key.shape[1], heads // key.shape[1], dim)
    sinks = kwargs.get("s_aux") if kwargs.get("s_aux") is not None else kwargs.get("sinks")
    softcap, position_bias = kwargs.get("softcap"), kwargs.get("position_bias")
    plain = softcap is None and sinks is None and position_bias is None
    out = query.new_empty(rows, 1, heads, value.shape[-1])
    for run in window.runs:
        first, last = run.rows
        if plain and len(run.ranges) == 1:
            bias = _run_mask(run, attention_mask)
            (columns,) = run.ranges
            part = scaled_dot_product_attention(
                grouped[first:last],
                key[first:last, :, slice(*columns)],
                value[first:last, :, slice(*columns)],
                attn_mask=bias,
                scale=scale,
            )
            out[first:last] = part.reshape(last - first, 1, heads, -1)
            continue
        for row in range(first, last):
            ranges = window.ranges(window.lengths[row])
            out[row, 0] = _attend_row(
                grouped[row],
                [key[row, :, slice(*columns)] for columns in ranges],
                [value[row, :, slice(*columns)] for columns in ranges],
                _row_bias(attention_mask, position_bias, row, ranges),
                scale=scale,
                softcap=softcap,
                sinks=sinks,
            )
    return out, None


def _run_mask(run: Run, attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask of one run: the model's, which knows the padding too, or the rows' own ranges."""
    if attention_mask is None:
        return run.seen
    rows = attention_mask[slice(*run.rows)] if attention_mask.shape[0] > 1 else attention_mask
    return rows[..., slice(*run.ranges[0])]


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
        query: Shape [kv heads, group, dim].
        keys: Each of shape [kv heads, n, dim].
        values: Each of shape [kv heads, n, value dim].
        bias: Added to the scores; float, shape [1 or heads, all n].
        scale: Factor of the scores.
        softcap: Scores are squashed to (-softcap, softcap).
        sinks: Extra score per head that takes weight and gives nothing; shape [heads].

    Returns:
        Shape [heads, value dim].
    """
    kv_heads, group, _ = query.shape
    scores = torch.cat([torch.bmm(query, part.transpose(1, 2)) for part in keys], dim=-1) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    columns = scores.shape[-1]
    scores = scores.view(kv_heads * group, columns)
    if bias is not None:
        scores = scores + bias
    if sinks is not None:
        scores = torch.cat([scores, sinks.reshape(-1, 1).to(scores.dtype)], dim=-1)
    weights = scores.float().softmax(dim=-1).to(query.dtype)[:, :columns].view(kv_heads, group, columns)
    out = query.new_zeros(kv_heads, group, values[0].shape[-1])
    done = 0
    for part in values:
        out += torch.bmm(weights[..., done : done + part.shape[1]], part)
        done += part.shape[1]
    return out.view(kv_heads * group, -1)


def _row_bias(
    mask: torch.Tensor | None,
    position_bias: torch.Tensor | None,
    row: int,
    ranges: tuple[tuple[int, int], ...],
) -> torch.Tensor | None:
    """The additive bias of one row's columns: the mask as 0 and minus infinity, and the model's own bias."""
    total = None
    for source in (mask, position_bias):
        if source is None:
            continue
        whole = source[row if source.shape[0] > 1 else 0, :, -1]
        part = torch.cat([whole[:, slice(*columns)] for columns in ranges], dim=-1)
        if part.dtype == torch.bool:
            part = torch.zeros_like(part, dtype=torch.float32).masked_fill(~part, -torch.inf)
        total = part if total is None else total + part
    return total


AttentionInterface.register(RING_ATTENTION, ring_attention)
AttentionMaskInterface.register(RING_ATTENTION, ring_mask)
