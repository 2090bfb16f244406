"""Moves complete slices between the host pool and the second tier, for the store.

    pool alone ── begin_write ──> written ── make_room ──> file alone ── begin_fetch ──> both again
    good in the pool              good in both             good in the file

A slice that is written keeps its bytes in the pool until somebody needs them: then they are room at once, and
whoever comes back before that is read from no disk. At every moment at least one complete copy is left alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batond.offload.errors import HostPoolFullError
from batond.offload.poison import fill

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from batond.offload.entries import Entry
    from batond.offload.pool import HostPool, Reservation
    from batond.offload.spill import SpillTier


class Spiller:
    """Keeps the books of entries that are in files, or on their way. For the store's thread.

    Args:
        pool: Of the store.
        entries: The store's, by owner.
        tier: The files; None keeps everything in the pool.
        poison: As the store's.

    Attributes:
        tier: As given.
        spare_bytes: Bytes of the pool that are in files, too: room for whoever needs it.
        writing_bytes: Bytes of the pool that will be, once their writes are done.
    """

    def __init__(
        self, pool: HostPool, entries: Mapping[str, Entry], tier: SpillTier | None, *, poison: bool
    ) -> None:
        self.tier = tier
        self.spare_bytes = 0
        self.writing_bytes = 0
        self._pool, self._entries, self._poison = pool, entries, poison
        self._spare: dict[Entry, None] = {}  # The first to give its bytes first.
        self._busy: dict[Entry, None] = {}  # In both, but a copy to the device reads the pool's, or will.
        self._pinned: dict[Entry, None] = {}
        self._jobs: dict[Entry, None] = {}
        self._ended: list[tuple[str, bool]] = []

    def take_ended(self) -> list[tuple[str, bool]]:
        """Owners whose writes are over since the last call, and whether they are in files."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def jobs(self) -> int:
        """Writes and reads under way."""
        return len(self._jobs)

    def pool_bytes(self, owner_id: str) -> int:
        """Bytes of the pool that an owner's slice takes."""
        entry = self._entries.get(owner_id)
        return entry.pool_bytes if entry else 0

    def in_pool_alone(self, owner_id: str) -> bool:
        """Whether the owner's slice is in the pool, and in no file nor on its way to one."""
        entry = self._entries.get(owner_id)
        return entry is not None and _in_pool_alone(entry)

    def begin_write(self, owner_id: str) -> bool:
        """Begin to write a complete slice to a file; it stays in the pool, and can be loaded all the time.

        Returns:
            Whether it was begun. Not for one that is in a file or on its way, or that is being copied, or
            where there is no room.
        """
        entry = self._entries.get(owner_id)
        if self.tier is None or entry is None or not _in_pool_alone(entry):
            return False
        if not entry.resting or not entry.header.body_bytes:
            return False
        entry.job = self.tier.write(owner_id, bytes(entry.sealed), entry.held().views())
        if entry.job is None:
            return False
        self._jobs[entry] = None
        self.writing_bytes += entry.header.body_bytes
        return True

    def begin_fetch(self, owner_id: str) -> bool:
        """Begin to read a slice that is in a file alone back into the pool, if it is not under way.

        Returns:
            Whether a load would have to wait for that.

        Raises:
            HostPoolFullError: There is no room for it; nothing has changed.
        """
        entry = self._entries.get(owner_id)
        return entry is not None and self._begin_fetch(entry)

    def wait_fetch(self, owner_id: str, timeout_s: float) -> bool:
        """Wait for a read that was begun, at most so long; returns whether there is one."""
        entry = self._entries.get(owner_id)
        if entry is None or entry.job is None or entry.arriving is None:
            return False
        entry.job.wait(timeout_s)
        self.settle()
        return True

    def pin(self, owner_id: str) -> None:
        """Keep a slice that is in the pool there until `unpin_all`: a load is about to begin."""
        entry = self._entries.get(owner_id)
        if entry is not None and entry.reservation is not None:
            self._pinned[entry] = None
            if self._not_spare(entry):
                self._busy[entry] = None

    def unpin_all(self) -> None:
        """What was pinned is room again, where it is in files and nothing reads it."""
        pinned, self._pinned = self._pinned, {}
        self._free_idle(pinned)

    def bring(self, entry: Entry) -> None:
        """Have a slice in the pool, whatever that takes; one that is lost stays lost.

        Raises:
            HostPoolFullError: There is no room for it.
        """
        if self._begin_fetch(entry) and entry.job is not None:
            entry.job.wait()
            self._end(entry)

    def reserve(self, nbytes: int) -> Reservation:
        """Take bytes from the pool; slices that are in files make room, nothing else does.

        Raises:
            HostPoolFullError: That is not enough; nothing has changed.
        """
        if self._pool.free_bytes < nbytes <= self._pool.free_bytes + self.spare_bytes:
            for entry in list(self._spare):
                if self._pool.free_bytes >= nbytes:
                    break
                self._give_room(entry)
        return self._pool.reserve(nbytes)

    def settle(self) -> None:
        """Take in what writes and reads have come to. Cheap; call it once a step."""
        for entry in [entry for entry in self._jobs if entry.job is not None and entry.job.done()]:
            self._end(entry)
        self._free_idle(self._busy)

    def use_now(self, entry: Entry) -> None:
        """A copy to the device begins: its bytes are no room until that is over."""
        if self._not_spare(entry):
            self._busy[entry] = None

    def let_go(self, entry: Entry) -> None:
        """An entry is retired: stop what is under way, and remove its file."""
        if entry.job is not None:
            entry.job.cancel()
            del self._jobs[entry]
            if entry.arriving is None:
                self.writing_bytes -= entry.header.body_bytes
        self._not_spare(entry)
        self._busy.pop(entry, None)
        self._pinned.pop(entry, None)
        if entry.file is not None and self.tier is not None:
            self.tier.drop(entry.file)
            entry.file = None

    def release(self, entry: Entry) -> None:
        """Give all bytes of a retired entry back; its job, if there was one, is done."""
        job, writing = entry.job, entry.arriving is None
        if job is not None and writing and job.kept and self.tier is not None:
            self.tier.drop(job.file)  # Complete before it heard of its end.
        entry.job = None
        for held in (entry.reservation, entry.arriving):
            if held is not None:
                self._give_back(held)
        entry.reservation = entry.arriving = None

    def check_integrity(self) -> None:
        """Raise AssertionError where the books contradict the entries."""
        spare = sum(entry.header.body_bytes for entry in self._spare)
        writing = sum(entry.header.body_bytes for entry in self._jobs if entry.arriving is None)
        if (spare, writing) != (self.spare_bytes, self.writing_bytes):
            raise AssertionError(
                f"{spare} bytes are spare and {writing} being written,"
                f" counted were {self.spare_bytes} and {self.writing_bytes}"
            )
        for entry in (*self._spare, *self._busy):
            if entry.reservation is None or entry.file is None:
                raise AssertionError(f"the slice of {entry.header.owner_id} is not in both tiers")
        if any(not entry.resting or entry in self._pinned for entry in self._spare):
            raise AssertionError("bytes that a copy reads, or will, are counted as room")
        for entry in self._jobs:
            if entry.job is None or (entry.arriving is None) != (entry.file is None):
                raise AssertionError(f"the slice of {entry.header.owner_id} is under way to nowhere")

    def _begin_fetch(self, entry: Entry) -> bool:
        if self.tier is None or entry.file is None or entry.reservation is not None:
            return False
        if entry.job is None:
            try:
                entry.arriving = self.reserve(entry.header.body_bytes)
            except MemoryError as error:
                raise HostPoolFullError("the system has no memory for the host pool") from error
            entry.job = self.tier.read(entry.file, bytes(entry.sealed), entry.arriving.views())
            self._jobs[entry] = None
        return True

    def _end(self, entry: Entry) -> None:
        """Take in a job that is done."""
        job, arriving = entry.job, entry.arriving
        del self._jobs[entry]
        entry.job = entry.arriving = None
        if job is None:
            return
        if arriving is None:
            self.writing_bytes -= entry.header.body_bytes
            self._ended.append((entry.header.owner_id, job.kept))
            if job.kept:
                entry.file = job.file
                self._now_spare(entry)
        elif job.error is None:
            entry.reservation = arriving
            self._now_spare(entry)
        else:
            self._give_back(arriving)
            entry.lost = str(job.error)
            if self.tier is not None:
                self.tier.drop(job.file)
            entry.file = None

    def _free_idle(self, entries: Iterable[Entry]) -> None:
        """Of entries, count those as room that are busy no longer."""
        for entry in [entry for entry in entries if entry in self._busy and entry.resting]:
            if entry not in self._pinned:
                del self._busy[entry]
                self._now_spare(entry)

    def _now_spare(self, entry: Entry) -> None:
        if entry.resting and entry not in self._pinned:
            self._spare[entry] = None
            self.spare_bytes += entry.header.body_bytes
        else:
            self._busy[entry] = None

    def _not_spare(self, entry: Entry) -> bool:
        """Count its bytes as room no longer; returns whether they were."""
        if entry not in self._spare:
            return False
        del self._spare[entry]
        self.spare_bytes -= entry.header.body_bytes
        return True

    def _give_room(self, entry: Entry) -> None:
        self._not_spare(entry)
        self._give_back(entry.held())
        entry.reservation = None

    def _give_back(self, held: Reservation) -> None:
        if self._poison:
            fill(held.views())
        self._pool.release(held)


def _in_pool_alone(entry: Entry) -> bool:
    return entry.reservation is not None and entry.file is None and entry.job is None
