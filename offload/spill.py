"""The second tier: slices in files, written and read by threads of its own. Knows bytes; knows no model.

    file     [ length, sealed header, padding | body | padding ]     blocks of 4 KiB
    thread   pool or file <──> staging, a piece <──> file or pool    one piece in memory a direction

Pieces go through an aligned buffer, for direct I/O takes no others and a pool hands out single bytes.
Whatever goes wrong ends in a slice that is in the host pool as before, or in one that must be recomputed.
"""

from __future__ import annotations

import errno
import logging
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from batond.offload.staging import ALIGN_BYTES, Staging, padded, pieces

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

    import torch

    from batond.offload.folder import SpillFolder

logger = logging.getLogger(__name__)

#: Bytes of a piece: large enough for a disk at full speed, small enough to stop for a cancelled query.
PIECE_BYTES: Final = 16 << 20
#: After a write that failed nothing is written for so long, doubled with each further failure.
REST_S: Final = 5.0
MOST_REST_S: Final = 60.0

_LENGTH = struct.Struct("<I")
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class SpillFile:
    """A file of the tier.

    Attributes:
        name: In the directory.
        nbytes: What it takes of the tier, padding included.
        body_bytes: Bytes of the slice.
    """

    name: str
    nbytes: int
    body_bytes: int


@dataclass(frozen=True, slots=True)
class SpillUse:
    """The tier as it stands; counters since the start.

    Attributes:
        capacity_bytes: Most bytes of files; 0 where there is no second tier.
        used_bytes: Bytes of files, those being written or removed included.
        files: How many.
        spills: Slices written.
        fetches: Slices read.
        failures: Writes and reads that failed: no space, a broken disk, a file that is gone or damaged.
        bytes_out: Of slices written.
        bytes_in: Of slices read.
        resting: Whether writing pauses after a failure.
    """

    capacity_bytes: int = 0
    used_bytes: int = 0
    files: int = 0
    spills: int = 0
    fetches: int = 0
    failures: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    resting: bool = False


class DamagedFileError(Exception):
    """A file is not what was written."""


class SpillJob:
    """A write or a read under way.

    Attributes:
        file: What is written or read.
        error: Why it failed; read it, and `kept`, once it is done.
        kept: Whether a write has left its file.
    """

    def __init__(self, file: SpillFile) -> None:
        self.file = file
        self.error: Exception | None = None
        self.kept = False
        self.cancelled = False
        self.future: Future[None] | None = None

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self.future is None or self.future.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it is over, or for so long."""
        if self.future is not None:
            with suppress(TimeoutError):
                self.future.result(timeout_s)

    def cancel(self) -> None:
        """Have it end after the piece that is under way; what it has written is removed."""
        self.cancelled = True


class SpillTier:
    """Writes slices to files and reads them back, one at a time in each direction.

    Calls return at once; the work is done by a thread a direction, so that a read waits for no write.

    Args:
        folder: Where the files are.
        capacity_bytes: Most bytes of them.
        piece_bytes: Of one system call; a multiple of `ALIGN_BYTES`.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        folder: SpillFolder,
        capacity_bytes: int,
        *,
        piece_bytes: int = PIECE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if piece_bytes <= 0 or piece_bytes % ALIGN_BYTES or capacity_bytes < 0:
            raise ValueError(f"{capacity_bytes} bytes in pieces of {piece_bytes} make no sense")
        self.capacity_bytes = capacity_bytes
        self._folder, self._piece_bytes, self._clock = folder, piece_bytes, clock
        self._out = ThreadPoolExecutor(1, thread_name_prefix="batond-spill-out")
        self._in = ThreadPoolExecutor(1, thread_name_prefix="batond-spill-in")
        self._out_staging, self._in_staging = Staging(piece_bytes), Staging(piece_bytes)
        self._lock = threading.Lock()  # Held for bookkeeping only.
        self._used_bytes = self._files = self._spills = self._fetches = self._failures = 0
        self._bytes_out = self._bytes_in = 0
        self._dropped_bytes = 0
        self._rest_s, self._rested_s = REST_S, -1.0
        self._open = True

    @property
    def path(self) -> Path:
        """The directory."""
        return self._folder.path

    @property
    def free_bytes(self) -> int:
        """Bytes of files that may still be written; 0 after a failure, for a while."""
        return 0 if self.resting else self.capacity_bytes - self._used_bytes

    @property
    def dropped_bytes(self) -> int:
        """Bytes of files that are about to be removed: soon free, too."""
        return self._dropped_bytes

    @property
    def resting(self) -> bool:
        """Whether nothing is written for a while."""
        return self._clock() < self._rested_s

    @property
    def use(self) -> SpillUse:
        """The tier as it stands."""
        with self._lock:
            return SpillUse(
                capacity_bytes=self.capacity_bytes,
                used_bytes=self._used_bytes,
                files=self._files,
                spills=self._spills,
                fetches=self._fetches,
                failures=self._failures,
                bytes_out=self._bytes_out,
                bytes_in=self._bytes_in,
                resting=self.resting,
            )

    def write(self, owner_id: str, sealed: bytes, body: list[torch.Tensor]) -> SpillJob | None:
        """Begin to write a slice.

        Args:
            owner_id: Whose; only a hash of it is seen.
            sealed: Its header with checksum.
            body: Its bytes, each uint8 of shape [m]; not to be changed until the job is done.

        Returns:
            None if there is no room.
        """
        body_bytes = sum(part.numel() for part in body)
        nbytes = padded(_LENGTH.size + len(sealed)) + padded(body_bytes)
        if nbytes > self.free_bytes:
            return None
        job = SpillJob(SpillFile(self._folder.new_name(owner_id), nbytes, body_bytes))
        with self._lock:
            self._used_bytes += nbytes
            self._files += 1
        job.future = self._out.submit(self._run_write, job, sealed, body)
        return job

    def read(self, file: SpillFile, sealed: bytes, body: list[torch.Tensor]) -> SpillJob:
        """Begin to read a slice; its checksum is for the caller to check.

        Args:
            file: Of a write that has succeeded.
            sealed: What its header must be.
            body: Where to, as many bytes as it has; undefined until the job is done, and if it fails.
        """
        job = SpillJob(file)
        job.future = self._in.submit(self._run_read, job, sealed, body)
        return job

    def drop(self, file: SpillFile) -> None:
        """Remove a file, in the background."""
        if self._open:
            with self._lock:
                self._dropped_bytes += file.nbytes
            self._out.submit(self._remove_dropped, file)

    def close(self) -> None:
        """Wait for what is under way, and remove every file."""
        if self._open:
            self._open = False
            self._out.shutdown(wait=True)
            self._in.shutdown(wait=True)
            self._folder.close()

    # -- on the threads

    def _run_write(self, job: SpillJob, sealed: bytes, body: list[torch.Tensor]) -> None:
        try:
            job.kept = not job.cancelled and self._write(job, sealed, body)
        except Exception as error:  # noqa: BLE001 - whatever a disk does, the slice stays where it is
            job.error = error
            self._note_failed_write(error)
        if not job.kept:
            self._remove(job.file)

    def _run_read(self, job: SpillJob, sealed: bytes, body: list[torch.Tensor]) -> None:
        try:
            if not job.cancelled:
                self._read(job, sealed, body)
        except Exception as error:  # noqa: BLE001 - whatever a disk does, it is one slice that is lost
            job.error = error
            with self._lock:
                self._failures += 1
            logger.warning("a spilled slice of %d bytes is lost: %s", job.file.body_bytes, error)

    def _write(self, job: SpillJob, sealed: bytes, body: list[torch.Tensor]) -> bool:
        """Write a file; returns whether it is complete, and not cancelled meanwhile."""
        folder, staging = self._folder, self._out_staging
        if folder.free_bytes() < job.file.nbytes:
            raise OSError(errno.ENOSPC, "the space left is for others")
        fd = folder.create(job.file.name)
        try:
            head = staging.take([np.frombuffer(_LENGTH.pack(len(sealed)) + sealed, dtype=np.uint8)])
            offset = self._put(fd, head, 0)
            for piece in pieces(body, self._piece_bytes):
                if job.cancelled:
                    return False
                offset = self._put(fd, staging.take(piece), offset)
            folder.settle(fd)
        finally:
            folder.shut(fd)
        folder.publish(job.file.name)
        with self._lock:
            self._spills += 1
            self._bytes_out += job.file.body_bytes
            self._rest_s = REST_S
        return True

    def _put(self, fd: int, piece: memoryview, offset: int) -> int:
        while piece:
            count = self._folder.write(fd, piece, offset)
            if count <= 0 or count % ALIGN_BYTES:
                raise OSError(errno.EIO, f"{count} of {len(piece)} bytes were written")
            piece, offset = piece[count:], offset + count
        return offset

    def _read(self, job: SpillJob, sealed: bytes, body: list[torch.Tensor]) -> None:
        folder, staging = self._folder, self._in_staging
        fd = folder.open(job.file.name)
        try:
            expected = _LENGTH.pack(len(sealed)) + sealed
            offset = padded(len(expected))
            head = staging.room(offset)
            self._get(fd, head, 0)
            if bytes(head[: len(expected)]) != expected:
                raise DamagedFileError("the header is another")
            for piece in pieces(body, self._piece_bytes):
                if job.cancelled:
                    return
                found = staging.room(padded(sum(part.size for part in piece)))
                offset = self._get(fd, found, offset)
                staging.give(piece)
        finally:
            folder.shut(fd)
        with self._lock:
            self._fetches += 1
            self._bytes_in += job.file.body_bytes

    def _get(self, fd: int, piece: memoryview, offset: int) -> int:
        while piece:
            count = self._folder.read(fd, piece, offset)
            if count <= 0 or count % ALIGN_BYTES:
                raise DamagedFileError(f"{count} of {len(piece)} bytes came")
            piece, offset = piece[count:], offset + count
        return offset

    def _remove_dropped(self, file: SpillFile) -> None:
        self._remove(file)
        with self._lock:
            self._dropped_bytes -= file.nbytes

    def _remove(self, file: SpillFile) -> None:
        try:
            self._folder.remove(file.name)
        except OSError as error:  # Its bytes stay taken, as they are on the disk.
            logger.warning("a spilled file can't be removed: %s", error)
            return
        with self._lock:
            self._used_bytes -= file.nbytes
            self._files -= 1

    def _note_failed_write(self, error: Exception) -> None:
        with self._lock:
            rest_s, self._rest_s = self._rest_s, min(2 * self._rest_s, MOST_REST_S)
            self._failures += 1
            self._rested_s = self._clock() + rest_s
        if isinstance(error, OSError) and error.errno in _FULL:
            logger.info("the disk of the spill directory is full; nothing is spilled for %.0f s", rest_s)
        else:
            logger.warning("a slice can't be spilled; the next try is in %.0f s: %s", rest_s, error)
