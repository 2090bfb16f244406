"""Which slices go to disk, when, and who waits for one to come back.

    bytes of the pool     [ of slices that lie here alone | being written | written: room | free ]
    kept at least                                          <──────── ahead of need ────────────>

A park must not wait for a disk, so slices are written before their room is needed: idle sessions first, the
one unused for longest before all, then parked queries, the last to be resumed before all. Nor does the batch
wait for a read: a query whose slice is in a file gets its row in a step after it has come.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from batond.daemon.scheduler.lanes import PARKED, Walk
from batond.offload.errors import HostPoolFullError
from batond.offload.staging import ALIGN_BYTES, padded

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator

    from batond.daemon.engine.queries.query import Query
    from batond.daemon.engine.queries.residency import Residency
    from batond.daemon.scheduler.line import Line
    from batond.offload.spill import SpillTier

#: Part of the pool that is kept ready for parks: a quarter.
READY_SHARE: Final = 4
#: Room is kept for so many of the longest rows, at least: so many parks a step often has.
READY_ROWS: Final = 2
#: Writes and reads begun at once. One of each runs; what comes behind them should be chosen late.
MOST_JOBS: Final = 3
#: Both tiers are full, and there is no room to read to: after so many steps somebody is computed again. Those
#: who are resumed meanwhile make room.
PATIENCE_STEPS: Final = 8
#: While nobody has a row, a step waits so long for reads, all together, instead of running idle.
IDLE_WAIT_S: Final = 0.02


class Spilling:
    """Writes slices ahead of need, and brings them back ahead of their rows.

    Args:
        residency: Where the slices are.
        line: Knows who is resumed last.
        counters: Counts steps in which somebody waited for a read.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        residency: Residency,
        line: Line,
        counters: Counter[str],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._residency, self._line, self._counters = residency, line, counters
        self._store, self._sessions = residency.store, residency.sessions
        self._stuck_steps, self._refused = 0, False
        self._clock = clock
        self._wait_until_s: float | None = None  # Of this step; None until somebody waits.

    def write_ahead(self) -> None:
        """Begin to write what should make room, if room is short. Call it once a step, after the plan."""
        self._stuck_steps = self._stuck_steps + 1 if self._refused else 0
        self._refused, self._wait_until_s = False, None
        self.let_go()
        if self._store.spiller.tier is not None:
            self._make_room(min(self._wanted_bytes(), self._store.pool.capacity_bytes))

    def at_hand(self, query: Query) -> bool:
        """Whether what the query goes on from needs no disk; begins to read it otherwise.

        What is at hand stays so until `let_go`, whoever else needs room: the load must not wait for the disk.
        Also true where it can't be read: then whoever loads it finds that out, and it is computed again.
        """
        owner_id = self._owner_id(query)
        if not owner_id:
            return True
        if not self._away(owner_id) or (self._waited(owner_id) and not self._away(owner_id)):
            self._store.spiller.pin(owner_id)
            return True
        self._counters["waits_for_disk"] += 1
        return False

    def let_go(self) -> None:
        """What was at hand is on the device now, or not needed: others may have its room."""
        self._store.spiller.unpin_all()

    def expect(self, query: Query) -> bool:
        """Begin to read what a query goes on from, if there is room; whether it is there already.

        What is there stays so until `let_go`: who is asked for next must not take its room.
        """
        owner_id, spiller = self._owner_id(query), self._store.spiller
        if not owner_id:
            return True
        try:
            away = spiller.begin_fetch(owner_id)
        except HostPoolFullError:
            return False
        if not away:
            spiller.pin(owner_id)
        return not away

    def _waited(self, owner_id: str) -> bool:
        """Wait a moment for a read that was begun, if there is nothing else to do; whether it was waited."""
        if self._residency.occupied:
            return False
        now_s = self._clock()
        if self._wait_until_s is None:
            self._wait_until_s = now_s + IDLE_WAIT_S
        if now_s >= self._wait_until_s:
            return False
        return self._store.spiller.wait_fetch(owner_id, self._wait_until_s - now_s)

    def _owner_id(self, query: Query) -> str:
        """In whose name what the query goes on from may be in a file; empty if it can't be in one."""
        if self._store.spiller.tier is None:
            return ""
        if query.on_host_tokens:
            return query.query_id
        if query.session is None or not query.untouched:
            return ""
        kept = self._sessions.get(query.session)
        return "" if kept is None or not query.session_tokens else kept.owner_id

    def _away(self, owner_id: str) -> bool:
        """Whether a load would have to wait, for the disk or for room to read to."""
        spiller, needed_bytes = self._store.spiller, self._store.parked_bytes(owner_id)
        for _ in range(2):
            try:
                return spiller.begin_fetch(owner_id)
            except HostPoolFullError:
                self._sessions.make_room(needed_bytes)
                self._make_room(needed_bytes)
            if spiller.jobs or self._residency.leaving or self._store.retiring_bytes:
                return True
            if self._residency.arriving:
                return True  # They make room as soon as they have their rows.
            self._residency.give_up_likely()  # What is copied to the device makes no room.
            self._store.collect()
        self._refused = True
        if self._stuck_steps < PATIENCE_STEPS:
            return True
        self._stuck_steps = 0
        return False

    def _make_room(self, wanted_bytes: int) -> None:
        """Begin to write slices, until so many bytes will be room."""
        spiller, tier = self._store.spiller, self._store.spiller.tier
        candidates = self._least_valuable()
        while tier is not None and not tier.resting and spiller.jobs < MOST_JOBS:
            if self._store.room_bytes + spiller.writing_bytes >= wanted_bytes:
                return
            owner_id = next(candidates, None)
            if owner_id is None:
                return
            if spiller.in_pool_alone(owner_id):
                self._write(owner_id, tier)

    def _write(self, owner_id: str, tier: SpillTier) -> None:
        """Begin to write a slice, in place of idle sessions where the disk is full of them."""
        needed_bytes = padded(self._store.parked_bytes(owner_id)) + ALIGN_BYTES
        if needed_bytes > tier.free_bytes:
            self._sessions.make_disk_room(needed_bytes)
        if self._store.spiller.begin_write(owner_id):
            self._sessions.note_writing(owner_id)

    def _least_valuable(self) -> Iterator[str]:
        """Owners of slices that may lie in the pool alone, the least valuable first."""
        yield from self._sessions.in_pool_alone()
        yield from self._line.held
        parked = [view.query_id for view in Walk(self._line, kinds=PARKED)]
        yield from reversed(parked)

    def _wanted_bytes(self) -> int:
        """Bytes of the pool that should be room for the next parks."""
        batch = self._residency.batch
        longest = max((batch.lengths[row] for row, _ in self._residency.occupied), default=0)
        share = self._store.pool.capacity_bytes // READY_SHARE
        return max(share, READY_ROWS * batch.layout.nbytes(longest) if longest else 0)
