"""The jobs this daemon holds: the one door through which they come and go."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from batond.daemon.front.held import HeldJob, ref_of
from batond.daemon.queue.keys import job_ref

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batond.daemon.front.hub import Hub
    from batond.daemon.queue import ClaimedJob, LeaseKeeper
    from batond.daemon.telemetry.metrics import Metrics


class HeldJobs:
    """Held jobs by reference, with their leases and their records in the hub.

    Args:
        keeper: Renews the leases.
        hub: Where watchers look.
        metrics: Figures.
        on_leave: Told of each job that is let go.

    Attributes:
        empty: Set while nothing is held.
    """

    def __init__(
        self, keeper: LeaseKeeper, hub: Hub, metrics: Metrics, on_leave: Callable[[HeldJob], None]
    ) -> None:
        self._keeper, self._hub, self._metrics, self._on_leave = keeper, hub, metrics, on_leave
        self._by_ref: dict[str, HeldJob] = {}
        self._withdrawals = 0  # More than any job had that left with queries in the engine.
        self.empty = asyncio.Event()
        self.empty.set()

    def __len__(self) -> int:
        """How many."""
        return len(self._by_ref)

    def __iter__(self) -> Iterator[HeldJob]:
        """Those held now; others may come and go meanwhile."""
        return iter(list(self._by_ref.values()))

    def get(self, tenant: str, job_id: str) -> HeldJob | None:
        """Return a job, if it is held."""
        return self._by_ref.get(job_ref(tenant, job_id))

    def running(self, query_id: str) -> HeldJob | None:
        """Return the job of a query whose events still count."""
        held = self._by_ref.get(ref_of(query_id))
        return held if held is not None and held.runs(query_id) else None

    def holds(self, held: HeldJob) -> bool:
        """Whether it is held and goes on."""
        return self._by_ref.get(held.ref) is held and not held.ended

    def take(self, job: ClaimedJob) -> HeldJob:
        """Hold a job that was claimed just now. One of the same name must have been let go before."""
        record = job.record
        bases = tuple(len(choice.token_ids) for choice in job.choices)
        live = self._hub.open(record.tenant, record.job_id, base_indexes=bases)
        # After a failover, or a call that got lost, a claim can come again under its epoch: what the engine
        # still says of the query it had before must not count.
        held = HeldJob(job, live, time.monotonic(), withdrawals=self._withdrawals)
        self._by_ref[held.ref] = held
        self.empty.clear()
        self._keeper.hold(record.tenant, record.job_id, record.epoch)
        self._metrics.claimed_jobs.set(len(self._by_ref))
        return held

    def let_go(self, held: HeldJob) -> None:
        """Hold a job no more: it ended, was handed back, or somebody else has it."""
        held.ended = True
        if self._by_ref.get(held.ref) is not held:
            return
        del self._by_ref[held.ref]
        if held.open_choices:
            self._withdrawals = max(self._withdrawals, held.withdrawals + 1)
        if held.timer is not None:
            held.timer.cancel()
        self._keeper.drop(held.tenant, held.job_id)
        self._hub.close(held.tenant, held.job_id)
        self._metrics.claimed_jobs.set(len(self._by_ref))
        if not self._by_ref:
            self.empty.set()
        self._on_leave(held)
