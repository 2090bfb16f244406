"""The claim loop: jobs from Redis to this daemon, as far as there is room."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from batond.daemon.errors import BatondError
from batond.daemon.front.committer import RETRY_REDIS_S

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from batond.daemon.front.engine_desk import EngineDesk
    from batond.daemon.front.figures import Figures
    from batond.daemon.front.held_jobs import HeldJobs
    from batond.daemon.front.redis_health import RedisHealth
    from batond.daemon.queue import ClaimedJob, JobStore, TenantLimits
    from batond.policies.classes import SlaClasses

IDLE_CLAIM_S: Final = 1.0  # A lost wake-up costs no more than this.


class Claims:
    """Claims at once when it is woken, and now and then without.

    Args:
        store: The queue.
        owner: This run of this daemon.
        jobs: Those held: they take up room.
        desk: The engine, whose rows are the room.
        health: Told how Redis answers.
        figures: Told of tenants that lost their turn.
        classes: SLA classes.
        lease_s: Of claims.
        claim_ahead: Jobs of a class claimed beyond the rows.
        tenants: Gives shares and quotas by tenant as they are now.
        draining: Whether no more shall be claimed.
        take: Given each job that came.

    Attributes:
        limits: Shares and quotas as last claimed with.
        ended: Set when the daemon drains and no claim is under way.
    """

    def __init__(
        self,
        *,
        store: JobStore,
        owner: str,
        jobs: HeldJobs,
        desk: EngineDesk,
        health: RedisHealth,
        figures: Figures,
        classes: SlaClasses,
        lease_s: float,
        claim_ahead: int,
        tenants: Callable[[], Mapping[str, TenantLimits]],
        draining: Callable[[], bool],
        take: Callable[[ClaimedJob], Awaitable[None]],
    ) -> None:
        self._store, self._owner, self._jobs, self._desk = store, owner, jobs, desk
        self._health, self._figures, self._classes = health, figures, classes
        self._lease_ms, self._claim_ahead = int(lease_s * 1000), claim_ahead
        self._tenants, self._draining, self._take = tenants, draining, take
        self._wake = asyncio.Event()
        self.limits: Mapping[str, TenantLimits] = {}
        self.ended = asyncio.Event()

    def wake(self) -> None:
        """There may be a job, or room for one, or an end to it: look at once."""
        self._wake.set()

    async def run(self) -> None:
        """Claim until the daemon drains."""
        claimed_s = -math.inf
        while not self._draining():
            self._wake.clear()
            # Without room a claim finds only what an answer that was lost had given: now and then is enough.
            due = time.monotonic() - claimed_s >= IDLE_CLAIM_S
            came = False
            if self._desk.ready is not None and (due or self._room()):
                claimed_s = time.monotonic()
                came = await self._claim()
            if not came:
                await self._sleep_until_wake(IDLE_CLAIM_S)
        self.ended.set()

    async def _claim(self) -> bool:
        """Claim what there is room for; returns whether anything came."""
        try:
            self.limits = self._tenants()
            with self._health.asking():
                claimed = await self._store.claim(
                    self._owner,
                    self._room(),
                    lease_ms=self._lease_ms,
                    tenants=self.limits,
                    on_rest=self._figures.rested,
                )
        except BatondError as error:
            self._health.note(error)
            await asyncio.sleep(RETRY_REDIS_S)
            return False
        if claimed:  # A claim of nothing reads only: it says nothing of a server that can't write.
            self._health.note(None)
        for job in claimed:
            await self._take(job)
        return bool(claimed)

    def _room(self) -> dict[str, int]:
        """Jobs to claim per class: an urgent job is claimed although all rows are taken.

        A job of several choices counts as so many, but is claimed where there is room for one.
        """
        ready = self._desk.ready
        if ready is None or self._draining():
            return {}
        held: Counter[str] = Counter()
        for job in self._jobs:
            held[job.claimed.record.sla_class] += max(1, len(job.open_choices))
        most = ready.rows + self._claim_ahead
        return {name: most - held[name] for name in self._classes.names if held[name] < most}

    async def _sleep_until_wake(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            return
