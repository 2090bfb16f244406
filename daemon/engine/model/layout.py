"""Token-major records: how one token's keys and values of all layers lie in a row of bytes.

    record   [ layer 0: K heads x dim | V heads x dim | layer 1: K | V | ... ]
    state    [ layer 0: conv | recurrent | layer 1: ... ]      what doesn't grow with tokens

Every slot has an offset, a shape and a dtype of its own, read from the live cache of a probe forward and
never from a config: head counts and widths may differ between layers, and between keys and values.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from batond.daemon.engine.model.tensors import Index, Place, axes, places
from batond.daemon.errors import UnsupportedModelError
from batond.offload.slice import KVSlice

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

_DISTINCT_VALUES = 29  # Of made-up tokens; odd, so that they don't fall in step with blocks.
ALIGNMENT_BYTES = 16  # Widest vector load of a GPU thread; every dtype divides it.


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor of one layer lies.

    Attributes:
        layer: Index in `cache.layers`, or -1 for a tensor on the cache itself.
        attribute: Name of the tensor on the layer.
        index: Key in the attribute's container of states, or -1 if it is the tensor itself.
        shape: Of one token ([heads, dim]) or of one row's state.
        dtype: Of the tensor.
        offset: First byte in the record, or in the state.
        nbytes: Length without padding.
        row_axis: The tensor's axis of rows.
        column_axis: The tensor's axis of columns; -1 for state.
    """

    layer: int
    attribute: str
    index: Index
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    nbytes: int
    row_axis: int = 0
    column_axis: int = -1

    @property
    def place(self) -> Place:
        """Where the cache keeps the tensor."""
        return Place(self.layer, self.attribute, self.index)

    def tensor(self, cache: Cache) -> torch.Tensor:
        """The live tensor of all rows, e.g. [rows, heads, columns, dim], or [rows, *shape] for state."""
        return self.place.get(cache)

    def row(self, cache: Cache, row: int) -> torch.Tensor:
        """One row's part, a view: [columns, *shape] of a token slot, [*shape] of a state."""
        part = self.tensor(cache).select(self.row_axis, row)
        if self.column_axis < 0:
            return part
        return part.movedim(self.column_axis - (self.column_axis > self.row_axis), 0)

    def zeros(self, rows: int, columns: int, device: torch.device) -> torch.Tensor:
        """What the tensor is before anything was computed."""
        shape = list(self.shape)
        axes = [(self.row_axis, rows)] + [(self.column_axis, columns)] * (self.column_axis >= 0)
        for axis, size in sorted(axes):
            shape.insert(axis, size)
        return torch.zeros(shape, dtype=self.dtype, device=device)


class RecordLayout:
    """The byte layout of a model's cache.

    Attributes:
        token_slots: Tensors that grow by one entry a token.
        state_slots: Tensors of fixed size.
        record_bytes: Bytes of one token.
        state_bytes: Bytes of one row's state.
        digest: Hash of all of it; slices of another layout are never read.
    """

    def __init__(self, token_slots: tuple[Slot, ...], state_slots: tuple[Slot, ...]) -> None:
        self.token_slots = token_slots
        self.state_slots = state_slots
        self.record_bytes = _end(token_slots)
        self.state_bytes = _end(state_slots)
        self.digest = hashlib.sha256(repr((token_slots, state_slots)).encode()).hexdigest()[:16]

    @property
    def keys_and_values_only(self) -> bool:
        """Whether every token slot is a layer's keys or values, shape [rows, heads, columns, dim]."""
        return all(
            slot.layer >= 0
            and slot.attribute in {"keys", "values"}
            and (slot.row_axis, slot.column_axis) == (0, 2)
            for slot in self.token_slots
        )

    @classmethod
    def between(cls, small: Cache, large: Cache, sizes: tuple[int, int, int, int]) -> RecordLayout:
        """Read the layout from two caches: what grew with the columns is per token, with the rows per row.

        Args:
            small: After a forward of few rows and columns.
            large: After a forward of more of both.
            sizes: Rows of both, then columns of both; all different.

        Raises:
            UnsupportedModelError: The cache holds something that is neither per token nor per row.
        """
        tokens: list[Slot] = []
        states: list[Slot] = []
        first, second = places(small), places(large)
        if set(first) != set(second):
            odd = sorted({place.attribute for place in set(first) ^ set(second)})
            raise UnsupportedModelError(f"the cache holds {', '.join(odd)} after some forwards only")
        for place, tensor in first.items():
            found = axes(place, tensor, second[place], sizes)
            if found.row is None:
                continue  # A constant of the class.
            kind = states if found.column is None else tokens
            shape = tuple(
                size for axis, size in enumerate(tensor.shape) if axis not in {found.row, found.column}
            )
            nbytes = tensor.element_size() * math.prod(shape)
            column = -1 if found.column is None else found.column
            kind.append(
                Slot(
                    place.layer,
                    place.attribute,
                    place.index,
                    shape,
                    tensor.dtype,
                    _end(kind),
                    nbytes,
                    found.row,
                    column,
                )
            )
        if not tokens and not states:
            raise UnsupportedModelError("the model's cache holds no keys, values or states after a forward")
        return cls(tuple(tokens), tuple(states))

    def nbytes(self, tokens: int) -> int:
        """Bytes of a slice of so many tokens: records and state."""
        return tokens * self.record_bytes + self.state_bytes

    def pack(self, cache: Cache, row: int, columns: torch.Tensor) -> KVSlice:
        """Copy one row out of a cache.

        Args:
            cache: Live cache.
            row: Its row.
            columns: Which columns, oldest first: an index tensor.
        """
        device = (self.token_slots or self.state_slots)[0].tensor(cache).device
        parts = [(slot, slot.row(cache, row)[columns]) for slot in self.token_slots]
        count = int(columns.shape[0])
        tokens = torch.zeros(count, self.record_bytes, dtype=torch.uint8, device=device)
        for slot, part in parts:
            tokens[:, slot.offset : slot.offset + slot.nbytes] = part.reshape(count, -1).view(torch.uint8)
        state = torch.zeros(self.state_bytes, dtype=torch.uint8, device=device)
        for slot in self.state_slots:
            flat = slot.row(cache, row).reshape(-1)
            state[slot.offset : slot.offset + slot.nbytes] = flat.view(torch.uint8)
        return KVSlice(tokens, state)

    def random(self, count: int, device: torch.device, noise: torch.Generator) -> KVSlice:
        """A slice of `count` made-up tokens, drawn where the noise is; states are zero, as at the start.

        Numbers are drawn at random. Values repeat as the tokens of a text do: unlike keys they know nothing
        of their position, so those of equal tokens are equal, which a selection by values must bear.
        """
        tokens = torch.zeros(count, self.record_bytes, dtype=torch.uint8, device=device)
        state = torch.zeros(self.state_bytes, dtype=torch.uint8, device=device)
        for slot in self.token_slots:
            drawn = _draw(slot, (count, math.prod(slot.shape)), noise).to(device)
            if slot.attribute == "values":
                drawn = drawn[torch.arange(count, device=device) % _DISTINCT_VALUES]
            tokens[:, slot.offset : slot.offset + slot.nbytes] = drawn.view(torch.uint8)
        return KVSlice(tokens, state)

    def token_part(self, slot: Slot, kv: KVSlice) -> torch.Tensor:
        """One slot of a slice as the model knows it, shape [n, *slot.shape]."""
        raw = kv.tokens[:, slot.offset : slot.offset + slot.nbytes].contiguous()
        return raw.view(slot.dtype).view(-1, *slot.shape)

    def state_part(self, slot: Slot, kv: KVSlice) -> torch.Tensor:
        """One state of a slice, in the slot's shape."""
        raw = kv.state[slot.offset : slot.offset + slot.nbytes].contiguous()
        return raw.view(slot.dtype).view(slot.shape)


def _draw(slot: Slot, shape: tuple[int, ...], noise: torch.Generator) -> torch.Tensor:
    if slot.dtype.is_floating_point:
        return torch.randn(shape, generator=noise, device=noise.device).to(slot.dtype)
    return torch.zeros(shape, dtype=slot.dtype)


def _end(slots: tuple[Slot, ...] | list[Slot]) -> int:
    """First free, aligned byte behind the last slot."""
    if not slots:
        return 0
    end = slots[-1].offset + slots[-1].nbytes
    return -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
