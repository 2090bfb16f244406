"""The host pool: a fixed number of bytes of host RAM, in chunks, handed out by the byte.

    pool     [ chunk 0         | chunk 1         | chunk 2  )   last one smaller: exactly what is configured
    extents  [ a | b  | a           | free | c       | free )   an owner may have several, over chunk borders

Chunks exist because page-locking one huge region blocks CUDA and NVML calls of every process on the node
for as long as it takes; chunk by chunk, nobody waits longer than for one chunk.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from batond.offload.errors import HostPoolFullError, OffloadStateError, ReservationError
from batond.offload.extents import Extent, ExtentAllocator
from batond.offload.pinning import CudaPinner

if TYPE_CHECKING:
    from batond.offload.pinning import Pinner

logger = logging.getLogger(__name__)

#: A copy is cut where a chunk ends, and each piece costs the host 20 us; locking one takes 15 ms, for which
#: CUDA and NVML calls of others wait.
DEFAULT_CHUNK_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """Bytes of a pool that one owner holds.

    Attributes:
        nbytes: How many.
        extents: Where in the pool, in the order of the owner's bytes.
        whole: The reservation that this one is the beginning of; None if it is one of its own.
    """

    nbytes: int
    extents: tuple[Extent, ...]
    _pool: HostPool
    whole: Reservation | None = None

    def head(self, nbytes: int) -> Reservation:
        """The first bytes, to be read as long as the whole is held; can't be released by itself.

        Raises:
            ValueError: There are not so many.
        """
        if not 0 <= nbytes <= self.nbytes:
            raise ValueError(f"a reservation of {self.nbytes} bytes has no first {nbytes}")
        extents: list[Extent] = []
        missing = nbytes
        for extent in self.extents:
            part = min(missing, extent.nbytes)
            if part:
                extents.append(Extent(extent.start, part))
            missing -= part
        return Reservation(nbytes, tuple(extents), self._pool, self.whole or self)

    def views(self) -> list[torch.Tensor]:
        """The bytes as tensors, each uint8 of shape [m] within one chunk, in the order of the owner's bytes.

        Raises:
            ReservationError: It was released.
        """
        return self._pool.views(self)


class _Chunk:
    """One mapping. Pages are committed at first touch; unmapped when no view is left.

    Args:
        nbytes: Its size.
        huge: Ask for huge pages: touched and locked in half the time, read faster by checksums.
    """

    def __init__(self, nbytes: int, *, huge: bool) -> None:
        # Anonymous mappings begin at a page, so that two chunks' page locks never meet in one page, and go
        # back to the system as a whole.
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # The kernel has none.
                mapping.madvise(mmap.MADV_HUGEPAGE)
        self.array = np.frombuffer(mapping, dtype=np.uint8)
        self.tensor = torch.from_numpy(self.array)
        self.pinned = False

    def commit(self) -> None:
        """Touch every page, so that no copy waits for page faults."""
        self.array[:: mmap.PAGESIZE] = 0


class HostPool:
    """A bounded pool of host memory. Safe to use from several threads.

    Args:
        capacity_bytes: Exactly this many bytes can be reserved; 0 makes a pool that is always full.
        chunk_bytes: Size of one mapping and of one page-lock call.
        pin: Page-lock chunks for CUDA.
        pinner: Does the locking; default `CudaPinner` of the current device. Only used with `pin`.

    Attributes:
        capacity_bytes: As configured.
        pinned_bytes: Page-locked so far.
        pin_error: First refusal of a page lock. Such chunks are used unlocked: slower, no less right.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        pin: bool = False,
        pinner: Pinner | None = None,
    ) -> None:
        if capacity_bytes < 0 or chunk_bytes <= 0:
            raise ValueError(f"a pool of {capacity_bytes} bytes in chunks of {chunk_bytes} makes no sense")
        self.capacity_bytes = capacity_bytes
        self.pinned_bytes = 0
        self.pin_error: str | None = None
        self._chunk_bytes = chunk_bytes
        self._pinner: Pinner | None = (pinner or CudaPinner()) if pin and capacity_bytes else None
        self._chunks: list[_Chunk | None] = [None] * -(-capacity_bytes // chunk_bytes)
        self._chunk_lock = threading.Lock()  # Held while one chunk is made and page-locked.
        self._allocator = ExtentAllocator(capacity_bytes)
        self._live: set[Reservation] = set()
        self._lock = threading.Lock()  # Held for bookkeeping only.
        self._closing = threading.Event()
        self._warmer: threading.Thread | None = None
        # Also runs when a pool is dropped without close(): locked pages must not be unmapped under CUDA.
        self._finalizer = weakref.finalize(self, _drop_chunks, self._chunks, self._pinner)
        self._finalizer.atexit = False  # At exit threads can't be started any more; the driver cleans up.

    @property
    def free_bytes(self) -> int:
        """Bytes that can be reserved now."""
        return self._allocator.free_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes that are reserved now."""
        return self.capacity_bytes - self._allocator.free_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the chunks made so far."""
        return sum(self._chunk_size(at) for at, chunk in enumerate(self._chunks) if chunk is not None)

    def reserve(self, nbytes: int) -> Reservation:
        """Take bytes from the pool. Their content is undefined.

        Args:
            nbytes: How many; 0 is legal and takes nothing.

        Raises:
            HostPoolFullError: Fewer are free; nothing was taken.
            OffloadStateError: The pool is closed.
            MemoryError: The system has no memory for a new chunk; nothing was taken.
        """
        if nbytes < 0:
            raise ValueError(f"can't reserve {nbytes} bytes")
        with self._lock:
            self._check_open()
            extents = self._allocator.take(nbytes)
            if extents is None:
                raise HostPoolFullError(
                    f"the host pool has {self.free_bytes} of {self.capacity_bytes} bytes free,"
                    f" {nbytes} are needed",
                    needed_bytes=nbytes,
                    free_bytes=self.free_bytes,
                    capacity_bytes=self.capacity_bytes,
                )
            reservation = Reservation(nbytes, extents, self)
            self._live.add(reservation)
        try:
            for extent in extents:
                for at in range(extent.start // self._chunk_bytes, -(-extent.end // self._chunk_bytes)):
                    self._make_chunk(at)
        except BaseException:
            self.release(reservation)
            raise
        return reservation

    def release(self, reservation: Reservation) -> None:
        """Give bytes back. No copy may be reading or writing them.

        Raises:
            ReservationError: It was released before, or is another pool's; nothing has changed.
        """
        with self._lock:
            self._check_live(reservation)
            self._live.remove(reservation)
            self._allocator.give_back(reservation.extents)

    def views(self, reservation: Reservation) -> list[torch.Tensor]:
        """See `Reservation.views`."""
        with self._lock:
            self._check_live(reservation.whole or reservation)
        found: list[torch.Tensor] = []
        for extent in reservation.extents:
            position = extent.start
            while position < extent.end:
                at, offset = divmod(position, self._chunk_bytes)
                length = min(extent.end - position, self._chunk_bytes - offset)
                chunk = self._chunks[at]
                if chunk is None:
                    raise OffloadStateError("the host pool is closed")
                found.append(chunk.tensor[offset : offset + length])
                position += length
        return found

    def warm_up(self) -> threading.Thread:
        """Make, commit and page-lock all chunks in a background thread, lowest first; once.

        Returns:
            The thread; joining it waits for the whole pool.
        """
        with self._lock:
            self._check_open()
            if self._warmer is None:
                self._warmer = threading.Thread(target=self._warm, name="batond-host-pool", daemon=True)
                self._warmer.start()
            return self._warmer

    def check_integrity(self) -> None:
        """Raise AssertionError unless reservations and free ranges tile the pool exactly."""
        with self._lock:
            self._allocator.check_integrity([extent for held in self._live for extent in held.extents])
            for held in self._live:
                if held.nbytes != sum(extent.nbytes for extent in held.extents):
                    raise AssertionError(f"reservation of {held.nbytes} bytes has {held.extents}")
            if sum(held.nbytes for held in self._live) != self.used_bytes:
                raise AssertionError(f"used_bytes is {self.used_bytes}, reservations hold another sum")

    def close(self) -> None:
        """Unlock and give up all memory; closing twice is harmless.

        Raises:
            OffloadStateError: Bytes are still reserved; close their owner first.
        """
        with self._lock:
            if self._live:
                raise OffloadStateError(f"{self.used_bytes} bytes of the host pool are still reserved")
            self._closing.set()
            warmer = self._warmer
        if warmer is not None:
            warmer.join()
        with self._chunk_lock:
            self._finalizer()
            self.pinned_bytes = 0

    def _chunk_size(self, at: int) -> int:
        return min(self._chunk_bytes, self.capacity_bytes - at * self._chunk_bytes)

    def _make_chunk(self, at: int, *, commit: bool = False) -> None:
        """Make the chunk if there is none yet. Touches pages only before anybody can own them."""
        if self._chunks[at] is not None:  # Without the lock: nobody waits for the page lock of another chunk.
            return
        with self._chunk_lock:
            if self._chunks[at] is not None:
                return
            try:
                chunk = _Chunk(self._chunk_size(at), huge=self._pinner is not None)
            except OSError as error:
                raise MemoryError(f"no memory for a chunk of {self._chunk_size(at)} bytes") from error
            if commit:
                chunk.commit()
            if self._pinner is not None:
                self._pin(chunk)
            self._chunks[at] = chunk

    def _pin(self, chunk: _Chunk) -> None:
        if self._pinner is None:
            return
        try:
            self._pinner.pin(chunk.tensor.data_ptr(), chunk.tensor.numel())
        except Exception as error:  # noqa: BLE001 - whatever the driver says, the memory is good
            if self.pin_error is None:
                self.pin_error = str(error) or type(error).__name__
                logger.warning(
                    "the host pool can't be page-locked, copies will be slower: %s", self.pin_error
                )
        else:
            chunk.pinned = True
            self.pinned_bytes += chunk.tensor.numel()

    def _warm(self) -> None:
        for at in range(len(self._chunks)):
            if self._closing.is_set():
                return
            try:
                self._make_chunk(at, commit=True)
            except MemoryError as error:  # Not fatal: the next reserve() meets it and says so.
                logger.warning("the host pool was warmed up in part only: %s", error)
                return

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise OffloadStateError("the host pool is closed")

    def _check_live(self, reservation: Reservation) -> None:
        if reservation not in self._live:
            raise ReservationError(
                f"the reservation of {reservation.nbytes} bytes was released already, or is another pool's"
            )


def _drop_chunks(chunks: list[_Chunk | None], pinner: Pinner | None) -> None:
    """Unlock and unmap; keeps no reference to the pool."""
    for at, chunk in enumerate(chunks):
        if pinner is not None and chunk is not None and chunk.pinned:
            try:
                pinner.unpin(chunk.tensor.data_ptr())
            except Exception:  # the others must be unlocked all the same
                logger.exception("a chunk of the host pool can't be unlocked")
        chunks[at] = None
    if pinner is not None:
        pinner.close()
