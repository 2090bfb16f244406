"""How full the batch was during a replay: the engine's own counters, from its snapshots."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from batond.clients.batch import QueryState
from batond.clients.errors import BatondClientError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batond.clients import AsyncClient
    from batond.clients.batch import BatchSnapshot

INTERVAL_S: Final = 0.25
FIRST_TIMEOUT_S: Final = 2.0
LAST_TIMEOUT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class BatchUse:
    """What a daemon's batch did between the first and the last snapshot, for whomever.

    Attributes:
        decode_steps: Steps.
        rows_taken: Part of the rows of these steps that a query had; not a number without a step.
        rows_taken_waiting: The same of the steps at which somebody waited.
        host_pool_peak_bytes: Most bytes of the host pool in use.
        kv_peak_bytes: Most bytes of KV that lay in rows; 0 if the daemon does not say.
    """

    decode_steps: int
    rows_taken: float
    rows_taken_waiting: float
    host_pool_peak_bytes: int
    kv_peak_bytes: int


@dataclass(frozen=True, slots=True)
class Moment:
    """The batch at a time.

    Attributes:
        at_s: Since the replay began.
        rows: That a query has.
        parked: Queries that lost theirs.
        waiting: Queries and jobs that had none yet.
    """

    at_s: float
    rows: int
    parked: int
    waiting: int


class BatchWatch:
    """Watches while it is entered; `use` is None if the daemon shows its batch to nobody like us.

    Args:
        client: Of an operator.
    """

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._from: Mapping[str, float] | None = None
        self._last: BatchSnapshot | None = None
        self._host_pool_bytes = self._kv_bytes = 0
        self._seen, self._over = asyncio.Event(), False
        self._began_s = time.perf_counter()
        self.course: list[Moment] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch())
        # An engine that has not computed anything yet sends none: then counters begin at 0.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._seen.wait(), FIRST_TIMEOUT_S)
        self._from = self._from or {}
        return self

    def begin(self) -> None:
        """The replay begins: from here on times count."""
        self._began_s = time.perf_counter()
        self.course.clear()

    async def __aexit__(self, *exc_info: object) -> None:
        if not self._over:
            self._seen.clear()
        with contextlib.suppress(TimeoutError):  # The last steps are in the next snapshot.
            await asyncio.wait_for(self._seen.wait(), LAST_TIMEOUT_S)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _watch(self) -> None:
        try:
            async for snapshot in self._client.watch_batch(INTERVAL_S):
                if self._from is None:
                    self._from = snapshot.counters
                self._last = snapshot
                self.course.append(_moment(snapshot, time.perf_counter() - self._began_s))
                self._host_pool_bytes = max(self._host_pool_bytes, snapshot.host_pool_used_bytes)
                if snapshot.memory is not None:
                    self._kv_bytes = max(self._kv_bytes, snapshot.memory.committed_bytes)
                self._seen.set()
        except BatondClientError:  # Not allowed, or it went away: the clients' own figures are left.
            pass
        finally:
            self._over = True
            self._seen.set()

    @property
    def use(self) -> BatchUse | None:
        """What was seen; None if nothing was."""
        if self._last is None or self._from is None:
            return None
        count = _Growth(self._from, self._last.counters)
        return BatchUse(
            decode_steps=int(count["decode_steps"]),
            rows_taken=_part_taken(count["row_steps"], count["idle_row_steps"]),
            rows_taken_waiting=_part_taken(count["waiting_row_steps"], count["waiting_idle_row_steps"]),
            host_pool_peak_bytes=self._host_pool_bytes,
            kv_peak_bytes=self._kv_bytes,
        )


def _moment(snapshot: BatchSnapshot, at_s: float) -> Moment:
    parked = sum(one.state is QueryState.PARKED for one in snapshot.queries)
    return Moment(
        at_s=at_s,
        rows=sum(bool(row.job_id) for row in snapshot.rows),
        parked=parked,
        waiting=len(snapshot.queries) - parked + snapshot.queued_jobs,
    )


class _Growth:
    """By how much counters grew; an engine that was started anew counts from 0."""

    def __init__(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        self._before, self._after = before, after

    def __getitem__(self, name: str) -> float:
        after, before = self._after.get(name, 0.0), self._before.get(name, 0.0)
        return after - before if after >= before else after


def _part_taken(rows: float, idle: float) -> float:
    return 1 - idle / rows if rows else float("nan")


def plain(use: BatchUse | None) -> dict[str, Any] | None:
    """For a file."""
    return None if use is None else {name: getattr(use, name) for name in use.__slots__}
