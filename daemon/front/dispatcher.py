"""The heart of the front: jobs from Redis to the engine, and what came of them back and to watchers.

    claims          Redis ──claim──> held_jobs: lease, hub ──trials: Submit──> engine
    engine events   engine ──StepEvents──> one commit per step ──> committer
    committer       commits in order ──commit_step──> Redis, then hub; kept and retried while Redis is away
    trials          an engine died ──> suspects get the next one alone, in turns, until proven or convicted
    notices         Redis ──wake, cancel, update──> claims, engine
    endings         somebody asked, or a deadline passes ──Cancel──> engine; or an end without its word
    reaper          expired leases and results, late jobs that wait, figures for metrics

Every task runs on one asyncio loop. `HeldJobs` is the state they share.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from batond.daemon.errors import BatondError, NotFoundError, StateError
from batond.daemon.front.claims import Claims
from batond.daemon.front.committer import RETRY_REDIS_S, Committer
from batond.daemon.front.endings import Endings
from batond.daemon.front.engine_desk import EngineDesk
from batond.daemon.front.figures import Figures
from batond.daemon.front.held_jobs import HeldJobs
from batond.daemon.front.reaper import Reaper
from batond.daemon.front.redis_health import RedisHealth
from batond.daemon.front.trials import Trials
from batond.daemon.queue import NoticeKind
from batond.daemon.telemetry.logging import get_logger
from batond.daemon.wire.messages import CommandResult, HandBack, Park, Resume

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from batond.daemon.front.engine_link import EngineLink
    from batond.daemon.front.held import HeldJob
    from batond.daemon.front.hub import Hub
    from batond.daemon.front.recent import Recent
    from batond.daemon.front.steps import JobStep
    from batond.daemon.front.traces import JobTraces
    from batond.daemon.queue import ClaimedJob, Counts, JobStore, LeaseKeeper, TenantLimits
    from batond.daemon.telemetry.metrics import Metrics
    from batond.daemon.wire.messages import QueryEvent, Ready, Snapshot, StepEvents
    from batond.policies.classes import SlaClasses

#: At the end, how long Redis is waited for; what it did not take is computed again after the leases.
SAVE_TIMEOUT_S: Final = 5.0
#: Then all that is not saved is given back in one call, if Redis answers it.
RELEASE_TIMEOUT_S: Final = 2.0
#: Who parks or resumes by hand waits so long for the row to be taken or given, and for Redis to have it.
STEER_WAIT_S: Final = 2.0

_log = get_logger(__name__)


class Dispatcher:
    """Moves jobs; see the module's docstring.

    Args:
        store: The queue.
        keeper: Renews the leases.
        hub: Where watchers look.
        link: The engine.
        classes: SLA classes.
        metrics: Figures.
        owner: This run of this daemon.
        lease_s: Of claims.
        claim_ahead: Jobs of a class claimed beyond the rows.
        tenants: Gives shares and quotas by tenant as they are now.
        patient_s: For so long after its start no job is taken back from a daemon that may live.
        traces: Spans of jobs; None where there are none.

    Attributes:
        snapshot: The batch as the engine last described it.
        draining: No more claims.
    """

    def __init__(
        self,
        *,
        store: JobStore,
        keeper: LeaseKeeper,
        hub: Hub,
        link: EngineLink,
        classes: SlaClasses,
        metrics: Metrics,
        owner: str,
        lease_s: float,
        claim_ahead: int,
        tenants: Callable[[], Mapping[str, TenantLimits]] = dict,
        patient_s: float = 0.0,
        traces: JobTraces | None = None,
    ) -> None:
        self._store, self._hub, self._owner = store, hub, owner
        self._metrics, self._traces = metrics, traces
        self._snapshot_news = asyncio.Event()
        self._figures = Figures(metrics, classes.names)
        self._health = RedisHealth(metrics)
        self._desk = desk = EngineDesk(link)
        self._jobs = jobs = HeldJobs(keeper, hub, metrics, self._left)
        self._committer = committer = Committer(
            store=store,
            owner=owner,
            jobs=jobs,
            desk=desk,
            figures=self._figures,
            metrics=metrics,
            health=self._health,
            cancel=self.cancel,
            traces=traces,
        )
        self._trials = Trials(
            store=store,
            owner=owner,
            jobs=jobs,
            desk=desk,
            committer=committer,
            classes=classes,
            metrics=metrics,
            limits=lambda: self._claims.limits,
            traces=traces,
        )
        self._endings = Endings(
            store=store, jobs=jobs, desk=desk, committer=committer, classes=classes, on_update=self.wake
        )
        self._claims = Claims(
            store=store,
            owner=owner,
            jobs=jobs,
            desk=desk,
            health=self._health,
            figures=self._figures,
            classes=classes,
            lease_s=lease_s,
            claim_ahead=claim_ahead,
            tenants=tenants,
            draining=lambda: self.draining,
            take=self._take,
        )
        self._reaper = Reaper(
            store=store,
            jobs=jobs,
            health=self._health,
            figures=self._figures,
            lease_s=lease_s,
            patient_s=patient_s,
            on_requeued=self.wake,
        )
        self._heard = self._figures.heard if traces is None else traces.after(self._figures.heard)
        self.snapshot: Snapshot | None = None
        self.draining = False

    # -- what the services ask ------------------------------------------------------------------------

    @property
    def running_jobs(self) -> int:
        """Jobs held by this daemon."""
        return len(self._jobs)

    @property
    def counts(self) -> Counts | None:
        """The queue as last counted."""
        return self._reaper.counts

    @property
    def policy(self) -> str:
        """Policy set by hand, for this engine and those after it; empty is the configured one."""
        return self._desk.policy

    @property
    def redis_up(self) -> bool:
        """Whether Redis does what it is asked."""
        return self._health.up

    @property
    def waits_for_redis(self) -> bool:
        """Whether generation waits because Redis has been away for long."""
        return self._committer.full

    def wake(self) -> None:
        """A job was submitted here: claim at once."""
        self._claims.wake()

    def cancel(self, tenant: str, job_id: str) -> None:
        """End a job that this daemon holds, as somebody asked."""
        held = self._jobs.get(tenant, job_id)
        if held is not None:
            self._endings.cancel(held)

    def update(self, tenant: str, job_id: str) -> None:
        """A job's class or deadline may have changed: if this daemon holds it, its engine hears of it."""
        self._endings.update(tenant, job_id)

    async def park(self, tenant: str, job_id: str) -> None:
        """Park a job by hand, with all its choices that can be parked.

        Raises:
            NotFoundError: The job is not in this daemon's engine.
            StateError: It can't be parked now.
            UnavailableError: There is no engine now.
        """
        held = self._running(tenant, job_id)
        await self._desk.ask_all(Park, held)
        await self._shown(held, parked=True)

    async def resume(self, tenant: str, job_id: str) -> None:
        """Let a job parked by hand compete again; raises as `park`."""
        held = self._running(tenant, job_id)
        await self._desk.ask_all(Resume, held)
        await self._shown(held, parked=False)

    async def _shown(self, held: HeldJob, *, parked: bool) -> None:
        """Wait until the record says what was done; not for long: all rows may be taken, or Redis be away."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STEER_WAIT_S):
                while held.parked is not parked and not held.live.closed:
                    await held.live.wait_beyond(len(held.live.events))
                await self._committer.join()

    async def set_policy(self, name: str) -> None:
        """Exchange the engine's policy; raises as `park`."""
        await self._desk.set_policy(name)

    def lost(self, tenant: str, job_id: str, epoch: int) -> None:
        """A lease ran out: somebody else may have the job, and our writes are refused."""
        self._store.forget(self._owner, tenant, job_id, epoch=epoch)
        held = self._jobs.get(tenant, job_id)
        if held is not None and held.claimed.record.epoch == epoch:
            _log.warning("lease_lost", **held.log_ids)
            self._committer.abandon(held)

    @property
    def recent(self) -> Recent:
        """The latest times by class."""
        return self._figures.recent

    async def next_snapshot(self) -> None:
        """Wait for a snapshot newer than the present one."""
        await self._snapshot_news.wait()

    # -- tasks ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run all tasks until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for name, task in (
                ("claim", self._claims.run()),
                ("commit", self._committer.run()),
                ("trials", self._trials.run()),
                ("notices", self._listen_forever()),
                ("reap", self._reaper.run()),
                ("endings", self._endings.end_here()),
                ("updates", self._endings.take_updates()),
                *((("traces", self._traces.run()),) if self._traces is not None else ()),
            ):
                tasks.create_task(task, name=name)

    async def drain(self, timeout_s: float) -> None:
        """Stop intake, let jobs finish for `timeout_s`, and hand back the rest with their tokens."""
        self.draining = True
        self._claims.wake()
        self._hub.poke_all()  # Who watches a job that runs elsewhere shall watch it elsewhere.
        await self._claims.ended.wait()  # A claim under way still brings its jobs.
        try:
            async with asyncio.timeout(timeout_s):
                await self._jobs.empty.wait()
        except TimeoutError:
            _log.info("drain_timeout", handed_back=len(self._jobs))
        leaving = [held for held in self._jobs if not held.ended]
        for held in leaving:
            self._desk.tell_all(HandBack, held)
            held.ended = True
        try:
            async with asyncio.timeout(SAVE_TIMEOUT_S):
                await self._committer.join()
                for held in leaving:
                    await self._committer.hand_back(held)
                    self._jobs.let_go(held)
        except TimeoutError:
            _log.error("not_saved", jobs=len(leaving), steps=self._committer.unsaved)
            await self._release()

    async def _release(self) -> None:
        """Give back what is still held, as it is saved: a lease that runs out is held against a job."""
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                released = await self._store.release_owner(self._owner)
        except (BatondError, TimeoutError):
            return  # Redis is away: the leases run out.
        _log.info("jobs_released", jobs=len(released))

    async def _take(self, job: ClaimedJob) -> None:
        """Hold what was claimed, unless it is held already."""
        before = self._jobs.get(job.record.tenant, job.record.job_id)
        if before is not None and before.claimed.record.epoch == job.record.epoch:
            return  # The answer to an earlier claim had been lost, or so Redis thought.
        if before is not None:
            self._committer.abandon(before)
        held = self._jobs.take(job)
        if self._traces is not None:
            self._traces.take(held)
        self._trials.take(held)
        self._endings.watch(held)
        if not held.open_choices:
            # A hand wrote its output, or its record: no query of it would ever report an end.
            await self._committer.put(held.digest([]))

    def _left(self, held: HeldJob) -> None:
        self._trials.left(held)
        if self._traces is not None:
            self._traces.left(held)
        self._claims.wake()

    async def _listen_forever(self) -> None:
        while True:
            try:
                async for notice in self._store.notices(self._owner):
                    if notice.kind is NoticeKind.CANCEL:
                        self.cancel(notice.tenant, notice.job_id)
                    elif notice.kind is NoticeKind.UPDATE:
                        self.update(notice.tenant, notice.job_id)
                    else:
                        self._claims.wake()
            except BatondError as error:
                self._health.note(error)
            await asyncio.sleep(RETRY_REDIS_S)

    # -- the engine speaks (EngineHandler) ------------------------------------------------------------

    def engine_up(self, ready: Ready) -> None:
        """Give the engine the jobs that are held: it has none of them."""
        self._metrics.engine_ready(ready)
        self._desk.engine_up(ready)
        self._trials.engine_up()
        self._claims.wake()

    def engine_begins(self, query_ids: Sequence[str]) -> None:
        """The engine is about to compute queries for the first time."""
        self._trials.begun(query_ids)

    async def engine_step(self, step: StepEvents) -> None:
        """Turn a step's events into one commit."""
        if step.snapshot is not None:
            self.snapshot = self._metrics.engine.snapshot = step.snapshot
            news, self._snapshot_news = self._snapshot_news, asyncio.Event()
            news.set()
        by_job: defaultdict[str, list[QueryEvent]] = defaultdict(list)
        jobs: dict[str, HeldJob] = {}
        for event in step.events:
            if isinstance(event, CommandResult):
                self._desk.answer(event)
                continue
            held = self._jobs.running(event.query_id)
            if held is not None:
                jobs[held.ref] = held
                by_job[held.ref].append(event)
        steps: list[JobStep] = []  # What was taken in before an error stays.
        try:
            for ref, events in by_job.items():
                steps.append(self._digest(jobs[ref], events))
        finally:
            if steps:
                self._trials.heard(steps)
                await self._committer.put(*steps)

    def engine_down(self, why: str) -> None:
        """The engine died; `why` is all that is known of it."""
        self._metrics.engine_up.set(0)
        self._metrics.engine_restarts.inc()
        self._desk.engine_down()
        for held in self._jobs:
            self._figures.engine_died(held)
        self._trials.engine_down(why)

    # -- small pieces ---------------------------------------------------------------------------------

    def _digest(self, held: HeldJob, events: Sequence[QueryEvent]) -> JobStep:
        try:
            return held.digest(events, self._heard)
        except Exception:
            # Half of it was taken in, and could never end: the next claim gives it again as it is saved.
            self._store.forget(self._owner, held.tenant, held.job_id, epoch=held.claimed.record.epoch)
            self._committer.abandon(held)
            raise

    def _running(self, tenant: str, job_id: str) -> HeldJob:
        held = self._jobs.get(tenant, job_id)
        if held is None:
            raise NotFoundError("the job is not in this daemon's engine", reason="NOT_RUNNING_HERE")
        if self._trials.tries(held):
            raise StateError("an engine died with it: it is being tried alone first", reason="SUSPECT")
        return held
