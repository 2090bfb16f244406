"""The ring: columns that wrap, token-major records, nothing moved while decoding.

    column     0           cursor                          capacity
    row 0     [ ######## a9 |......................| a0 ### )    wraps: two byte ranges
    row 1     [ ..... b0 b5 |............................... )    one byte range
    row 2     [ ............|............................... )    idle

One step writes one new column for all rows: column = step mod capacity. Every row's newest token sits at
the cursor, and a row of n tokens owns the n columns that end there. Keys carry their positions already and
attention does not care about the order in which keys are stored, so wrapping is free. Releasing costs nothing
either: a column is reusable as soon as no row's range covers it, which a capacity of the longest query
guarantees.

    storage[row, column]   one record: all layers' keys and values of one token, see `model/layout.py`
    state[row]             what doesn't grow with tokens
"""

# pyright: reportAttributeAccessIssue=false
# transformers' cache layers grow attributes as they are used.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from batond.daemon.engine.batch.ring_attention import (
    RING_ATTENTION,
    RingWindow,
    active_window,
    ignored_arguments,
    ranges_up_to,
)
from batond.daemon.engine.model.causal import note_states
from batond.daemon.engine.model.recipe import Recipe
from batond.daemon.errors import UnsupportedModelError
from batond.offload.slice import KVSlice

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers.cache_utils import Cache

    from batond.daemon.engine.model.causal import CausalModel
    from batond.daemon.engine.model.layout import RecordLayout, Slot


_RECIPE = Recipe()  # The model's own may be for prompts: the ring's mask function needs the columns.


class RingBatch:
    """A batch of fixed rows over a ring of columns; see `batch.Batch` for the contract.

    Args:
        model: The model.
        rows: Number of rows.
        layout: Byte layout of the model's cache.
        capacity: Columns of the ring: the most tokens a row may hold.
        row_by_row: Attend to every row by itself: slower, and no bit of a row depends on its mates.

    Raises:
        UnsupportedModelError: The model's cache has layers that the ring can't stand in for.
    """

    kind = "ring"

    def __init__(
        self, model: CausalModel, rows: int, layout: RecordLayout, capacity: int, *, row_by_row: bool = False
    ) -> None:
        self.rows = rows
        self.layout = layout
        self.device = model.device
        self.capacity = capacity
        self._model = model
        # Zeroed pages are committed by the system when they are first written.
        self._storage = torch.zeros(
            rows, capacity, layout.record_bytes, dtype=torch.uint8, device=model.device
        )
        self._state = torch.zeros(rows, layout.state_bytes, dtype=torch.uint8, device=model.device)
        self._lengths = [0] * rows
        self._cursor = -1  # Newest column; -1 before the first.
        self._window = RingWindow(
            self._storage, row_by_row=row_by_row, ignored=ignored_arguments(model.attention_name)
        )
        self._cache = self._ring_cache()

    @property
    def columns(self) -> int:
        """Live columns: those of the longest row."""
        return max(self._lengths)

    @property
    def lengths(self) -> Sequence[int]:
        """Cached tokens per row."""
        return self._lengths

    def embed(self, row: int, kv: KVSlice) -> None:
        """Write a slice into an idle row so that it ends at the cursor: one or two plain copies."""
        if self._lengths[row]:
            raise RuntimeError(f"row {row} is occupied")
        if kv.n_tokens >= self.capacity:
            raise RuntimeError(
                f"{kv.n_tokens} tokens leave no column for the next in a ring of {self.capacity}"
            )
        if not any(self._lengths):
            self._cursor = kv.n_tokens - 1  # An empty ring starts anew: the same pages are used again.
        done = 0
        for first, last in self._ranges(kv.n_tokens):
            self._storage[row, first:last] = kv.tokens[done : done + last - first]
            done += last - first
        self._state[row] = kv.state
        self._lengths[row] = kv.n_tokens

    def extract(self, row: int) -> KVSlice:
        """Copy an occupied row out; byte ranges, no gather."""
        if not self._lengths[row]:
            raise RuntimeError(f"row {row} is idle")
        parts = [self._storage[row, first:last] for first, last in self._ranges(self._lengths[row])]
        tokens = parts[0].clone() if len(parts) == 1 else torch.cat(parts)
        return KVSlice(tokens, self._state[row].clone())

    def free(self, row: int) -> None:
        """Make a row idle; its columns are free from now on.

        They are zeroed: rows read together see each other's span behind a mask, and what is masked counts as
        zero times its value, which is not zero where one query's numbers overflowed.
        """
        for first, last in self._ranges(self._lengths[row]):
            self._storage[row, first:last] = 0
        self._state[row] = 0
        self._lengths[row] = 0

    def step(self, tokens: Mapping[int, Sequence[int]]) -> torch.Tensor:
        """Run the model over one new token per occupied row.

        A forward that fails leaves the books as they were; the column it wrote is written again by the next.

        Args:
            tokens: One token by row.

        Returns:
            float32 logits, shape [rows, vocabulary].
        """
        input_ids = torch.zeros(self.rows, 1, dtype=torch.int64)
        position_ids = torch.zeros(self.rows, 1, dtype=torch.int64)
        lengths, cursor = list(self._lengths), (self._cursor + 1) % self.capacity
        for row, (token,) in tokens.items():
            input_ids[row, 0] = token
            position_ids[row, 0] = lengths[row]
            lengths[row] += 1
        self._window.advance(cursor, lengths)
        device = self.device
        with active_window(self._window), self._model.attention(RING_ATTENTION):
            logits = self._model.forward(
                input_ids.to(device),
                self._window.padding_mask(),
                position_ids.to(device),
                self._cache,
                recipe=_RECIPE,
            )
        self._lengths, self._cursor = lengths, cursor
        return logits

    def check_integrity(self) -> None:
        """Raise AssertionError where the books contradict each other."""
        if not -1 <= self._cursor < self.capacity:
            raise AssertionError(f"cursor {self._cursor} in a ring of {self.capacity}")
        for row, length in enumerate(self._lengths):
            if not 0 <= length <= self.capacity:
                raise AssertionError(f"row {row} holds {length} tokens in a ring of {self.capacity}")

    def _ranges(self, length: int) -> tuple[tuple[int, int], ...]:
        """Column ranges [first, last) of the `length` columns that end at the cursor, oldest first."""
        return ranges_up_to(self._cursor, length, self.capacity)

    def _ring_cache(self) -> Cache:
        """The model's cache with every layer's tensors replaced by views on storage and state."""
        cache = self._model.new_cache()
        by_layer: dict[int, dict[str, Slot]] = {}
        for slot in self.layout.token_slots:
            by_layer.setdefault(slot.layer, {})[slot.attribute] = slot
        for number, slots in by_layer.items():
            layer = cache.layers[number] if number < len(cache.layers) else DynamicLayer()
            if not isinstance(layer, DynamicLayer) or set(slots) != {"keys", "values"}:
                raise UnsupportedModelError(
                    f"cache layer {number} is a {type(layer).__name__}: not for the ring"
                )
            keys, values = (_column_view(self._storage, slots[name]) for name in ("keys", "values"))
            while number >= len(cache.layers):
                cache.layers.append(DynamicLayer())
            cache.layers[number] = _as_ring_layer(layer, self._window, keys, values)
        for slot in self.layout.state_slots:
            slot.place.set(cache, _state_view(self._state, slot))
        for layer in cache.layers:
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                note_states(layer)
        return cache


class RingLayerMixin:
    """Writes a step's keys and values at the cursor and hands out views on the live columns."""

    window: RingWindow
    key_store: torch.Tensor  # [rows, capacity, heads, key dim], a view on the storage
    value_store: torch.Tensor  # [rows, capacity, heads, value dim]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one column.

        Args:
            key_states: Shape [rows, heads, 1, key dim].
            value_states: Shape [rows, heads, 1, value dim].

        Returns:
            Shape [rows, heads, columns of the window, dim]; views, unless the window is `in_order` and wraps.
        """
        self.window.write(self.key_store, key_states)
        self.window.write(self.value_store, value_states)
        keys, values = self.window.read(self.key_store), self.window.read(self.value_store)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def get_seq_length(self) -> int:
        """Columns before the new one."""
        return self.window.size - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that `update` returns, and the index of the first."""
        return self.window.size - 1 + query_length, 0


def _as_ring_layer(
    layer: DynamicLayer, window: RingWindow, keys: torch.Tensor, values: torch.Tensor
) -> DynamicLayer:
    """The same kind of layer, state kept, with its token part on the ring."""
    kind = type(layer)
    ring_kind: Any = type(f"Ring{kind.__name__}", (RingLayerMixin, kind), {"is_sliding": False})
    ring_layer: DynamicLayer = ring_kind.__new__(ring_kind)
    ring_layer.__dict__.update(layer.__dict__)
    ring_layer.window, ring_layer.key_store, ring_layer.value_store = window, keys, values
    ring_layer.is_initialized, ring_layer.dtype, ring_layer.device = True, keys.dtype, keys.device
    return ring_layer


def _column_view(storage: torch.Tensor, slot: Slot) -> torch.Tensor:
    """One slot of all records as the model's numbers, shape [rows, capacity, heads, dim]; no copy."""
    numbers = storage[:, :, slot.offset : slot.offset + slot.nbytes].view(slot.dtype)
    return numbers.view(*storage.shape[:2], *slot.shape)


def _state_view(state: torch.Tensor, slot: Slot) -> torch.Tensor:
    """One state of all rows, shape [rows, *shape]; no copy."""
    numbers = state[:, slot.offset : slot.offset + slot.nbytes].view(slot.dtype)
    return numbers.view(state.shape[0], *slot.shape)
