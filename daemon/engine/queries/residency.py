"""Where each query's KV is: in a row, in a slice on the device, in the host pool, or nowhere.

    WAITING ──prefill──> slice on device ──embed──> row ──extract, store──> host pool
       ^                      ^                      ^                        |   |
       |                      └── partial prompt ────┴───── load, embed ──────┘   |
       └── next turn of a session: load, embed ────── kept when a turn ends ──────┘

One good copy exists at every moment: a row is freed once its slice is extracted, that slice on the device
once its host copy is complete (`outgoing.py`), and a host copy is discarded after the embed.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

import torch

from batond.daemon.engine.batch.prefill import Prefill, PromptBatch
from batond.daemon.scheduler.plan import ParkMode
from batond.offload.errors import CopyFailedError, HostPoolFullError, SliceCorruptError

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from batond.daemon.engine.batch.protocol import Batch
    from batond.daemon.engine.queries.outgoing import Outgoing
    from batond.daemon.engine.queries.query import Query
    from batond.daemon.engine.queries.sessions import Sessions
    from batond.offload.entries import LoadTicket
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
        self._ahead: LoadTicket | None = None
        self._outgoing = outgoing
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
        """Bytes a park may take from the host pool: idle sessions make room."""
        return self.store.pool.free_bytes + self.sessions.nbytes

    def settle(self) -> None:
        """Take in what copies have come to. Cheap; call it once a step."""
        self._outgoing.settle()
        self.store.collect()

    def prefill_of(self, query: Query) -> Prefill:
        """The query's prompt computation: under way, parked half done, after its session's, or new."""
        if query.prefill is None:
            parked = self._load(query) if query.on_host_tokens else None
            known = self._load_session(query) if parked is None else parked
            query.prefill = Prefill(self._new_prefill_batch(), known, divisible=self._chunkable)
            if parked is not None:
                self._let_go(query)
        return query.prefill

    def load_ahead(self, query: Query | None) -> None:
        """Begin to bring back the slice of a query that is likely to get the next row, beside the decode.

        One at a time: what was begun for another is given up, and its host copy stays. Without room on the
        device nothing is begun; what is wrong with the copy is found when the row is there.

        Args:
            query: Parked, with a copy on the host; None is nobody.
        """
        self._ahead = self._take_ahead(query)
        if query is None or self._ahead is not None or not query.on_host_tokens:
            return
        if query.query_id in self._outgoing:
            return  # It has not left the device yet.
        with contextlib.suppress(torch.OutOfMemoryError, CopyFailedError):
            self._ahead = self.store.begin_load(query.query_id, self.batch.device)
            self._counters["loads_ahead"] += 1

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
        try:
            kv = self._device_copy(query)
        except torch.OutOfMemoryError:
            return  # No room for the copy: the next turn is computed whole.
        if kv is not None:
            self.sessions.keep(query.session, query.to_cache_token_ids, kv)

    def place(self, query: Query) -> int | None:
        """Give the query a row and embed its KV, if it has any.

        Returns:
            The row; None if the parked copy was damaged, which leaves the query to be computed again.
        """
        kv = query.kv
        if kv is None and query.on_host_tokens:
            kv = self._load(query)
            if kv is None:
                return None
        row = self._free_row(avoid=query.last_row)
        if kv is not None:
            self.batch.embed(row, kv)
            query.replay_left = len(query.to_cache_token_ids) - kv.n_tokens
        self._let_go(query)
        query.kv, query.row = None, row
        self.by_row[row] = query
        return row

    def vacate(self, query: Query, mode: ParkMode) -> int | None:
        """Take row and device memory from the query.

        Returns:
            Bytes kept in the host pool (0 if there was nothing to keep), or None if the KV was dropped.
        """
        kv = self._device_copy(query)
        query.computed_tokens = max(query.computed_tokens, kv.n_tokens if kv else 0)
        kept: int | None = 0
        if kv is not None:
            kept = self._store(query, kv) if mode is ParkMode.OFFLOAD else None
            query.on_host_tokens = kv.n_tokens if kept is not None else 0
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
        if self._ahead is not None and not self.store.parked_bytes(self._ahead.owner_id):
            raise AssertionError(f"a copy of {self._ahead.owner_id} was begun, and nothing is parked")
        for row, owner in enumerate(self.by_row):
            if (owner is not None) != bool(self.batch.lengths[row]):
                raise AssertionError(f"row {row}: owner {owner}, {self.batch.lengths[row]} tokens")
            if owner is not None and owner.row != row:
                raise AssertionError(f"query {owner.query_id} believes to be in row {owner.row}, is in {row}")

    def _device_copy(self, query: Query) -> KVSlice | None:
        if query.row is not None:
            return self._extract(query.row) if self.batch.lengths[query.row] else None
        if query.prefill is not None:
            return query.prefill.slice() if query.prefill.done_tokens else None
        return query.kv

    def _extract(self, row: int) -> KVSlice:
        try:
            return self.batch.extract(row)
        except torch.OutOfMemoryError:
            self._outgoing.finish_all()  # Slices under way take room on the device.
            return self.batch.extract(row)

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
        except (HostPoolFullError, CopyFailedError):
            return None
        return kv.nbytes

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
        ahead, digest = self._take_ahead(query), self.batch.layout.digest
        try:
            if ahead is not None:
                self._counters["loads_ahead_used"] += 1
                return self.store.finish_load(ahead, layout_hash=digest)
            return self.store.finish_load(
                self.store.begin_load(query.query_id, self.batch.device, layout_hash=digest)
            )
        except (SliceCorruptError, CopyFailedError):
            self._forget(query)
            return None

    def _take_ahead(self, query: Query | None) -> LoadTicket | None:
        """The copy begun for this query; one begun for another is given up."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and (query is None or ahead.owner_id != query.query_id):
            self.store.abort(ahead)
            return None
        return ahead

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
        if self._ahead is not None and self._ahead.owner_id == query.query_id:
            self._ahead = None  # The store lets go of its copy.
        self._outgoing.forget(query.query_id)
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
