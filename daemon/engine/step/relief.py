"""What a step does when memory runs out in the middle of it: give memory back, and do the work again.

Nothing is lost or doubled by that, because whatever may be repeated changes nothing until it has succeeded:

- a forward of the batch leaves the books as they were (`Batch.step`); where it can't, because states were
  overwritten, `Batch.intact` says so and the rows are computed again from their tokens;
- a chunk of a prompt counts when it is there; a prompt that can't be gone on from is begun anew;
- an embed leaves the row idle and the copy it came from in place;
- choosing tokens reads logits and the queries' records, and what it keeps between steps is rebuilt from them;
- a token is appended once, after everything of its step that needs memory is done.

Between a forward and its tokens nobody is parked: then a row holds one token more than its record.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import torch

from batond.daemon.engine.model.shortage import SHORTAGE_TYPES, is_shortage
from batond.daemon.errors import ExhaustedError
from batond.daemon.scheduler.caps import LearnedCap
from batond.daemon.scheduler.chunks import MOST_TOKENS
from batond.daemon.scheduler.plan import ParkMode
from batond.daemon.wire.messages import ParkCause

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator

    from batond.daemon.engine.queries.lifecycle import Lifecycle
    from batond.daemon.engine.queries.query import Query
    from batond.daemon.engine.queries.residency import Residency
    from batond.daemon.engine.queries.roster import Roster

    T = TypeVar("T")

#: Before the last try: whoever else took the memory for a moment may have given it back, and the governor
#: has seen it. The front's watchdog waits longer.
LAST_PAUSE_S: Final = 0.2
LOG_EVERY_S: Final = 10.0
#: Rows parked at once are so much of those there are, at least one: each try costs a forward.
_SHED_SHARE: Final = 8

_log = logging.getLogger(__name__)


class NoMemoryError(ExhaustedError):
    """All that could be given back was, and the work still finds no memory."""


class Relief:
    """Repeats work for which there was no memory, giving back more each time; remembers what was too much.

    The order, from what costs nothing to what costs others most: copies begun ahead and the allocators' spare
    blocks; prompts computed ahead of their rows; smaller chunks; the least urgent rows; a short wait.

    Args:
        residency: Where memory is given back.
        life: Parks.
        roster: Knows who is least urgent.
        wait: Sleeps so many seconds.
        clock: Monotonic seconds.

    Attributes:
        rows: Rows that a step has been done with.
        chunk: Tokens of a chunk that a step has been done with.
        struck: Memory ran out in this step: what else was planned for it must not take any.
    """

    def __init__(
        self,
        residency: Residency,
        life: Lifecycle,
        roster: Roster,
        *,
        wait: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rows = LearnedCap(growth=9 / 8)
        self.chunk = LearnedCap(growth=5 / 4)
        self.struck = False
        self._residency, self._life, self._roster = residency, life, roster
        self._counters: Counter[str] = life.counters
        self._wait, self._clock = wait, clock
        self._logged_s = -LOG_EVERY_S
        self._unlogged = 0

    def survive(
        self,
        work: Callable[[], T],
        *,
        spare: Query | None = None,
        keep_rows: int | None = None,
        smaller: Callable[[], bool] | None = None,
        final_wait: bool = True,
    ) -> T:
        """Do work that may run out of memory, as often as there is more to give back.

        Args:
            work: Changes nothing that counts unless it succeeds.
            spare: Whose work it is; keeps what it has.
            keep_rows: Rows above so many may be parked, the least urgent first; None parks nobody.
            smaller: Makes the work need less; returns whether it could.
            final_wait: Wait a moment before the last try.

        Returns:
            What the work returns.

        Raises:
            NoMemoryError: Nothing is left to give back.
        """
        measures = self._measures(spare, keep_rows, smaller, final_wait=final_wait)
        rows = len(self._residency.occupied)
        while True:
            try:
                result = work()
            except SHORTAGE_TYPES as error:
                if not is_shortage(error):
                    raise
                said = str(error)
            else:
                left = len(self._residency.occupied)
                if left < rows:
                    self.rows.lower(left)
                return result
            # Not inside `except`: there the frames of what failed, and all its tensors, are still alive.
            self.note(said)
            if next(measures, None) is None:
                raise NoMemoryError(said)

    def place(self, query: Query, reason: str) -> None:
        """Give a query a row. Without memory for it, it stays where it is until rows have come free.

        One for which there is none although nobody has a row ends.
        """
        alone = not self._residency.occupied
        try:
            self.survive(
                partial(self._life.place, query, reason),
                spare=query,
                keep_rows=len(self._residency.occupied),
                final_wait=alone,
            )
        except NoMemoryError:
            if alone:
                self._life.fail_for_memory(query)
                return
            self._counters["placements_put_off"] += 1
            self.rows.lower(len(self._residency.occupied))

    def note(self, said: str) -> None:
        """Count a shortage and tell of it, not more often than anybody reads."""
        self.struck = True
        self._counters["out_of_memory"] += 1
        now_s = self._clock()
        if now_s - self._logged_s < LOG_EVERY_S:
            self._unlogged += 1
            return
        use = self._residency.batch.memory
        _log.warning(
            "out of memory: %s; %d rows hold %d tokens, %d bytes of KV committed and %d pooled, %s; %d more"
            " shortages since the last such line",
            said.strip().partition("\n")[0][:300],
            len(self._residency.occupied),
            sum(self._residency.batch.lengths),
            use.committed_bytes,
            use.pooled_bytes,
            _device_use(self._residency.batch.device),
            self._unlogged,
        )
        self._logged_s, self._unlogged = now_s, 0

    def drop_rows(self) -> None:
        """Take all rows; a forward that failed has left nothing to copy. Half of them may come back."""
        occupied = self._residency.occupied
        for _, query in occupied:
            self._life.park(query, ParkMode.RECOMPUTE, cause=ParkCause.OUT_OF_MEMORY)
        self._stow_ahead(None)
        self._residency.give_back()
        self.rows.lower(len(occupied) // 2)

    def note_step(self, *, decoded: bool, prompts: bool, rows: int) -> None:
        """Take account of a step that is over.

        Args:
            decoded: Some row was computed.
            prompts: Some prompt was.
            rows: Of the batch.
        """
        if not self.struck:
            if decoded:
                self.rows.note_calm(rows)
            if prompts:
                self.chunk.note_calm(MOST_TOKENS)
        self.struck = False

    def _measures(
        self,
        spare: Query | None,
        keep_rows: int | None,
        smaller: Callable[[], bool] | None,
        *,
        final_wait: bool,
    ) -> Iterator[bool]:
        """Each step gives something back; the work is tried again between them."""
        self._residency.give_back()
        yield True
        if keep_rows is not None:
            if self._stow_ahead(spare):
                yield True
            while smaller is not None and smaller():
                yield True
            while self._shed(keep_rows, spare):
                yield True
        if final_wait:
            self._wait(LAST_PAUSE_S)
            self._residency.give_back()
            yield True

    def _stow_ahead(self, spare: Query | None) -> bool:
        """Take what queries without a row have on the device to the host."""
        ahead = [
            query
            for query in self._life.queries.values()
            if query is not spare
            and query.row is None
            and (query.kv is not None or query.prefill is not None)
        ]
        for query in ahead:
            self._life.stow(query, cause=ParkCause.OUT_OF_MEMORY)
        if ahead:
            self._residency.give_back()
        return bool(ahead)

    def _shed(self, keep_rows: int, spare: Query | None) -> bool:
        """Park the least urgent rows; False if no more may be."""
        open_rows = len(self._residency.occupied) - keep_rows
        if open_rows <= 0:
            return False
        victims = self._roster.least_urgent(max(1, open_rows // _SHED_SHARE))
        for query in victims:
            self._life.park(
                query,
                ParkMode.OFFLOAD,
                cause=ParkCause.OUT_OF_MEMORY,
                for_query_id="" if spare is None else spare.query_id,
            )
        self._residency.give_back()
        return bool(victims)


def _device_use(device: torch.device) -> str:
    """Memory of the device, in words."""
    if device.type != "cuda":
        return "on the CPU"
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return f"{free_bytes} of the card's {total_bytes} bytes free, {torch.cuda.memory_allocated(device)} ours"
