"""The header that travels with every parked slice, and the checksum over header and body."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from batond.offload.errors import SliceCorruptError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

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


def seal(header: SliceHeader, body: Iterable[torch.Tensor]) -> tuple[bytes, int]:
    """Encode the header and put the checksum of header and body behind it.

    Args:
        header: Describes the body.
        body: Host bytes, each uint8 of shape [m]; read in place.

    Returns:
        Sealed header, and the checksum in it.
    """
    encoded = header.encode()
    checksum = checksum_of(encoded, body)
    return encoded + _CHECKSUM.pack(checksum), checksum


def unseal(sealed: bytes) -> tuple[SliceHeader, int]:
    """Decode a sealed header.

    Returns:
        The header, and the checksum it claims. Whether it is true is another question: see `checksum_of`.

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


def checksum_of(encoded_header: bytes, body: Iterable[torch.Tensor]) -> int:
    """XXH3, 64 bits, over header and body.

    Finds damage, not forgery: the bytes never leave the process, or a directory of its own.

    Args:
        encoded_header: Without checksum.
        body: Host bytes, each uint8 of shape [m]; read in place.
    """
    digest = xxhash.xxh3_64(encoded_header)
    for part in body:
        digest.update(part.numpy().data)
    return int(digest.intdigest())


def split_seal(sealed: bytes) -> bytes:
    """The encoded header of a sealed one."""
    return sealed[: -_CHECKSUM.size]
