"""The heart of the front: jobs from Redis to the engine, and what came of them back and to watchers.

    claim loop      Redis ──claim──> hold lease, open in the hub ──Submit──> engine
    engine events   engine ──StepEvents──> one commit per step ──> commit queue
    committer       commit queue ──commit_step──> Redis, then hub; retried while Redis is away
    notices         Redis ──wake, cancel, update──> claim loop, engine
    timers          a deadline passes ──Cancel──> engine; the job's end is DEADLINE_EXCEEDED
    updates         a job has another class or deadline ──Update──> engine
    reaper          expired leases and results, late jobs that wait, figures for metrics

Every task runs on one asyncio loop; `_held` is the only state they share. That is also why the tasks stand in
one file of more than 400 lines: who changes `_held`, and when, must be seen at a glance.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from batond.daemon.errors import (
    BatondError,
    DeadlineError,
    ExhaustedError,
    NotFoundError,
    StateError,
    UnavailableError,
)
from batond.daemon.front.figures import Figures
from batond.daemon.front.held import HeldJob, JobStep, ref_of
from batond.daemon.front.hub import LostRow
from batond.daemon.queue import CommitResult, NoticeKind, Refusal, Why
from batond.daemon.queue.keys import job_ref
from batond.daemon.telemetry.logging import get_logger
from batond.daemon.wire.messages import (
    Cancel,
    CommandResult,
    HandBack,
    Park,
    ParkCause,
    Resume,
    SetPolicy,
    StepEvents,
    Update,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from batond.daemon.front.engine_link import EngineLink
    from batond.daemon.front.hub import Hub
    from batond.daemon.queue import ClaimedJob, Counts, JobStore, LeaseKeeper, StepCommit, TenantLimits
    from batond.daemon.telemetry.metrics import Metrics
    from batond.daemon.wire.messages import Command, QueryEvent, Ready, Snapshot
    from batond.policies.classes import SlaClasses

IDLE_CLAIM_S = 1.0  # A lost wake-up costs no more than this.
REAP_EVERY_S = 1.0
RETRY_REDIS_S = 0.25
#: Steps kept while Redis is away; beyond, the engine waits.
MOST_UNSAVED_STEPS = 4096
#: At the end, how long Redis is waited for; what it did not take is computed again after the leases.
SAVE_TIMEOUT_S = 5.0
COMMAND_TIMEOUT_S = 30.0
#: A job past its deadline is ended by its engine, or, if that is silent for so long, without it.
LATE_GRACE_S = 2.0
#: Longest sleep of a timer; asyncio's are not made for years.
LONGEST_TIMER_S = 86_400.0

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
        max_attempts: Engines a job may take down with it before it is charged.
        tenants: Gives shares and quotas by tenant as they are now.

    Attributes:
        snapshot: The batch as the engine last described it.
        counts: The queue as last counted.
        redis_up: Whether Redis answered last time.
        draining: No more claims.
        policy: Set by hand, for this engine and those after it; empty is the configured one.
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
        max_attempts: int,
        tenants: Callable[[], Mapping[str, TenantLimits]] = dict,
    ) -> None:
        self._store, self._keeper, self._hub, self._link = store, keeper, hub, link
        self._classes, self._metrics, self._owner = classes, metrics, owner
        self._lease_ms = int(lease_s * 1000)
        self._claim_ahead, self._max_attempts = claim_ahead, max_attempts
        self._figures = Figures(metrics, classes.names)
        self._tenants = tenants
        self._limits: Mapping[str, TenantLimits] = {}  # As last claimed with.
        self._held: dict[str, HeldJob] = {}
        self._late: asyncio.Queue[HeldJob] = asyncio.Queue()
        self._updated: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self._unsaved: asyncio.Queue[list[JobStep]] = asyncio.Queue(MOST_UNSAVED_STEPS)
        self._wake = asyncio.Event()
        self._claims_ended = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._snapshot_news = asyncio.Event()
        self._answers: dict[int, asyncio.Future[CommandResult]] = {}
        self._requests = itertools.count(1)
        self.snapshot: Snapshot | None = None
        self.counts: Counts | None = None
        self.redis_up = True
        self.draining = False
        self.policy = ""

    # -- what the services ask ------------------------------------------------------------------------

    @property
    def running_jobs(self) -> int:
        """Jobs held by this daemon."""
        return len(self._held)

    def wake(self) -> None:
        """A job was submitted here: claim at once."""
        self._wake.set()

    def cancel(self, tenant: str, job_id: str) -> None:
        """End a job that this daemon holds, as somebody asked."""
        held = self._held.get(job_ref(tenant, job_id))
        if held is not None:
            self._tell_all(Cancel, held)

    def update(self, tenant: str, job_id: str) -> None:
        """A job's class or deadline may have changed: if this daemon holds it, its engine hears of it."""
        if job_ref(tenant, job_id) in self._held:
            self._updated.put_nowait((tenant, job_id))

    async def park(self, tenant: str, job_id: str) -> None:
        """Park a job by hand, with all its choices that can be parked.

        Raises:
            NotFoundError: The job is not in this daemon's engine.
            StateError: It can't be parked now.
            UnavailableError: There is no engine now.
        """
        await self._ask_all(Park, self._running(tenant, job_id))

    async def resume(self, tenant: str, job_id: str) -> None:
        """Let a job parked by hand compete again; raises as `park`."""
        await self._ask_all(Resume, self._running(tenant, job_id))

    async def set_policy(self, name: str) -> None:
        """Exchange the engine's policy; raises as `park`."""
        await self._ask(SetPolicy(name=name, request_id=next(self._requests)))
        self.policy = name

    def lost(self, tenant: str, job_id: str, epoch: int) -> None:
        """A lease ran out: somebody else may have the job, and our writes are refused."""
        self._store.forget(self._owner, tenant, job_id, epoch=epoch)
        held = self._held.get(job_ref(tenant, job_id))
        if held is not None and held.claimed.record.epoch == epoch:
            _log.warning("lease_lost", tenant=tenant, job_id=job_id)
            self._abandon(held)

    async def next_snapshot(self) -> None:
        """Wait for a snapshot newer than the present one."""
        await self._snapshot_news.wait()

    # -- tasks ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run all tasks until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._claim_forever(), name="claim")
            tasks.create_task(self._commit_forever(), name="commit")
            tasks.create_task(self._listen_forever(), name="notices")
            tasks.create_task(self._reap_forever(), name="reap")
            tasks.create_task(self._end_late_forever(), name="late")
            tasks.create_task(self._update_forever(), name="updates")

    async def drain(self, timeout_s: float) -> None:
        """Stop intake, let jobs finish for `timeout_s`, and hand back the rest with their tokens."""
        self.draining = True
        self._wake.set()
        self._hub.poke_all()  # Who watches a job that runs elsewhere shall watch it elsewhere.
        await self._claims_ended.wait()  # A claim under way still brings its jobs.
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            _log.info("drain_timeout", handed_back=len(self._held))
        leaving = [held for held in self._held.values() if not held.ended]
        for held in leaving:
            held.ended = True
            self._tell_all(HandBack, held)
        try:
            async with asyncio.timeout(SAVE_TIMEOUT_S):
                await self._unsaved.join()
                for held in leaving:
                    await self._hand_back(held)
        except TimeoutError:
            _log.error("not_saved", jobs=len(leaving), steps=self._unsaved.qsize())  # Their leases run out.

    async def _claim_forever(self) -> None:
        while not self.draining:
            self._wake.clear()
            if self._link.ready is None or not await self._claim():
                await self._sleep_until_wake(IDLE_CLAIM_S)
        self._claims_ended.set()

    async def _claim(self) -> bool:
        """Claim what there is room for; returns whether anything came."""
        try:
            self._limits = self._tenants()
            claimed = await self._store.claim(
                self._owner,
                self._room(),
                lease_ms=self._lease_ms,
                tenants=self._limits,
                on_rest=self._figures.rested,
            )
        except BatondError as error:
            self._note_redis(error)
            await asyncio.sleep(RETRY_REDIS_S)
            return False
        self._note_redis(None)
        for job in claimed:
            self._take(job)
            held = self._held.get(job_ref(job.record.tenant, job.record.job_id))
            if held is not None and not held.ended and not held.open_choices:
                # A hand wrote its output, or its record: no query of it would ever report an end.
                await self._unsaved.put([held.digest([])])
        return bool(claimed)

    def _room(self) -> dict[str, int]:
        """Jobs to claim per class: an urgent job is claimed although all rows are taken.

        A job of several choices counts as so many, but is claimed where there is room for one.
        """
        ready = self._link.ready
        if ready is None or self.draining:
            return {}
        held: Counter[str] = Counter()
        for job in self._held.values():
            held[job.claimed.record.sla_class] += max(1, len(job.open_choices))
        most = ready.rows + self._claim_ahead
        return {name: most - held[name] for name in self._classes.names if held[name] < most}

    def _take(self, job: ClaimedJob) -> None:
        record = job.record
        before = self._held.get(job_ref(record.tenant, record.job_id))
        if before is not None and before.claimed.record.epoch == record.epoch:
            return  # The answer to an earlier claim had been lost, or so Redis thought.
        if before is not None:
            self._abandon(before)
        base_indexes = tuple(len(choice.token_ids) for choice in job.choices)
        live = self._hub.open(record.tenant, record.job_id, base_indexes=base_indexes)
        held = HeldJob(job, live, time.monotonic())
        self._held[held.ref] = held
        self._empty.clear()
        self._keeper.hold(record.tenant, record.job_id, record.epoch)
        self._metrics.claimed_jobs.set(len(self._held))
        self._submit(held)
        self._watch_time(held)

    def _submit(self, held: HeldJob) -> None:
        record = held.claimed.record
        waited_s = record.waited_ms / 1000 + time.monotonic() - held.claimed_s
        limits = self._limits.get(record.tenant)
        for command in held.submits(waited_s, limits.weight if limits is not None else 1.0):
            self._tell(command)
        if record.cancel_requested:
            self._tell_all(Cancel, held)

    async def _commit_forever(self) -> None:
        while True:
            steps = await self._unsaved.get()
            started_s = time.monotonic()
            result = await self._commit([step.commit for step in steps])
            self._metrics.commit.observe(time.monotonic() - started_s)
            self._metrics.unsaved_steps.set(self._unsaved.qsize())
            refused = {(r.tenant, r.job_id): r.why for r in result.refused}
            for step in steps:
                why = refused.get((step.held.tenant, step.held.job_id))
                if why is None:
                    self._deliver(step)
                else:
                    await self._drop(step.held, why)
            for tenant, job_id in result.cancel:
                self.cancel(tenant, job_id)
            self._unsaved.task_done()

    async def _commit(self, commits: Sequence[StepCommit]) -> CommitResult:
        """Commit a step; as often as it takes, unchanged, while Redis is away or full."""
        while True:
            try:
                result = await self._store.commit_step(self._owner, commits)
            except (UnavailableError, ExhaustedError) as error:
                self._note_redis(error)
                await asyncio.sleep(RETRY_REDIS_S)
            except BatondError:
                _log.exception("commit_broke", jobs=len(commits))
                return await self._commit_apart(commits)
            else:
                self._note_redis(None)
                return result

    async def _commit_apart(self, commits: Sequence[StepCommit]) -> CommitResult:
        """Commit job by job, so that one that Redis can't take fails alone."""
        if len(commits) == 1:
            lost = commits[0]
            refusal = Refusal(tenant=lost.tenant, job_id=lost.job_id, why=Why.MISSING, output_tokens=0)
            return CommitResult(refused=[refusal], cancel=[])
        results = [await self._commit([commit]) for commit in commits]
        return CommitResult(
            refused=[refusal for result in results for refusal in result.refused],
            cancel=[job for result in results for job in result.cancel],
        )

    def _deliver(self, step: JobStep) -> None:
        """Show watchers what is durable now; let go of a job that ended."""
        step.held.live.publish(step.events)
        if step.usage is not None:
            self._tell_all(HandBack, step.held)  # Choices that go on although the job has failed.
            self._figures.ended(step)
            self._let_go(step.held)

    async def _drop(self, held: HeldJob, why: Why) -> None:
        """A write was refused: somebody else has the job, or Redis forgot tokens (a failover)."""
        _log.warning("commit_refused", tenant=held.tenant, job_id=held.job_id, why=why.value)
        self._metrics.commits_refused.inc()
        if why in {Why.GAP, Why.OVERLAP}:
            self._tell_all(HandBack, held)
            await self._hand_back(held)  # It goes on from what Redis has.
        else:
            self._abandon(held)

    def _abandon(self, held: HeldJob) -> None:
        """Stop a job that is not ours any more."""
        self._tell_all(HandBack, held)
        self._let_go(held)

    def _let_go(self, held: HeldJob) -> None:
        if self._held.get(held.ref) is held:
            del self._held[held.ref]
            if held.timer is not None:
                held.timer.cancel()
            self._keeper.drop(held.tenant, held.job_id)
            self._hub.close(held.tenant, held.job_id)
        held.ended = True
        self._metrics.claimed_jobs.set(len(self._held))
        if not self._held:
            self._empty.set()
        self._wake.set()

    async def _listen_forever(self) -> None:
        while True:
            try:
                async for notice in self._store.notices(self._owner):
                    if notice.kind is NoticeKind.CANCEL:
                        self.cancel(notice.tenant, notice.job_id)
                    elif notice.kind is NoticeKind.UPDATE:
                        self.update(notice.tenant, notice.job_id)
                    else:
                        self._wake.set()
            except BatondError as error:
                self._note_redis(error)
            await asyncio.sleep(RETRY_REDIS_S)

    async def _reap_forever(self) -> None:
        while True:
            try:
                reaped = await self._store.reap()
                self.counts = await self._store.counts()
                self._note_redis(None)
            except BatondError as error:
                self._note_redis(error)
            else:
                if reaped.late:
                    _log.info("jobs_late", failed=len(reaped.late))
                if reaped.requeued or reaped.dead:
                    _log.warning("jobs_reaped", requeued=len(reaped.requeued), dead=len(reaped.dead))
                    self._wake.set()
                self._figures.counted(self._held.values(), self.counts)
            await self._end_suspects()
            await asyncio.sleep(REAP_EVERY_S)

    async def _end_suspects(self) -> None:
        """End the jobs that took too many engines with them."""
        for held in list(self._held.values()):
            if held.engine_deaths >= self._max_attempts and not held.ended:
                _log.error("job_kills_engines", tenant=held.tenant, job_id=held.job_id)
                await self._unsaved.put([held.fail(f"the engine died {held.engine_deaths} times with it")])

    # -- deadlines ------------------------------------------------------------------------------------

    def _watch_time(self, held: HeldJob) -> None:
        """End a job that is late, or look again when it may be."""
        if self._held.get(held.ref) is not held or held.ended:
            return
        if held.late:  # The engine did not answer in time.
            self._late.put_nowait(held)
            return
        left_s = min(held.left_s, held.left_to_start_s)
        if left_s <= 0:
            what = "deadline" if held.left_s <= 0 else "longest queue time"
            waited_ms = held.claimed.record.waited_ms
            held.late = f"its {what} is over; it waited {waited_ms} ms in the queue"
            self._tell_all(Cancel, held)
            left_s = LATE_GRACE_S if self._link.ready is not None else 0.0
        if left_s < math.inf:
            loop = asyncio.get_running_loop()
            held.timer = loop.call_later(min(left_s, LONGEST_TIMER_S), self._watch_time, held)

    async def _end_late_forever(self) -> None:
        """End jobs that are late without the engine's word."""
        while True:
            held = await self._late.get()
            if self._held.get(held.ref) is held and not held.ended:
                _log.warning("late_job_ended_here", tenant=held.tenant, job_id=held.job_id)
                await self._unsaved.put([held.fail(held.late, DeadlineError.reason)])

    async def _update_forever(self) -> None:
        """Look at jobs that may have changed, and tell the engine what has."""
        while True:
            tenant, job_id = await self._updated.get()
            try:
                record = await self._store.get(tenant, job_id)
            except BatondError:
                continue  # The next renewal says it again; a job that is gone needs nothing.
            held = self._held.get(job_ref(tenant, job_id))
            if held is None or held.ended or held.late or record.sla_class not in self._classes:
                continue
            if held.take_update(record):
                for query_id in held.query_ids:
                    self._tell(Update(query_id=query_id, sla_class=record.sla_class, deadline_s=held.left_s))
                if held.timer is not None:
                    held.timer.cancel()
                self._watch_time(held)
                self._wake.set()  # Its old class has room for one more.

    # -- the engine speaks (EngineHandler) ------------------------------------------------------------

    def engine_up(self, ready: Ready) -> None:
        """Give the engine every job that is held, but those that killed too many: it has none of them."""
        self._metrics.engine_up.set(1)
        if self.policy and self.policy != ready.policy:
            self._tell(SetPolicy(name=self.policy, request_id=next(self._requests)))
        for held in list(self._held.values()):
            if not held.ended and held.engine_deaths < self._max_attempts:
                self._submit(held)
        self._wake.set()

    async def engine_step(self, step: StepEvents) -> None:
        """Turn a step's events into one commit."""
        if step.snapshot is not None:
            self.snapshot = self._metrics.engine.snapshot = step.snapshot
            news, self._snapshot_news = self._snapshot_news, asyncio.Event()
            news.set()
        by_job: defaultdict[str, list[QueryEvent]] = defaultdict(list)
        for event in step.events:
            if isinstance(event, CommandResult):
                self._answer(event)
                continue
            held = self._held.get(ref_of(event.query_id))
            if held is not None and held.runs(event.query_id):
                by_job[held.ref].append(event)
        steps = [self._held[ref].digest(events, self._figures.heard) for ref, events in by_job.items()]
        if steps:
            await self._unsaved.put(steps)

    def engine_down(self) -> None:
        """Count the death against every job that was in it."""
        self._metrics.engine_up.set(0)
        self._metrics.engine_restarts.inc()
        for future in self._answers.values():
            if not future.done():
                future.set_exception(UnavailableError("the engine died", reason="ENGINE_DOWN"))
        for held in self._held.values():
            self._figures.engine_died(held)
            if held.active:  # One that only waited is not suspected.
                held.engine_deaths += 1
                held.active = False
                held.live.publish(
                    [
                        LostRow(ParkCause.ENGINE_RESTART, kept=False, choice=index)
                        for index in held.open_choices
                    ]
                )

    # -- small pieces ---------------------------------------------------------------------------------

    async def _hand_back(self, held: HeldJob) -> None:
        try:
            await self._store.hand_back(self._owner, held.tenant, held.job_id, held.claimed.record.epoch)
        except BatondError as error:
            _log.warning("hand_back_failed", job_id=held.job_id, error=error.message)  # Its lease runs out.
        self._let_go(held)

    def _running(self, tenant: str, job_id: str) -> HeldJob:
        held = self._held.get(job_ref(tenant, job_id))
        if held is None:
            raise NotFoundError("the job is not in this daemon's engine", reason="NOT_RUNNING_HERE")
        return held

    async def _ask_all(self, kind: type[Park | Resume], held: HeldJob) -> None:
        """Ask something of each query of a job; it is refused if all refuse."""
        refusals = []
        for query_id in held.query_ids:
            try:
                await self._ask(kind(query_id=query_id, request_id=next(self._requests)))
            except StateError as error:
                refusals.append(error)
        if refusals and len(refusals) >= len(held.query_ids):
            raise refusals[0]

    async def _ask(self, command: Park | Resume | SetPolicy) -> None:
        future = asyncio.get_running_loop().create_future()
        self._answers[command.request_id] = future
        try:
            self._link.send(command)
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                result: CommandResult = await future
        except TimeoutError as error:
            raise UnavailableError("the engine did not answer", reason="ENGINE_SILENT") from error
        finally:
            del self._answers[command.request_id]
        if result.reason:
            raise StateError(result.message, reason=result.reason)

    def _answer(self, result: CommandResult) -> None:
        future = self._answers.get(result.request_id)
        if future is not None and not future.done():
            future.set_result(result)

    def _tell(self, command: Command) -> None:
        """Send a command; without an engine it is not needed: a new one is told everything."""
        try:
            self._link.send(command)
        except UnavailableError:
            return

    def _tell_all(self, kind: type[Cancel | HandBack], held: HeldJob) -> None:
        for query_id in held.query_ids:
            self._tell(kind(query_id=query_id))

    def _note_redis(self, error: BatondError | None) -> None:
        """Redis did what was asked, or did not: away, full, or another fault it may recover from."""
        up = error is None
        if up != self.redis_up:
            _log.warning("redis_back" if up else "redis_away", error=error.message if error else "")
        self.redis_up = up
        self._metrics.redis_up.set(up)

    async def _sleep_until_wake(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            return
