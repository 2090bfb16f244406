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

from batond.daemon.errors import UnsupportedModelError
from batond.offload.slice import KVSlice

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

ALIGNMENT_BYTES = 16  # Widest vector load of a GPU thread; every dtype divides it.
TOKEN_ATTRIBUTES = ("keys", "values")
STATE_ATTRIBUTES = ("conv_states", "recurrent_states")


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor of one layer lies.

    Attributes:
        layer: Index in `cache.layers`.
        attribute: Name of the tensor on the layer.
        index: Key in the attribute's dictionary of states, or -1 if it is the tensor itself.
        shape: Of one token ([heads, dim]) or of one row's state.
        dtype: Of the tensor.
        offset: First byte in the record, or in the state.
        nbytes: Length without padding.
    """

    layer: int
    attribute: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    nbytes: int

    def tensor(self, cache: Cache) -> torch.Tensor:
        """The live tensor of all rows: [rows, heads, columns, dim], or [rows, *shape] for state."""
        value = getattr(cache.layers[self.layer], self.attribute)
        found: torch.Tensor = value if self.index < 0 else value[self.index]
        return found


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

    @classmethod
    def of(cls, cache: Cache) -> RecordLayout:
        """Read the layout from a cache that has seen a forward of one row.

        Raises:
            UnsupportedModelError: The cache holds something that is neither per token nor per row.
        """
        tokens: list[Slot] = []
        states: list[Slot] = []
        for number, layer in enumerate(getattr(cache, "layers", ())):
            for attribute in TOKEN_ATTRIBUTES:
                tensor = getattr(layer, attribute, None)
                if tensor is None:
                    continue
                if tensor.ndim != 4:  # noqa: PLR2004 - [rows, heads, columns, dim]
                    raise UnsupportedModelError(
                        f"cache layer {number} ({type(layer).__name__}) holds {attribute} of shape"
                        f" {tuple(tensor.shape)}, not [rows, heads, columns, dim]"
                    )
                place = (number, attribute, -1)
                tokens.append(_slot(place, (tensor.shape[1], tensor.shape[3]), tensor, _end(tokens)))
            for attribute in STATE_ATTRIBUTES:
                held: dict[int, torch.Tensor | None] = getattr(layer, attribute, None) or {}
                for index, tensor in held.items():
                    if tensor is not None:
                        place = (number, attribute, index)
                        states.append(_slot(place, tuple(tensor.shape[1:]), tensor, _end(states)))
        if not tokens and not states:
            raise UnsupportedModelError("the model's cache holds no keys, values or states after a forward")
        return cls(tuple(tokens), tuple(states))

    def pack(self, cache: Cache, row: int, columns: torch.Tensor | slice) -> KVSlice:
        """Copy one row out of a cache.

        Args:
            cache: Live cache.
            row: Its row.
            columns: Which columns, oldest first: a slice, or an index tensor.
        """
        device = (self.token_slots or self.state_slots)[0].tensor(cache).device
        parts = [(slot, slot.tensor(cache)[row][:, columns]) for slot in self.token_slots]
        count = parts[0][1].shape[1] if parts else 0
        tokens = torch.zeros(count, self.record_bytes, dtype=torch.uint8, device=device)
        for slot, part in parts:
            flat = part.transpose(0, 1).reshape(count, -1)
            tokens[:, slot.offset : slot.offset + slot.nbytes] = flat.view(torch.uint8)
        state = torch.zeros(self.state_bytes, dtype=torch.uint8, device=device)
        for slot in self.state_slots:
            flat = slot.tensor(cache)[row].reshape(-1)
            state[slot.offset : slot.offset + slot.nbytes] = flat.view(torch.uint8)
        return KVSlice(tokens, state)

    def token_part(self, slot: Slot, kv: KVSlice) -> torch.Tensor:
        """One slot of a slice as the model knows it, shape [heads, n, dim]."""
        raw = kv.tokens[:, slot.offset : slot.offset + slot.nbytes].contiguous()
        return raw.view(slot.dtype).view(-1, *slot.shape).transpose(0, 1)

    def state_part(self, slot: Slot, kv: KVSlice) -> torch.Tensor:
        """One state of a slice, in the slot's shape."""
        raw = kv.state[slot.offset : slot.offset + slot.nbytes].contiguous()
        return raw.view(slot.dtype).view(slot.shape)


def _slot(place: tuple[int, str, int], shape: tuple[int, ...], tensor: torch.Tensor, offset: int) -> Slot:
    return Slot(*place, shape, tensor.dtype, offset, tensor.element_size() * math.prod(shape))


def _end(slots: tuple[Slot, ...] | list[Slot]) -> int:
    """First free, aligned byte behind the last slot."""
    if not slots:
        return 0
    end = slots[-1].offset + slots[-1].nbytes
    return -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
