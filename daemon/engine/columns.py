"""Cache layers whose columns grow in place and are released at the front.

transformers' own dynamic layer concatenates on every step, which copies all keys and values of all rows
once a token. This one keeps room behind the newest column and hands out views:

    buffer   [ released | start ........... end | spare )
    columns              0 ............ columns-1

Owner of `[start, end)`: the batch. `release` moves `start`, `update` moves `end`; when the spare room is
used up, one copy into a buffer of twice the live columns pays for as many steps as it has columns.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

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

    def prepend_zeros(self, count: int) -> None:
        """Make room for `count` columns before the oldest one; their content is zero."""
        shape = list(self.view().shape)
        shape[self.axis] = count
        zeros = self.view().new_zeros(shape)
        self.set(torch.cat([zeros, self.view()], dim=self.axis))

    def release(self, count: int) -> None:
        """Give the `count` oldest columns back."""
        self._start += count

    def set(self, value: torch.Tensor) -> None:
        """Replace all columns by `value`, which this buffer then owns."""
        self._buffer, self._start, self._end = value, 0, value.shape[self.axis]

    def clear(self) -> None:
        """Forget everything."""
        self._buffer, self._start, self._end = None, 0, 0

    def _reserve(self, like: torch.Tensor, count: int) -> None:
        live = self.columns
        shape = list(like.shape)
        shape[self.axis] = live + count + max(live + count, _MIN_SPARE_COLUMNS)
        buffer = like.new_empty(shape)
        if self._buffer is not None and live:
            buffer.narrow(self.axis, 0, live).copy_(self.view())
        self._buffer, self._start, self._end = buffer, 0, live


class ColumnLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped
    """A drop-in for transformers' dynamic and sliding-window layers that keeps every column.

    Sliding windows stay exact: transformers' mask applies the window, and the batch, not the layer,
    decides which columns live.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.key_columns = ColumnBuffer(axis=-2)
        self.value_columns = ColumnBuffer(axis=-2)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:  # noqa: ARG002 - base signature
        """Note dtype and device; nothing is allocated before the first update."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append columns and return all.

        Args:
            key_states: Shape [rows, heads, new columns, key dim].
            value_states: Shape [rows, heads, new columns, value dim].
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self.key_columns.append(key_states)
        self.values = self.value_columns.append(value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Live columns."""
        return self.key_columns.columns

    def refresh(self) -> None:
        """Point `keys` and `values` at the live columns after the buffers were changed from outside."""
        self.keys, self.values = self.key_columns.view(), self.value_columns.view()
        self.dtype, self.device = self.keys.dtype, self.keys.device
        self.is_initialized = True


def use_column_layers(cache: Cache) -> Cache:
    """Replace a cache's plain attention layers by column layers; others stay as they are."""
    for index, layer in enumerate(cache.layers):
        if type(layer).__name__ in {"DynamicLayer", "DynamicSlidingWindowLayer"}:
            cache.layers[index] = ColumnLayer()
    if getattr(cache, "layer_class_to_replicate", None) is DynamicLayer:
        cache.layer_class_to_replicate = ColumnLayer
    return cache
