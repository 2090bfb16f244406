"""What a step does when memory runs out in the middle of it: give memory back, and do the work again.

Nothing is lost or doubled by that, because whatever may be repeated changes nothing until it has succeeded:

- a forward of the batch leaves the books as they were (`Batch.step`); where it can't, because states were
  overwritten, `Batch.intact` says so and the rows are computed again from their tokens;
- a chunk of a prompt counts when it is there; a prompt that can't be gone on from is begun anew;
- an embed leaves the row idle and the copy it came from in place;
- choosing tokens reads logits and the queries' records, and what it keeps between steps is rebuilt from them;
- a token is appended once, after everything of its step that needs memory is done.

Between a forward and its tokens nobody is parked: then a row holds one token more than its record. (The
column of a step that is begun ahead is in no book until its tokens are taken in: rows may leave beside it.)
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import torch

from batond.daemon.engine.model.shortage import SHORTAGE_TYPES, is_shortage
from batond.daemon.errors import ExhaustedError
from batond.daemon.scheduler.caps import LearnedCap
from batond.daemon.scheduler.chunks import MOST_TOKENS
from batond.daemon.scheduler.culprits import FIRST_PAUSE_S, Culprits
from batond.daemon.scheduler.plan import ParkMode
from batond.daemon.wire.messages import ParkCause

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator, Sequence

    from batond.daemon.engine.queries.lifecycle import Lifecycle
    from batond.daemon.engine.queries.query import Query
    from batond.daemon.engine.queries.residency import Residency
    from batond.daemon.engine.queries.roster import Roster

    T = TypeVar("T")

#: Before the last try: whoever else took the memory for a moment may have given it back, and the governor
#: has seen it. The front's watchdog waits longer.
LAST_PAUSE_S: Final = 0.2
#: A pause is waited out in steps of so much, between which the engine hears commands and is heard of.
PAUSE_STEP_S: Final = 0.1
#: Until a row for whose token there was no memory is tried again, while others go on.
ROW_RETRY_S: Final = 5 * FIRST_PAUSE_S
LOG_EVERY_S: Final = 10.0
#: Rows parked at once are so much of those there are, at least one: each try costs a forward.
_SHED_SHARE: Final = 8

_log = logging.getLogger(__name__)


class NoMemoryError(ExhaustedError):
    """All that could be given back was, and the work still finds no memory."""


class Relief:
    """Repeats work for which there was no memory, giving back more each time; remembers what was too much.

    The order, from what costs nothing to what costs others most: copies begun ahead and the allocators' spare
    blocks; prompts computed ahead of their rows; smaller chunks; the least urgent rows; a short wait. Work
    that finds no memory even so is put off: its query is kept out of the plans for at least a step, so that
    others are tried before it; what becomes of them tells who is the culprit, which alone ends.

    Args:
        residency: Where memory is given back.
        life: Parks.
        roster: Knows who is least urgent.
        wait: Sleeps so many seconds.
        clock: Monotonic seconds.

    Attributes:
        rows: Rows that a step has been done with.
        chunk: Tokens of a chunk that a step has been done with.
        culprits: Judges those for whom there is no memory.
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
        self.culprits = Culprits()
        self.struck = False
        self._residency, self._life, self._roster = residency, life, roster
        self._counters: Counter[str] = life.counters
        self._wait, self._clock = wait, clock
        self._put_off: list[_PutOff] = []
        self._logged_s = -LOG_EVERY_S
        self._unlogged = 0

    def pausing(self) -> bool:
        """Whether nothing may be tried yet; waits a moment if so."""
        left_s = self.culprits.resume_s - self._clock()
        if left_s <= 0:
            return False
        self._wait(min(left_s, PAUSE_STEP_S))
        return True

    def survive(
        self,
        work: Callable[[], T],
        *,
        spare: Query | None = None,
        victims: Callable[[], Sequence[Query]] | None = None,
        smaller: Callable[[], bool] | None = None,
        final_wait: bool = True,
    ) -> T:
        """Do work that may run out of memory, as often as there is more to give back.

        Args:
            work: Changes nothing that counts unless it succeeds.
            spare: Whose work it is; keeps what it has. None is the batch's, whose rows are fewer from then on
                if it succeeds with fewer.
            victims: Who may be parked for it, the least urgent first; None takes nothing from anybody.
            smaller: Makes the work need less; returns whether it could.
            final_wait: Wait a moment before the last try, but not where others could go on meanwhile.

        Returns:
            What the work returns.

        Raises:
            NoMemoryError: Nothing is left to give back.
        """
        measures = self._measures(spare, victims, smaller, final_wait=final_wait)
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
                if spare is None and left < rows:
                    self.rows.lower(left)
                return result
            # Not inside `except`: there the frames of what failed, and all its tensors, are still alive.
            self.note(said)
            if next(measures, None) is None:
                raise NoMemoryError(said)

    def place(self, query: Query, reason: str) -> None:
        """Give a query a row. Without memory for it, it stays where it is until rows have come free.

        One for which there is none although nobody has a row is given up.
        """
        try:
            self.survive(partial(self._life.place, query, reason), spare=query, victims=_nobody)
        except NoMemoryError:
            if not self._residency.occupied:
                self.give_up(query)
                return
            self._counters["placements_put_off"] += 1
            self.rows.lower(len(self._residency.occupied))

    def give_up(self, query: Query, mode: ParkMode = ParkMode.OFFLOAD) -> None:
        """There is no memory for a query though nothing is left to give back: park it, or end the culprit.

        Where nobody else has a row either, nothing is tried for a while.

        Args:
            query: Live.
            mode: Whether what it has on the device is worth to be kept.
        """
        now_s = self._clock()
        self.culprits.keep(self._life.queries)
        if self.culprits.failed_alone(query.query_id, _progress(query), now_s):
            self._life.fail_for_memory(query)
            return
        self._life.stow(query, mode, cause=ParkCause.OUT_OF_MEMORY)
        rows = len(self._residency.occupied)
        if not rows:
            self.culprits.pause(now_s)
        self._keep_back(query, until_s=now_s + ROW_RETRY_S if rows else -math.inf, rows=rows)

    def put_off(self, query: Query) -> None:
        """There is no memory for a prompt beside the rows: it stays where it is until one of them has ended.

        It is tried before that from time to time. With no rows beside it, it is given up.
        """
        rows = len(self._residency.occupied)
        if not rows:
            self.give_up(query)
            return
        now_s = self._clock()
        self.culprits.keep(self._life.queries)
        wait_s = self.culprits.failed_among(query.query_id, _progress(query), now_s)
        self._counters["prompts_put_off"] += 1
        self._keep_back(query, until_s=now_s + wait_s, rows=rows)

    def all_but_one(self) -> list[Query]:
        """Who has a row, the least urgent first, but the most urgent."""
        return self._roster.least_urgent(len(self._residency.occupied) - 1)

    def less_urgent(self, query: Query) -> list[Query]:
        """Who has a row that a query may take, the least urgent first; of its equals if it waited long."""
        overdue = self.culprits.overdue(query.query_id, self._clock())
        return self._roster.less_urgent(query, equals=overdue)

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
        self._let_back()

    def _keep_back(self, query: Query, *, until_s: float, rows: int = 0) -> None:
        """Keep a query out of the plans for at least one step that is not a pause."""
        self._roster.note(query)
        query.put_off = True
        self._put_off.append(_PutOff(query, until_s, rows))

    def _let_back(self) -> None:
        """At the end of a step."""
        waiting: list[_PutOff] = []
        for one in self._put_off:
            if self._life.queries.get(one.query.query_id) is not one.query:
                continue
            due = self._clock() >= one.until_s or len(self._residency.occupied) < one.rows
            if one.new or not due:
                one.new = False
                waiting.append(one)
                continue
            one.query.put_off = False
            self._roster.note(one.query)
        self._put_off = waiting

    def _measures(
        self,
        spare: Query | None,
        victims: Callable[[], Sequence[Query]] | None,
        smaller: Callable[[], bool] | None,
        *,
        final_wait: bool,
    ) -> Iterator[bool]:
        """Each step gives something back; the work is tried again between them."""
        self._residency.give_back()
        yield True
        if victims is not None:
            if self._stow_ahead(spare):
                yield True
            while smaller is not None and smaller():
                yield True
            while self._shed(victims(), spare):
                yield True
        alone = victims is None or len(self._residency.occupied) <= (spare is None)
        if final_wait and alone:
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

    def _shed(self, victims: Sequence[Query], spare: Query | None) -> bool:
        """Park the first of those that may be; False if there are none."""
        if not victims:
            return False
        for query in victims[: max(1, len(victims) // _SHED_SHARE)]:
            self._life.park(
                query,
                ParkMode.OFFLOAD,
                cause=ParkCause.OUT_OF_MEMORY,
                for_query_id="" if spare is None else spare.query_id,
            )
        self._residency.give_back()
        return True


@dataclass(slots=True)
class _PutOff:
    """A query that is kept out of the plans.

    Attributes:
        query: Which.
        until_s: When it may come back.
        rows: It may come back before that, once fewer are occupied.
        new: Since the step that goes on.
    """

    query: Query
    until_s: float
    rows: int
    new: bool = True


def _nobody() -> Sequence[Query]:
    return ()


def _progress(query: Query) -> int:
    """Most tokens that were ever computed of it."""
    return max(query.computed_tokens, query.prefilled_tokens)


def _device_use(device: torch.device) -> str:
    """Memory of the device, in words."""
    if device.type != "cuda":
        return "on the CPU"
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return f"{free_bytes} of the card's {total_bytes} bytes free, {torch.cuda.memory_allocated(device)} ours"
