"""Attention over a ring of columns, plugged into unmodified models.

The model builds its mask as for an end-aligned padded batch (`ring_mask` only rotates it when the window
wraps), and hands keys and values that are views on the ring to `ring_attention`. Scaling, sliding windows (in
the mask, and as a bound on what is read), soft caps, attention sinks and grouped heads are honoured as the
model passes them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from batond.daemon.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RING_ATTENTION = "batond_ring"
#: What one more attention call costs, in columns of one row read. CPU: measured with 3 heads of 64. CUDA: a
#: few launches of 10 us, at 16 KiB a column and 3 TB/s.
_CALL_COLUMNS = {"cpu": 256, "cuda": 8192}

_CALLS_OF_TWO_RANGES = 2  # Four products a row instead of one fused call.

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
        ranges: Column ranges [first, last) read, in the columns handed to the model, oldest first: those of
            the longest row (two if it wraps), or the whole ring.
        seen: Which of those columns each row owns; bool, shape [rows, 1, 1, columns]. None: all.
    """

    rows: tuple[int, int]
    ranges: tuple[tuple[int, int], ...]
    seen: torch.Tensor | None

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """The run's part of a mask or bias, shape [rows or 1, heads or 1, 1, columns]."""
        rows = tensor[slice(*self.rows)] if tensor.shape[0] > 1 else tensor
        parts = [rows[..., -1:, first:last] for first, last in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class RingWindow:
    """Which columns a step reads: the live window, its place on the ring, and each row's part of it.

    Where the live window wraps, the model gets the whole ring as it lies, which costs nothing because
    attention reads the rows' ranges alone. A model that computes keys from what the cache keeps (MLA expands
    latents) would do so for the whole ring; it gets the live columns in order of age instead (`in_order`).

    Args:
        storage: The ring's records, shape [rows, capacity, record].
        row_by_row: Read every row by itself and in one piece, so that no shape depends on its mates.
        ignored: Arguments that the model passes and its own attention ignores.

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

    def __init__(
        self, storage: torch.Tensor, *, row_by_row: bool = False, ignored: frozenset[str] = frozenset()
    ) -> None:
        self.row_by_row = row_by_row
        self.ignored = ignored
        self.capacity = storage.shape[1]
        self.device = storage.device
        self._call_columns = _CALL_COLUMNS.get(storage.device.type, _CALL_COLUMNS["cpu"])
        self._storage_start = storage.untyped_storage().data_ptr()
        self.in_order = False
        self.cursor = 0
        self.size = 1
        self.spans: tuple[tuple[int, int], ...] = ((0, 1),)
        self.lengths: list[int] = []
        self.runs: list[Run] = []
        self._writing: torch.Tensor | None = None

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
        occupied = [row for row, length in enumerate(lengths) if length]
        every = len(occupied) == len(lengths)
        self._writing = None if every else torch.tensor(occupied, device=self.device)
        self.lengths = [max(length, 1) for length in lengths]
        self.runs = [self._run(rows) for rows in self._groups()]

    def write(self, store: torch.Tensor, states: torch.Tensor) -> None:
        """Write the newest column of the occupied rows; what an idle row computes is nobody's.

        Args:
            store: Shape [rows, capacity, heads, dim].
            states: Shape [rows, heads, 1, dim].
        """
        if self._writing is None:
            store[:, self.cursor] = states[:, :, 0]
        else:
            store[self._writing, self.cursor] = states[self._writing, :, 0]

    def read(self, store: torch.Tensor) -> torch.Tensor:
        """The columns handed to the model; a view, unless they are copied together.

        Args:
            store: Shape [rows, capacity, ...].
        """
        parts = [store[:, first:last] for first, last in self.spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def to_ring_order(self, by_age: torch.Tensor | None) -> torch.Tensor | None:
        """A mask or bias over columns in order of age, as they lie in what the model is handed."""
        if by_age is None or not self.rotated:
            return by_age
        return by_age.roll(self.cursor + 1, dims=-1)

    def note_keys(self, key: torch.Tensor) -> None:
        """Learn from the keys of an attention whether the model computes them from what the ring keeps."""
        if self.in_order or key.untyped_storage().data_ptr() == self._storage_start:
            return
        if self.row_by_row:
            raise UnsupportedModelError(
                "the model computes keys from what its cache keeps, for all columns of the longest row"
            )
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
        if self.row_by_row:
            return [(row, row + 1) for row in range(len(self.lengths))]
        groups: list[tuple[int, int]] = []
        for row in range(len(self.lengths)):
            joined = (groups[-1][0], row + 1) if groups else (row, row + 1)
            if groups and self._cost(joined) <= self._cost(groups[-1]) + self._cost((row, row + 1)):
                groups[-1] = joined
            else:
                groups.append((row, row + 1))
        return groups

    def _cost(self, rows: tuple[int, int]) -> int:
        """What reading rows together costs, in columns of one row."""
        return min(self._cost_of_ranges(rows), self._cost_of_ring(rows))

    def _cost_of_ranges(self, rows: tuple[int, int]) -> int:
        """The cost of reading the longest row's ranges: in one call, or row by row and range by range."""
        count, longest = rows[1] - rows[0], max(self.lengths[slice(*rows)])
        calls = 1 if len(self.ranges(longest)) == 1 else _CALLS_OF_TWO_RANGES * count
        return calls * self._call_columns + count * longest

    def _cost_of_ring(self, rows: tuple[int, int]) -> int:
        """The cost of reading all columns in one call."""
        return self._call_columns + (rows[1] - rows[0]) * self.size

    def _run(self, rows: tuple[int, int]) -> Run:
        lengths = self.lengths[slice(*rows)]
        ranges = self.ranges(max(lengths))
        if not self.row_by_row and self._cost_of_ring(rows) < self._cost_of_ranges(rows):
            ranges = ((0, self.size),)
        columns = sum(last - first for first, last in ranges)
        if min(lengths) == columns:
            return Run(rows, ranges, None)
        places = torch.cat([torch.arange(first, last, device=self.device) for first, last in ranges])
        newest = self.cursor if self.rotated else self.size - 1
        age = (newest - places) % self.capacity
        seen = age[None] < torch.tensor(lengths, device=self.device)[:, None]
        return Run(rows, ranges, seen[:, None, None])


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
    window: RingWindow = _local.window
    kwargs["allow_is_causal_skip"] = False  # A mask now and none then would be two kernels, two roundings.
    return window.to_ring_order(sdpa_mask(*args, mask_function=mask_function, **kwargs))


@functools.cache
def ignored_arguments(attention: str) -> frozenset[str]:
    """Which of `softcap`, `s_aux` and `sinks` an attention function takes without using them.

    Transformers' sdpa did so with a soft cap before 5.24: a ring that heeds it would give other logits than
    `generate`. The function itself is asked; what it refuses, or what can't be asked here, counts as used.

    Args:
        attention: Name of a registered function; "eager" is the model's own, which uses what it is passed.
    """
    function = ALL_ATTENTION_FUNCTIONS.get(attention)
    if function is None:
        return frozenset()
    module = SimpleNamespace(is_causal=False, num_key_value_groups=1, training=False)
    states = torch.tensor([[[[3.0, 1.0], [1.0, -2.0]]]])

    def attend(**options: Any) -> torch.Tensor:
        found: torch.Tensor = function(module, states, states, states, None, scaling=1.0, **options)[0]
        return found

    ignored = set()
    for name, value in (("softcap", 0.5), ("s_aux", torch.ones(1)), ("sinks", torch.ones(1))):
        with contextlib.suppress(Exception):
            if torch.equal(attend(), attend(**{name: value})):
                ignored.add(name)
    return frozenset(ignored)


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
    rows, heads, _, dim = query.shape
    grouped = query.view(rows, key.shape[1], heads // key.shape[1], dim)
    softcap, s_aux, sinks = (
        None if name in window.ignored else kwargs.get(name) for name in ("softcap", "s_aux", "sinks")
    )
    call = _Call(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        sinks=sinks if s_aux is None else s_aux,
        biases=[
            bias
            for bias in (attention_mask, window.to_ring_order(kwargs.get("position_bias")))
            if bias is not None
        ],
        masked=attention_mask is not None,
    )
    parts = []
    for run in window.runs:
        mine = slice(*run.rows)
        keys = [key[mine, :, first:last] for first, last in run.ranges]
        values = [value[mine, :, first:last] for first, last in run.ranges]
        if window.row_by_row and len(keys) > 1:
            keys, values = [torch.cat(keys, dim=2)], [torch.cat(values, dim=2)]
        parts.append(call.attend(run, grouped[mine], keys, values))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.reshape(rows, 1, heads, -1), None


@dataclass(frozen=True, slots=True)
class _Call:
    """What one attention call says beside its tensors.

    Attributes:
        scale: Factor of the scores.
        softcap: Scores are squashed to (-softcap, softcap).
        sinks: Extra score per head that takes weight and gives nothing; shape [heads].
        biases: Masks (bool, or added) and biases of the model, shape [rows or 1, heads or 1, 1, columns].
        masked: Whether one of them is a mask: it knows which columns a row owns.
    """

    scale: float
    softcap: float | None
    sinks: torch.Tensor | None
    biases: list[torch.Tensor]
    masked: bool

    def attend(
        self, run: Run, query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
    ) -> torch.Tensor:
        """Attention of a run's rows.

        Args:
            run: Which rows, over which columns.
            query: Shape [rows, kv heads, group, dim].
            keys: One or two parts, each of shape [rows, kv heads, n, dim].
            values: The same, each of shape [rows, kv heads, n, value dim].

        Returns:
            Shape [rows, kv heads, group, value dim].
        """
        biases = [_by_group(run.take(bias), query) for bias in self.biases]
        if run.seen is not None and not self.masked:
            biases.append(run.seen)
        if len(keys) == 1 and self.softcap is None and self.sinks is None and len(biases) < 2:  # noqa: PLR2004
            bias = biases[0] if biases else None
            return scaled_dot_product_attention(query, keys[0], values[0], attn_mask=bias, scale=self.scale)
        parts = [_by_row(query, part.transpose(-1, -2)) for part in keys]
        scores = torch.cat(parts, dim=-1) * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        for bias in biases:
            scores = scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias
        columns = scores.shape[-1]
        if self.sinks is not None:
            sinks = self.sinks.to(scores.dtype).view(1, query.shape[1], query.shape[2], 1)
            scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
        weights = scores.float().softmax(dim=-1).to(query.dtype)[..., :columns]
        sizes = [part.shape[2] for part in values]
        shares = torch.split(weights, sizes, dim=-1)
        parts = [_by_row(*pair) for pair in zip(shares, values, strict=True)]
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _by_row(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`left @ right` over [rows, heads, ...]; all rows at once would copy `right`, a view on the ring."""
    return torch.stack([torch.bmm(*pair) for pair in zip(left, right, strict=True)])


def _by_group(bias: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """A bias per head, [rows, heads, 1, n], as one per group of heads, [rows, kv heads, group, n]."""
    if bias.shape[1] == 1:
        return bias
    return bias.reshape(bias.shape[0], query.shape[1], query.shape[2], bias.shape[-1])


AttentionInterface.register(RING_ATTENTION, ring_attention)
AttentionMaskInterface.register(RING_ATTENTION, ring_mask)
