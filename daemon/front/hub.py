"""Fan-out: what the engine did, kept once per job, read by any number of watchers.

A watcher holds an index into the record and nothing else, so one that reads slowly, or not at all, costs no
memory and no time of anybody else's. Records show only what is committed to Redis.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from batond.daemon.queue import Chunk

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class GotRow:
    """The job got its first row under this claim; `reason` is a RowReason."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class LostRow:
    """The job lost its row; `cause` is a ParkCause."""

    cause: str
    kept: bool
    choice: int = 0


@dataclass(frozen=True, slots=True)
class CameBack:
    """The job has a row again; `reason` is a RowReason."""

    choice: int = 0
    reason: str = ""


LiveEvent: TypeAlias = Chunk | GotRow | LostRow | CameBack


class LiveJob:
    """The committed events of one claim of one job.

    Args:
        base_indexes: Tokens of each choice that earlier claims committed: they are in Redis, not here.

    Attributes:
        events: In order; only ever appended to.
        closed: Nothing more will come: the job ended, or goes on elsewhere. Redis says which.
    """

    def __init__(self, base_indexes: tuple[int, ...]) -> None:
        self.base_indexes: Final = base_indexes
        self.events: list[LiveEvent] = []
        self.closed = False
        self._news = asyncio.Event()

    def publish(self, events: Sequence[LiveEvent]) -> None:
        """Show events to all watchers."""
        self.events += events
        self._tell()

    def close(self) -> None:
        """Say that nothing more will come."""
        self.closed = True
        self._tell()

    async def wait_beyond(self, position: int) -> None:
        """Return once there are more than `position` events, or the record is closed."""
        while len(self.events) <= position and not self.closed:
            await self._news.wait()

    def _tell(self) -> None:
        # Each watcher waits on the event it saw; a fresh one makes the next wait start anew.
        self._news.set()
        self._news = asyncio.Event()


class Hub:
    """The records of all jobs that run here, and who waits for one to appear."""

    def __init__(self) -> None:
        self._live: dict[tuple[str, str], LiveJob] = {}
        self._waiting: defaultdict[tuple[str, str], set[asyncio.Event]] = defaultdict(set)

    def get(self, tenant: str, job_id: str) -> LiveJob | None:
        """Return the record of a job that runs here."""
        return self._live.get((tenant, job_id))

    def open(self, tenant: str, job_id: str, *, base_indexes: tuple[int, ...]) -> LiveJob:
        """Begin the record of a claim; one of an earlier claim is closed."""
        self.close(tenant, job_id)
        live = self._live[tenant, job_id] = LiveJob(base_indexes)
        self._poke(tenant, job_id)
        return live

    def close(self, tenant: str, job_id: str) -> None:
        """End a record. Watchers that still read it keep it alive, nobody else does."""
        live = self._live.pop((tenant, job_id), None)
        if live is not None:
            live.close()
        self._poke(tenant, job_id)

    async def wait_for(self, tenant: str, job_id: str, timeout_s: float) -> None:
        """Return when a job begins or ends to run here, or after a while; at once if it runs here."""
        if (tenant, job_id) in self._live:
            return
        event = asyncio.Event()
        waiting = self._waiting[tenant, job_id]
        waiting.add(event)
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return
        finally:
            waiting.discard(event)
            if not waiting and self._waiting.get((tenant, job_id)) is waiting:
                del self._waiting[tenant, job_id]

    def _poke(self, tenant: str, job_id: str) -> None:
        for event in self._waiting.get((tenant, job_id), ()):
            event.set()
