"""Checksums of parked slices, computed beside whoever waits for something better.

    body     [ block | block | block | rest ]     XXH3 of each, several threads at once
    checksum   XXH3 over the header, then those of the blocks

Half a gigabyte takes one core 50 ms, five times as long as its copy to the host.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    import torch

BLOCK_BYTES: Final = 16 << 20
INLINE_BYTES: Final = 1 << 20
#: Beyond some threads the memory is the limit; and others want cores, too.
MOST_THREADS: Final = 4


class Check:
    """A checksum under way.

    Args:
        encoded_header: Without checksum.
        blocks: The digests of the body's blocks, in order: as futures, or computed when they are asked for.
    """

    def __init__(self, encoded_header: bytes, blocks: list[Future[bytes]] | Iterator[bytes]) -> None:
        self._header = encoded_header
        self._blocks = blocks
        self._value: int | None = None

    @property
    def done(self) -> bool:
        """Whether `value` won't wait for long."""
        return not isinstance(self._blocks, list) or all(block.done() for block in self._blocks)

    def value(self) -> int:
        """Wait for the checksum: 64 bits."""
        if self._value is None:
            blocks = self._blocks
            if isinstance(blocks, list):
                blocks = (block.result() for block in blocks)
            digest = xxhash.xxh3_64(self._header)
            for block in blocks:
                digest.update(block)
            self._value = int(digest.intdigest())
        return self._value


class Checker:
    """Computes checksums on threads of its own; xxhash lets others run meanwhile.

    Args:
        block_bytes: What one thread does at a time. Part of the format: other blocks give other checksums.
        inline_bytes: A body of no more is not worth a thread: done when its checksum is asked for.
    """

    def __init__(self, *, block_bytes: int = BLOCK_BYTES, inline_bytes: int = INLINE_BYTES) -> None:
        self._block_bytes, self._inline_bytes = block_bytes, inline_bytes
        self._threads: ThreadPoolExecutor | None = None

    def begin(self, encoded_header: bytes, body: list[torch.Tensor]) -> Check:
        """Begin to compute a checksum.

        Finds damage, not forgery: the bytes never leave the process, or a directory of its own.

        Args:
            encoded_header: Without checksum.
            body: Host bytes, each uint8 of shape [m]; read in place, until the check is done.
        """
        blocks = _blocks(body, self._block_bytes)
        if sum(part.numel() for part in body) <= self._inline_bytes:
            return Check(encoded_header, map(_digest, blocks))
        if self._threads is None:
            threads = min(MOST_THREADS, max(1, (os.cpu_count() or 1) // 2))
            self._threads = ThreadPoolExecutor(threads, thread_name_prefix="batond-check")
        return Check(encoded_header, [self._threads.submit(_digest, block) for block in blocks])

    def close(self) -> None:
        """End the threads, when what they do is done; they come again when they are needed."""
        if self._threads is not None:
            self._threads.shutdown(wait=True)
            self._threads = None


def _digest(block: list[torch.Tensor]) -> bytes:
    digest = xxhash.xxh3_128()
    for part in block:
        digest.update(part.numpy().data)
    return bytes(digest.digest())


def _blocks(body: list[torch.Tensor], nbytes: int) -> Iterator[list[torch.Tensor]]:
    """Cut a body into blocks of so many bytes, wherever its parts end; the last may be shorter."""
    block: list[torch.Tensor] = []
    missing = nbytes
    for whole in body:
        part = whole
        while part.numel():
            head, part = part[:missing], part[missing:]
            block.append(head)
            missing -= head.numel()
            if not missing:
                yield block
                block, missing = [], nbytes
    if block:
        yield block
