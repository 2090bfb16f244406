"""Reads jobs for all watchers of this daemon together, and never more than half the time."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

from batond.daemon.errors import NotFoundError
from batond.daemon.queue.look import Look, Sight

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST: Final = 64  # Looks of one round trip: bounds how long the event loop is busy with the answer.


class Store(Protocol):
    """The part of the queue that is needed; see JobReader."""

    async def look(self, looks: Sequence[Look]) -> list[Sight]:
        """Gives what many looks see."""


class Lookout:
    """Gathers looks: those that come while one round trip is under way, or after it, share the next.

    After a round trip it rests for as long as that took. So, however many jobs are watched and however many
    tokens they put out elsewhere, looking takes half the event loop at most: watchers then see more tokens
    at once, a little later. With few watchers a look takes a round trip.

    Args:
        store: The queue.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._asked: deque[tuple[Look, asyncio.Future[Sight]]] = deque()
        self._task: asyncio.Task[None] | None = None

    async def look(self, tenant: str, job_id: str, from_indexes: Sequence[int]) -> Sight:
        """Return state and committed output of a job; see Look.

        Raises:
            NotFoundError: There is no such job of this tenant.
            UnavailableError: Redis is away.
        """
        answer: asyncio.Future[Sight] = asyncio.get_running_loop().create_future()
        self._asked.append((Look(tenant, job_id, from_indexes), answer))
        if self._task is None:
            self._task = asyncio.create_task(self._work(), name="lookout")
        sight = await answer
        if sight.state is None:
            raise NotFoundError(
                f"there is no job {job_id!r}: it was never submitted by this tenant, "
                "or its result has expired",
                tenant=tenant,
                job_id=job_id,
            )
        return sight

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._asked:
                began_s = loop.time()
                await self._look_together()
                await asyncio.sleep(loop.time() - began_s)
        finally:
            self._task = None

    async def _look_together(self) -> None:
        asked: list[tuple[Look, asyncio.Future[Sight]]] = []
        while self._asked and len(asked) < MOST:
            look, answer = self._asked.popleft()
            if not answer.done():  # Its watcher may have gone.
                asked.append((look, answer))
        if not asked:
            return
        try:
            sights = await self._store.look([look for look, _ in asked])
        except Exception as error:  # noqa: BLE001 - whatever it is, each watcher raises it; none waits for ever
            for _, answer in asked:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (_, answer), sight in zip(asked, sights, strict=True):
            if not answer.done():
                answer.set_result(sight)
