"""An aligned buffer between bytes that lie anywhere and a disk that takes blocks."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt
    import torch

    Bytes = npt.NDArray[np.uint8]

#: Direct I/O wants offsets, lengths and addresses in multiples of the device's block; all devices take this.
ALIGN_BYTES: Final = 4096


class Staging:
    """An aligned buffer of one piece, made when it is first needed. For one thread.

    Args:
        nbytes: Of a piece; a header longer than that makes it grow.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._buffer: Bytes | None = None

    def room(self, nbytes: int) -> memoryview:
        """The first bytes of the buffer."""
        return self._array(nbytes)[:nbytes].data

    def take(self, parts: list[Bytes]) -> memoryview:
        """Copy bytes in, and pad them."""
        size = sum(part.size for part in parts)
        array, at = self._array(padded(size)), 0
        for part in parts:
            array[at : at + part.size] = part
            at += part.size
        array[size : padded(size)] = 0
        return array[: padded(size)].data

    def give(self, parts: list[Bytes]) -> None:
        """Copy bytes out."""
        array, at = self._array(0), 0
        for part in parts:
            part[:] = array[at : at + part.size]
            at += part.size

    def _array(self, nbytes: int) -> Bytes:
        if self._buffer is None or self._buffer.size < nbytes:
            mapping = mmap.mmap(-1, max(self._nbytes, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._buffer = np.frombuffer(mapping, dtype=np.uint8)
        return self._buffer


def pieces(body: list[torch.Tensor], nbytes: int) -> Iterator[list[Bytes]]:
    """Cut a body into pieces of so many bytes, wherever its parts end; the last may be shorter."""
    piece: list[Bytes] = []
    missing = nbytes
    for part in body:
        rest = part.numpy()
        while rest.size:
            head, rest = rest[:missing], rest[missing:]
            piece.append(head)
            missing -= head.size
            if not missing:
                yield piece
                piece, missing = [], nbytes
    if piece:
        yield piece


def padded(nbytes: int) -> int:
    """As many bytes in whole blocks."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
