"""Jobs that end because somebody asked or their time is over, and deadlines that change meanwhile."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Final

from batond.daemon.errors import BatondError, DeadlineError
from batond.daemon.telemetry.logging import get_logger
from batond.daemon.wire.messages import Cancel, HandBack, Update

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.front.committer import Committer
    from batond.daemon.front.engine_desk import EngineDesk
    from batond.daemon.front.held import HeldJob
    from batond.daemon.front.held_jobs import HeldJobs
    from batond.daemon.queue import JobStore
    from batond.policies.classes import SlaClasses

#: A job past its deadline is ended by its engine, or, if that is silent for so long, without it.
LATE_GRACE_S: Final = 2.0
#: Longest sleep of a timer; asyncio's are not made for years.
LONGEST_TIMER_S: Final = 86_400.0

_log = get_logger(__name__)


class Endings:
    """Ends held jobs through the engine, or without it where it is silent or has not got them.

    Args:
        store: The queue.
        jobs: Held jobs.
        desk: The engine.
        committer: Takes the ends of jobs that the engine does not report.
        classes: SLA classes.
        on_update: Told that a job's class has changed.
    """

    def __init__(
        self,
        *,
        store: JobStore,
        jobs: HeldJobs,
        desk: EngineDesk,
        committer: Committer,
        classes: SlaClasses,
        on_update: Callable[[], None],
    ) -> None:
        self._store, self._jobs, self._desk, self._committer = store, jobs, desk, committer
        self._classes, self._on_update = classes, on_update
        self._here: asyncio.Queue[HeldJob] = asyncio.Queue()  # To be ended without the engine's word.
        self._updated: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    def cancel(self, held: HeldJob) -> None:
        """End a job as somebody asked."""
        if held.given:
            self._desk.tell_all(Cancel, held)
        elif self._jobs.holds(held):  # It waits for an engine, or for its turn.
            self._here.put_nowait(held)

    def watch(self, held: HeldJob) -> None:
        """End a job that is late, or look again when it may be."""
        if not self._jobs.holds(held):
            return
        if held.late:  # The engine did not answer in time.
            self._here.put_nowait(held)
            return
        left_s = min(held.left_s, held.left_to_start_s)
        if left_s <= 0:
            what = "deadline" if held.left_s <= 0 else "longest queue time"
            waited_ms = held.claimed.record.waited_ms
            held.late = f"its {what} is over; it waited {waited_ms} ms in the queue"
            self._desk.tell_all(Cancel, held)
            left_s = LATE_GRACE_S if held.given and self._desk.ready is not None else 0.0
        if left_s < math.inf:
            loop = asyncio.get_running_loop()
            held.timer = loop.call_later(min(left_s, LONGEST_TIMER_S), self.watch, held)

    def update(self, tenant: str, job_id: str) -> None:
        """A job's class or deadline may have changed: if this daemon holds it, its engine hears of it."""
        if self._jobs.get(tenant, job_id) is not None:
            self._updated.put_nowait((tenant, job_id))

    async def end_here(self) -> None:
        """End jobs without the engine's word, until cancelled."""
        while True:
            held = await self._here.get()
            if not self._jobs.holds(held):
                continue
            _log.info("job_ended_here", **held.log_ids, late=held.late)
            self._desk.tell_all(HandBack, held)
            await self._committer.put(
                held.fail(held.late, DeadlineError.reason) if held.late else held.cancel()
            )

    async def take_updates(self) -> None:
        """Look at jobs that may have changed, and tell the engine what has, until cancelled."""
        while True:
            tenant, job_id = await self._updated.get()
            try:
                record = await self._store.get(tenant, job_id)
            except BatondError:
                continue  # The next renewal says it again; a job that is gone needs nothing.
            held = self._jobs.get(tenant, job_id)
            if held is None or held.ended or held.late or record.sla_class not in self._classes:
                continue
            if held.take_update(record):
                for query_id in held.query_ids if held.given else ():
                    self._desk.tell(
                        Update(query_id=query_id, sla_class=record.sla_class, deadline_s=held.left_s)
                    )
                if held.timer is not None:
                    held.timer.cancel()
                self.watch(held)
                self._on_update()  # Its old class has room for one more.
