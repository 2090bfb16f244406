"""Where each query's KV is: in a row, in a slice on the device, in the host pool, or nowhere.

    WAITING ──prefill──> slice on device ──embed──> row ──extract, store──> host pool
       ^                      ^                      ^                        |   |
       |                      └── partial prompt ────┴───── load, embed ──────┘   |
       └── next turn of a session: load, embed ────── kept when a turn ends ──────┘

One good copy exists at every moment: a row is freed once its slice is extracted, that slice on the device
once its host copy is complete (`outgoing.py`), and a host copy is discarded after the embed.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from batond.daemon.engine.batch.prefill import Prefill, PromptBatch
from batond.daemon.engine.model.shortage import SHORTAGE_TYPES, is_shortage
from batond.daemon.engine.queries.arriving import Arriving
from batond.daemon.scheduler.plan import ParkMode
from batond.offload.errors import CopyFailedError, HostPoolFullError, SliceCorruptError

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Sequence

    from batond.daemon.engine.batch.protocol import Batch
    from batond.daemon.engine.queries.outgoing import Outgoing
    from batond.daemon.engine.queries.query import Query
    from batond.daemon.engine.queries.sessions import Sessions
    from batond.offload.slice import KVSlice
    from batond.offload.store import ParkedStore


class Residency:
    """Moves queries' KV between rows, device slices and the host pool.

    Args:
        batch: The decode batch.
        new_prefill_batch: Makes an empty batch of one row.
        store: Parked slices.
        outgoing: What is on its way there.
        sessions: Slices of finished turns, which give way to parked ones.
        counters: Counts copies begun ahead, and those that were wanted.
        chunkable: Prompts may be computed in parts.

    Attributes:
        by_row: Owner of each row.
        on_lost: Is told of a query whose copy failed after its row was given away: it must be computed again.
    """

    def __init__(
        self,
        batch: Batch,
        new_prefill_batch: Callable[[], PromptBatch],
        store: ParkedStore,
        outgoing: Outgoing,
        sessions: Sessions,
        *,
        counters: Counter[str],
        chunkable: bool = True,
    ) -> None:
        self._chunkable = chunkable
        self._counters = counters
        self._outgoing = outgoing
        self._arriving = Arriving(store, batch.device, counters)
        self.on_lost: Callable[[Query], None] = _nobody
        self.batch = batch
        self.store = store
        self.sessions = sessions
        self.by_row: list[Query | None] = [None] * batch.rows
        self._new_prefill_batch = new_prefill_batch

    @property
    def occupied(self) -> list[tuple[int, Query]]:
        """Rows in use and their owners."""
        return [(row, query) for row, query in enumerate(self.by_row) if query is not None]

    @property
    def host_free_bytes(self) -> int:
        """Bytes a park may take from the host pool: what is in files, too, and idle sessions make room."""
        return self.store.room_bytes + self.sessions.evictable_bytes

    @property
    def leaving(self) -> bool:
        """Whether slices are on their way to the host pool."""
        return len(self._outgoing) > 0

    def settle(self) -> None:
        """Take in what copies have come to. Cheap; call it once a step."""
        self._outgoing.settle()
        self.store.collect()
        self.sessions.note_writes(self.store.spiller.take_ended())

    def prefill_of(self, query: Query) -> Prefill:
        """The query's prompt computation: under way, parked half done, after its session's, or new.

        Raises:
            torch.OutOfMemoryError: What was computed already stays where it is.
        """
        if query.prefill is None:
            parked = self._load(query) if query.on_host_tokens else None
            known = self._load_session(query) if parked is None else parked
            try:
                query.prefill = Prefill(
                    self._new_prefill_batch(),
                    known,
                    total_tokens=len(query.to_prefill_token_ids),
                    divisible=self._chunkable,
                )
            except SHORTAGE_TYPES:
                self._put_back(query, parked)
                raise
            if parked is not None:
                self._let_go(query)
        return query.prefill

    @property
    def arriving(self) -> bool:
        """Whether slices are on their way to the device whose rows are due, and have not landed."""
        return self._arriving.due

    def bring(self, due: Sequence[Query], likely: Sequence[Query] = ()) -> None:
        """Begin to bring slices back beside the decode, as many at once as there is room for, in this order.

        What was begun for anybody else is given up, and its host copy stays. Without memory on the device
        nothing is begun; what is wrong with a copy is found when its row is there.

        Args:
            due: Would have a row, or its next chunk, if their bytes were here; those without a host copy are
                no error.
            likely: Get a row soon.
        """
        self._arriving.expect({query.query_id for query in due}, {query.query_id for query in likely})
        for number, query in enumerate((*due, *likely)):
            self._begin_load(query, due=number < len(due))
        turns = {query.session: query.prompt_token_ids for query in due if query.session and query.untouched}
        self.sessions.bring(turns)

    def landed(self, query: Query) -> bool:
        """Whether the query's KV can be had without waiting for a copy, or can't be had by waiting."""
        if query.session is not None and query.untouched:
            return not query.session_tokens or self.sessions.landed(query.session)
        return not query.on_host_tokens or self._arriving.landed(query.query_id)

    def give_up_likely(self) -> None:
        """Give up copies begun for those that have no right to a row yet."""
        self._arriving.give_up_likely()

    def give_back(self) -> int:
        """Give back what nobody needs just now: copies begun ahead, slices that are leaving, pooled pages.

        Returns:
            Bytes that the batch gave back to the system; what the allocator of tensors did is not counted.
        """
        self._arriving.give_up()
        self.sessions.give_up()
        self._outgoing.finish_all()
        self.store.collect()
        freed_bytes = self.batch.trim()
        if self.batch.device.type == "cuda":
            torch.cuda.empty_cache()
        return freed_bytes

    def expect_session(self, query: Query) -> None:
        """Find out what its session would spare a query, where that may have changed."""
        if query.session is None or not query.untouched:
            return
        kept = self.sessions.get(query.session)
        if kept is not query.session_slice:
            query.session_slice = kept
            query.session_tokens = self.sessions.reusable_tokens(query.session, query.prompt_token_ids)

    def keep_session(self, query: Query) -> None:
        """Keep the slice of a finished turn for the next one, if there is room."""
        if query.session is None or not self.sessions.most_bytes:
            return
        kv = self._copy_if_room(query)  # Without room, the next turn is computed whole.
        if kv is not None:
            self.sessions.keep(query.session, query.to_cache_token_ids, kv)

    def place(self, query: Query) -> int | None:
        """Give the query a row and embed its KV, if it has any.

        Returns:
            The row; None if the parked copy was damaged, which leaves the query to be computed again.

        Raises:
            torch.OutOfMemoryError: No room; its KV stays where it is, and this can be tried again.
        """
        kv = query.kv
        if kv is None and query.on_host_tokens:
            kv = self._load(query)
            if kv is None:
                return None
        row = self._free_row(avoid=query.last_row)
        if kv is not None:
            try:
                self.batch.embed(row, kv)
            except SHORTAGE_TYPES:
                if not self._put_back(query, kv):
                    query.kv = kv  # No room on the host either: it stays on the device, and is tried again.
                raise
            query.replay_left = len(query.to_cache_token_ids) - kv.n_tokens
        self._let_go(query)
        query.kv, query.row = None, row
        self.by_row[row] = query
        return row

    def vacate(self, query: Query, mode: ParkMode) -> int | None:
        """Take row and device memory from the query.

        Returns:
            Bytes kept in the host pool (0 if there was nothing to keep), or None if the KV was dropped: as
            told, because there was no room, or because a step that failed has left nothing to keep.
        """
        tokens = self._device_tokens(query)
        query.computed_tokens = max(query.computed_tokens, tokens)
        kept: int | None = 0
        if tokens:
            kv = self._copy_if_room(query) if mode is ParkMode.OFFLOAD else None
            kept = None if kv is None else self._store(query, kv)
            query.on_host_tokens = 0 if kept is None else tokens
        self._leave_device(query)
        return kept

    def release(self, query: Query) -> None:
        """Forget everything of a query that has ended."""
        self._leave_device(query)
        query.session_slice, query.session_tokens = None, 0
        self._forget(query)

    def check_integrity(self) -> None:
        """Raise AssertionError where owners, rows and pool contradict each other."""
        self.batch.check_integrity()
        self.store.check_integrity()
        self.sessions.check_integrity()
        self._outgoing.check_integrity()
        self._arriving.check_integrity()
        for row, owner in enumerate(self.by_row):
            if (owner is not None) != bool(self.batch.lengths[row]):
                raise AssertionError(f"row {row}: owner {owner}, {self.batch.lengths[row]} tokens")
            if owner is not None and owner.row != row:
                raise AssertionError(f"query {owner.query_id} believes to be in row {owner.row}, is in {row}")

    def _device_tokens(self, query: Query) -> int:
        """Tokens whose KV the query has on the device."""
        if query.row is not None:
            return self.batch.lengths[query.row]
        if query.prefill is not None:
            return query.prefill.done_tokens
        return query.kv.n_tokens if query.kv is not None else 0

    def _device_copy(self, query: Query) -> KVSlice | None:
        if query.row is not None:
            whole = self.batch.lengths[query.row] and self.batch.intact
            return self.batch.extract(query.row) if whole else None
        if query.prefill is not None:
            whole = query.prefill.done_tokens and query.prefill.intact
            return query.prefill.slice() if whole else None
        return query.kv

    def _copy_if_room(self, query: Query) -> KVSlice | None:
        """The query's KV as a slice; None if there is none, or no memory for the copy."""
        for _ in range(2):
            try:
                return self._device_copy(query)
            except SHORTAGE_TYPES as error:
                if not is_shortage(error):
                    raise
            self.give_back()  # Slices under way take room on the device.
        return None

    def _leave_device(self, query: Query) -> None:
        query.kv = query.prefill = None
        if query.row is not None:
            if self.batch.lengths[query.row]:
                self.batch.free(query.row)
            self.by_row[query.row] = None
            query.last_row, query.row, query.replay_left = query.row, None, 0

    def _store(self, query: Query, kv: KVSlice) -> int | None:
        """Begin to copy a slice to the host pool; returns its bytes, or None if it doesn't fit, or fails."""
        self.sessions.make_room(kv.nbytes)
        try:
            self._outgoing.start(
                query.query_id, kv, self.batch.layout.digest, on_lost=partial(self._lost, query)
            )
        except (HostPoolFullError, CopyFailedError, MemoryError):
            return None
        return kv.nbytes

    def _put_back(self, query: Query, kv: KVSlice | None) -> bool:
        """What was brought back found no room: the host shall have it again, if it has no copy any more.

        Returns:
            Whether a copy is somewhere; else the caller's is the last.
        """
        if kv is None or kv is query.kv or query.on_host_tokens:
            return True
        kept = self._store(query, kv)
        query.on_host_tokens = 0 if kept is None else kv.n_tokens
        return kept is not None

    def _lost(self, query: Query) -> None:
        query.on_host_tokens = 0
        self._counters["parks_lost"] += 1
        self.on_lost(query)

    def _load(self, query: Query) -> KVSlice | None:
        """Bring the parked copy back; a damaged one is dropped and must be computed again."""
        kv = self._outgoing.take_back(query.query_id)
        if kv is not None:
            query.on_host_tokens = 0
            self._counters["resumes_from_device"] += 1
            return kv
        ticket, digest = self._arriving.take(query.query_id), self.batch.layout.digest
        try:
            if ticket is None:
                ticket = self.store.begin_load(query.query_id, self.batch.device, layout_hash=digest)
            return self.store.finish_load(ticket, layout_hash=digest)
        except (SliceCorruptError, CopyFailedError, HostPoolFullError):
            self._forget(query)
            return None

    def _begin_load(self, query: Query, *, due: bool) -> None:
        name = query.query_id
        if not query.on_host_tokens or name in self._outgoing or name in self._arriving:
            return  # It has not left the device yet, or is under way.
        try:
            self._arriving.begin(name, due=due)
        except (CopyFailedError, HostPoolFullError):
            return
        except SliceCorruptError:  # Its file is lost, as is known by now.
            self._forget(query)
            self.on_lost(query)
        except SHORTAGE_TYPES as error:
            if not is_shortage(error):
                raise

    def _load_session(self, query: Query) -> KVSlice | None:
        """Bring what the query's session spares it; from here on the query is on its own."""
        query.session_slice, query.session_tokens = None, 0
        if query.session is None:
            return None
        kv = self.sessions.load(query.session, query.prompt_token_ids)
        if kv is not None:
            query.cached_prompt_tokens = max(query.cached_prompt_tokens, kv.n_tokens)
        return kv

    def _forget(self, query: Query) -> None:
        """Drop the host copy, whatever happens to it."""
        self._outgoing.forget(query.query_id)
        self._arriving.forget(query.query_id)
        self.store.forget(query.query_id)
        query.on_host_tokens = 0

    def _let_go(self, query: Query) -> None:
        """Its KV is on the device and good: the host copy, if there is one, has served."""
        if query.on_host_tokens:
            self.store.discard(query.query_id)
            query.on_host_tokens = 0

    def _free_row(self, avoid: int | None) -> int:
        """An idle row; not the one the query had before, if there is a choice: nothing may depend on it."""
        free = [row for row, owner in enumerate(self.by_row) if owner is None]
        if not free:
            raise RuntimeError("the plan gave out a row that is not free")
        others = [row for row in free if row != avoid]
        return (others or free)[0]


def _nobody(_: Query) -> None:
    """Nobody wants to know."""
