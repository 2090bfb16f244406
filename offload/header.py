"""The header that travels with every parked slice, and the checksum over header and body."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from batond.offload.errors import SliceCorruptError

if TYPE_CHECKING:
    from batond.offload.slice import KVSlice

MAGIC = b"BATONKV1"
#: Magic, tokens, record bytes, state bytes, lengths of owner and of layout hash, which follow in UTF-8.
_FIXED = struct.Struct("<8sQQQII")
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class SliceHeader:
    """Whose bytes these are, and how they are laid out.

    Attributes:
        owner_id: The query.
        n_tokens: Records held.
        record_bytes: Bytes of one token.
        state_bytes: Bytes of what doesn't grow with tokens.
        layout_hash: Digest of the record layout the bytes were written with.
    """

    owner_id: str
    n_tokens: int
    record_bytes: int
    state_bytes: int
    layout_hash: str

    @property
    def body_bytes(self) -> int:
        """Bytes of records and state together."""
        return self.n_tokens * self.record_bytes + self.state_bytes

    def encode(self) -> bytes:
        """The header as bytes, without checksum."""
        owner, layout = self.owner_id.encode(), self.layout_hash.encode()
        fixed = _FIXED.pack(
            MAGIC, self.n_tokens, self.record_bytes, self.state_bytes, len(owner), len(layout)
        )
        return fixed + owner + layout


def describe(owner_id: str, kv: KVSlice, layout_hash: str) -> SliceHeader:
    """The header of a slice.

    Raises:
        ValueError: It isn't made of contiguous bytes.
    """
    for tensor, dimensions in ((kv.tokens, 2), (kv.state, 1)):
        if tensor.dtype != torch.uint8 or tensor.ndim != dimensions or not tensor.is_contiguous():
            raise ValueError(
                f"a slice is contiguous uint8, not {tensor.dtype} of shape {tuple(tensor.shape)},"
                f" strides {tensor.stride()}"
            )
    return SliceHeader(owner_id, kv.n_tokens, kv.tokens.shape[1], kv.state.numel(), layout_hash)


def seal(header: SliceHeader, checksum: int) -> bytes:
    """Encode the header and put the checksum of header and body behind it.

    Args:
        header: Describes the body.
        checksum: See `checks.py`.
    """
    return header.encode() + _CHECKSUM.pack(checksum)


def unseal(sealed: bytes) -> tuple[SliceHeader, int]:
    """Decode a sealed header.

    Returns:
        The header, and the checksum it claims. Whether it is true is another question: see `checks.py`.

    Raises:
        SliceCorruptError: It can't be a header.
    """
    try:
        magic, n_tokens, record_bytes, state_bytes, owner_length, layout_length = _FIXED.unpack_from(sealed)
        (checksum,) = _CHECKSUM.unpack_from(sealed, len(sealed) - _CHECKSUM.size)
        texts = sealed[_FIXED.size : len(sealed) - _CHECKSUM.size]
        owner, layout = texts[:owner_length].decode(), texts[owner_length:].decode()
    except (struct.error, UnicodeDecodeError) as error:
        raise SliceCorruptError("the header of a parked slice can't be decoded") from error
    if magic != MAGIC or len(texts) != owner_length + layout_length:
        raise SliceCorruptError("the header of a parked slice is none")
    return SliceHeader(owner, n_tokens, record_bytes, state_bytes, layout), checksum
