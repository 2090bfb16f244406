"""Cache layers whose columns grow in place and are released at the front.

transformers' own dynamic layer concatenates on every step, which copies all keys and values of all rows
once a token. This one keeps room behind the newest column and hands out views:

    buffer   [ released | start ........... end | spare )
    columns              0 ............ columns-1

Owner of `[start, end)`: the batch. `release` moves `start`, `update` moves `end`; when the spare room is
used up, one copy into a buffer of twice the live columns pays for as many steps as it has columns.
"""

# pyright: reportAttributeAccessIssue=false
# transformers' cache layers grow attributes as they are used.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers.cache_utils import (
    Cache,
    DynamicIndexedLayer,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
)

if TYPE_CHECKING:
    import torch

    from batond.daemon.engine.model.layout import Slot

_MIN_SPARE_COLUMNS = 64


class ColumnBuffer:
    """One tensor with a column axis: keys, values or the like.

    Attributes:
        axis: Index of the column axis in the tensor, counted from the end (negative).
    """

    def __init__(self, axis: int) -> None:
        self.axis = axis
        self._buffer: torch.Tensor | None = None
        self._start = 0
        self._end = 0

    @property
    def columns(self) -> int:
        """Live columns."""
        return self._end - self._start

    def view(self) -> torch.Tensor:
        """The live columns, a view on the buffer."""
        if self._buffer is None:
            raise RuntimeError("nothing has been written yet")
        return self._buffer.narrow(self.axis, self._start, self.columns)

    def append(self, new: torch.Tensor) -> torch.Tensor:
        """Write new columns behind the newest one and return all live columns.

        Args:
            new: Same shape as the live columns but for the column axis.
        """
        count = new.shape[self.axis]
        if self._buffer is None or self._end + count > self._buffer.shape[self.axis]:
            self._reserve(new, count)
        if self._buffer is None:
            raise RuntimeError("reserve left no buffer")
        self._buffer.narrow(self.axis, self._end, count).copy_(new)
        self._end += count
        return self.view()

    def release(self, count: int) -> None:
        """Give the `count` oldest columns back."""
        self._start += count

    def truncate(self, count: int) -> None:
        """Keep the `count` oldest live columns; what was written behind them is written again."""
        self._end = self._start + count

    def set(self, value: torch.Tensor) -> None:
        """Replace all columns by `value`, which this buffer then owns."""
        self._buffer, self._start, self._end = value, 0, value.shape[self.axis]

    def _reserve(self, like: torch.Tensor, count: int) -> None:
        live = self.columns
        shape = list(like.shape)
        shape[self.axis] = live + count + max(live + count, _MIN_SPARE_COLUMNS)
        buffer = like.new_empty(shape)
        if self._buffer is not None and live:
            buffer.narrow(self.axis, 0, live).copy_(self.view())
        self._buffer, self._start, self._end = buffer, 0, live


class ColumnLayerMixin:
    """What the column layers share: keys and values, and more if need be, in column buffers.

    Sliding windows stay exact: transformers' mask applies the window, and the batch, not the layer,
    decides which columns live.

    Attributes:
        buffers: By the name of the layer's attribute they stand behind.
    """

    is_sliding = False
    keys: torch.Tensor | None
    values: torch.Tensor | None
    is_initialized: bool
    dtype: torch.dtype
    device: torch.device

    def make_buffers(self) -> None:
        """Create empty buffers."""
        self.buffers = {"keys": ColumnBuffer(axis=-2), "values": ColumnBuffer(axis=-2)}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append columns and return all.

        Args:
            key_states: Shape [rows, heads, new columns, key dim].
            value_states: Shape [rows, heads, new columns, value dim].
        """
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        self.keys = self.buffers["keys"].append(key_states)
        self.values = self.buffers["values"].append(value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Live columns."""
        return self.buffers["keys"].columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that `update` will return, and the index of the first."""
        return self.get_seq_length() + query_length, 0


class ColumnLayer(ColumnLayerMixin, DynamicLayer):  # type: ignore[misc]  # transformers is untyped
    """A drop-in for transformers' dynamic and sliding-window layers that keeps every column."""

    def __init__(self) -> None:
        super().__init__()
        self.make_buffers()


class IndexedColumnLayer(ColumnLayerMixin, DynamicIndexedLayer):  # type: ignore[misc]  # transformers is untyped
    """The same for layers that also keep keys of an indexer (sparse attention)."""

    def __init__(self) -> None:
        super().__init__()
        self.make_buffers()
        self.buffers["indexer_keys"] = ColumnBuffer(axis=-2)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append columns and return all.

        Args:
            indexer_key_states: Shape [rows, new columns, dim].
        """
        if not self.is_indexer_initialized:
            self.lazy_initialization_indexer(indexer_key_states)
        self.indexer_keys = self.buffers["indexer_keys"].append(indexer_key_states)
        return self.indexer_keys


class HybridColumnLayer(ColumnLayerMixin, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]  # transformers is untyped
    """The same for layers that keep a recurrent or convolution state beside keys and values."""

    def __init__(self, number_of_states: int) -> None:
        super().__init__(number_of_states=number_of_states)
        self.make_buffers()


def use_column_layers(cache: Cache) -> Cache:
    """Replace a cache's attention layers by column layers; others stay as they are.

    Classes of a model's own (compressed attention and the like) are left alone: they know more.
    """
    for index, layer in enumerate(getattr(cache, "layers", ())):
        name = type(layer).__name__
        if name in {"DynamicLayer", "DynamicSlidingWindowLayer"}:
            cache.layers[index] = ColumnLayer()
        elif name == "DynamicIndexedLayer":
            cache.layers[index] = IndexedColumnLayer()
        elif name in {
            "LinearAttentionAndFullAttentionLayer",
            "LinearAttentionAndSlidingWindowAttentionLayer",
        }:
            cache.layers[index] = HybridColumnLayer(layer.number_of_states)
    if getattr(cache, "layer_class_to_replicate", None) is DynamicLayer:
        cache.layer_class_to_replicate = ColumnLayer
    return cache


def put(cache: Cache, slot: Slot, value: torch.Tensor) -> None:
    """Replace one tensor of a cache by `value`, buffers included."""
    if slot.layer >= 0:
        layer = cache.layers[slot.layer]
        buffer = getattr(layer, "buffers", {}).get(slot.attribute)
        if buffer is not None:
            buffer.set(value)
        if slot.attribute in {"keys", "values"}:
            layer.dtype, layer.device, layer.is_initialized = value.dtype, value.device, True
        elif slot.attribute == "indexer_keys":
            layer.indexer_dtype, layer.indexer_device = value.dtype, value.device
            layer.is_indexer_initialized = True
    slot.place.set(cache, value)


def release(cache: Cache, slot: Slot, count: int) -> None:
    """Give back the `count` oldest columns of one tensor."""
    buffer = getattr(cache.layers[slot.layer], "buffers", {}).get(slot.attribute) if slot.layer >= 0 else None
    if buffer is not None:
        buffer.release(count)
        slot.place.set(cache, buffer.view())
        return
    live = slot.tensor(cache)
    slot.place.set(cache, live.narrow(slot.column_axis, count, live.shape[slot.column_axis] - count))


def truncate(cache: Cache, slot: Slot, count: int) -> bool:
    """Keep the `count` oldest columns of one tensor; no memory is needed.

    Returns:
        Whether that can be done: a tensor that is not in a buffer of ours may have been changed in place.
    """
    buffer = getattr(cache.layers[slot.layer], "buffers", {}).get(slot.attribute) if slot.layer >= 0 else None
    if buffer is None:
        return False
    buffer.truncate(count)
    slot.place.set(cache, buffer.view())
    return True
