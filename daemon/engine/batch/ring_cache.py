"""The model's cache with its tensors on the ring: views, written in place."""

# pyright: reportAttributeAccessIssue=false
# transformers' cache layers grow attributes as they are used.

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from batond.daemon.engine.model.causal import note_states
from batond.daemon.errors import UnsupportedModelError

if TYPE_CHECKING:
    import torch
    from transformers.cache_utils import Cache

    from batond.daemon.engine.model.causal import CausalModel
    from batond.daemon.engine.model.layout import RecordLayout, Slot


class Window(Protocol):
    """What a cache layer asks of a step's view on the ring; `RingWindow` and `CardWindow` answer."""

    size: int

    def update(
        self,
        key_store: torch.Tensor,
        value_store: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's newest column; returns what the model gets, [rows, size, heads, dim]."""


def ring_cache(
    model: CausalModel, layout: RecordLayout, storage: torch.Tensor, state: torch.Tensor, window: Window
) -> Cache:
    """The model's cache with every layer's tensors replaced by views on storage and state.

    Args:
        model: The model.
        layout: Where in a record its layers lie.
        storage: Records of the rows that a step computes, uint8, shape [rows, capacity, record].
        state: Their states, uint8, shape [rows, state bytes].
        window: Told of every layer's newest column.

    Raises:
        UnsupportedModelError: The model's cache has layers that the ring can't stand in for.
    """
    cache = model.new_cache()
    by_layer: dict[int, dict[str, Slot]] = {}
    for slot in layout.token_slots:
        by_layer.setdefault(slot.layer, {})[slot.attribute] = slot
    for number, slots in by_layer.items():
        layer = cache.layers[number] if number < len(cache.layers) else DynamicLayer()
        if not isinstance(layer, DynamicLayer) or set(slots) != {"keys", "values"}:
            raise UnsupportedModelError(f"cache layer {number} is a {type(layer).__name__}: not for the ring")
        keys, values = (_column_view(storage, slots[name]) for name in ("keys", "values"))
        while number >= len(cache.layers):
            cache.layers.append(DynamicLayer())
        cache.layers[number] = _as_ring_layer(layer, window, keys, values)
    for slot in layout.state_slots:
        slot.place.set(cache, _state_view(state, slot))
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            note_states(layer)
    return cache


class RingLayerMixin:
    """Writes a step's keys and values at the cursor and hands out views on the live columns."""

    window: Window
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
        keys, values = self.window.update(self.key_store, self.value_store, key_states, value_states)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def get_seq_length(self) -> int:
        """Columns before the new one."""
        return self.window.size - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that `update` returns, and the index of the first."""
        return self.window.size - 1 + query_length, 0


def _as_ring_layer(
    layer: DynamicLayer, window: Window, keys: torch.Tensor, values: torch.Tensor
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
