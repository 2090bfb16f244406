"""Fan-out: what the engine did, kept once per job, read by any number of watchers.

A watcher holds an index into the record and nothing else, so one that reads slowly, or not at all, costs no
memory and no time of anybody else's. Records show only what is committed to Redis.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from batond.daemon.queue import Chunk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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


class Listener(Protocol):
    """Hears of jobs that don't run here, see NewsFeed."""

    def listen(self, tenant: str, job_id: str) -> None:
        """Tell of a job."""

    def leave(self, tenant: str, job_id: str) -> None:
        """Tell of it no longer."""


class Watch:
    """A watcher's place in the hub, for a job that does not run here; close it."""

    def __init__(self, close: Callable[[Watch], None]) -> None:
        self._close = close
        self._news = asyncio.Event()

    def poke(self) -> None:
        """Say that there may be something new."""
        self._news.set()

    @property
    def told(self) -> bool:
        """Whether something may be new."""
        return self._news.is_set()

    def clear(self) -> None:
        """Forget what was told. Do so before looking: what comes while looking is told again."""
        self._news.clear()

    async def wait(self, timeout_s: float) -> None:
        """Return when there may be something new, or after a while."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            return

    def close(self) -> None:
        """End it. Nothing happens the second time."""
        self._close(self)


class Hub:
    """The records of all jobs that run here, and who waits for one that does not.

    Attributes:
        listener: Is told which jobs are watched that don't run here; what it hears comes back by `poke`.
    """

    def __init__(self) -> None:
        self._live: dict[tuple[str, str], LiveJob] = {}
        self._watches: defaultdict[tuple[str, str], set[Watch]] = defaultdict(set)
        self._waiting = 0
        self.listener: Listener | None = None

    @property
    def waiting(self) -> int:
        """Watchers of jobs that don't run here."""
        return self._waiting

    def get(self, tenant: str, job_id: str) -> LiveJob | None:
        """Return the record of a job that runs here."""
        return self._live.get((tenant, job_id))

    def open(self, tenant: str, job_id: str, *, base_indexes: tuple[int, ...]) -> LiveJob:
        """Begin the record of a claim; one of an earlier claim is closed."""
        self.close(tenant, job_id)
        live = self._live[tenant, job_id] = LiveJob(base_indexes)
        self.poke(tenant, job_id)
        return live

    def close(self, tenant: str, job_id: str) -> None:
        """End a record. Watchers that still read it keep it alive, nobody else does."""
        live = self._live.pop((tenant, job_id), None)
        if live is not None:
            live.close()
        self.poke(tenant, job_id)

    def watch(self, tenant: str, job_id: str) -> Watch:
        """Wait for news of a job that does not run here, until the watch is closed.

        Told are: it begins or ends to run here, and what the listener hears of it.
        """
        name = (tenant, job_id)

        def close(watch: Watch) -> None:
            watches = self._watches.get(name, set())
            if watch not in watches:
                return
            watches.discard(watch)
            self._waiting -= 1
            if not watches:
                del self._watches[name]
                if self.listener is not None:
                    self.listener.leave(*name)

        watch, watches = Watch(close), self._watches[name]
        if not watches and self.listener is not None:
            self.listener.listen(*name)
        watches.add(watch)
        self._waiting += 1
        return watch

    def poke(self, tenant: str, job_id: str) -> None:
        """Wake the watchers of a job."""
        for watch in self._watches.get((tenant, job_id), ()):
            watch.poke()

    def poke_all(self) -> None:
        """Wake all watchers."""
        for watches in self._watches.values():
            for watch in watches:
                watch.poke()
