"""Takes jobs back from daemons that are gone, lets what is over expire, and counts the queue."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from batond.daemon.errors import BatondError
from batond.daemon.telemetry.logging import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.front.figures import Figures
    from batond.daemon.front.held_jobs import HeldJobs
    from batond.daemon.front.redis_health import RedisHealth
    from batond.daemon.queue import Counts, JobStore, Reaped

REAP_EVERY_S: Final = 1.0
#: Part of a lease after which one may have run out unrenewed: each is renewed four times (lease.py).
AWAY_FOR_LONG: Final = 0.25

_log = get_logger(__name__)


class Reaper:
    """Reaps and counts; after Redis was away, not before all who live could renew leases that ran out.

    They run out only while it is away for long: calls that fail now and then put nothing off. A daemon that
    starts can't know how long it was away, also while the model was loaded: its patience begins when it runs.

    Args:
        store: The queue.
        jobs: Those held here, for the figures.
        health: Told how Redis answers.
        figures: Told the counts.
        lease_s: Of claims.
        patient_s: Nothing is taken back for so long after `run` began.
        on_requeued: Called when jobs wait again that nobody holds any more.

    Attributes:
        counts: The queue as last counted.
    """

    def __init__(
        self,
        *,
        store: JobStore,
        jobs: HeldJobs,
        health: RedisHealth,
        figures: Figures,
        lease_s: float,
        patient_s: float,
        on_requeued: Callable[[], None],
    ) -> None:
        self._store, self._jobs, self._health, self._figures = store, jobs, health, figures
        self._lease_s, self._patient_s, self._on_requeued = lease_s, patient_s, on_requeued
        self.counts: Counts | None = None

    async def run(self) -> None:
        """Reap and count until cancelled."""
        well_s = time.monotonic()
        patient_until_s = well_s + self._patient_s
        while True:
            try:
                with self._health.asking():
                    self.counts = await self._store.counts()
                    now_s = time.monotonic()
                    if now_s - well_s > REAP_EVERY_S + self._lease_s * AWAY_FOR_LONG:
                        patient_until_s = now_s + self._lease_s
                    reaped = await self._store.reap() if now_s >= patient_until_s else None
                well_s = time.monotonic()
            except BatondError as error:
                self._health.note(error)
            else:
                if reaped is not None:  # Counting only reads: it says nothing of a server that can't write.
                    self._health.note(None)
                    self._tell(reaped)
                self._figures.counted(self._jobs, self.counts)
            await asyncio.sleep(REAP_EVERY_S)

    def _tell(self, reaped: Reaped) -> None:
        if reaped.late:
            _log.info("jobs_late", failed=len(reaped.late))
        if reaped.requeued or reaped.dead:
            _log.warning("jobs_reaped", requeued=len(reaped.requeued), dead=len(reaped.dead))
            self._on_requeued()
