"""Steps on their way to Redis: kept in order and in bounds, committed, and only then shown to watchers."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from batond.daemon.errors import BatondError, ConfigError, ExhaustedError, UnavailableError
from batond.daemon.front.merge import Merger
from batond.daemon.queue import CommitResult, HandBackOutcome, Refusal, Why
from batond.daemon.telemetry.logging import get_logger
from batond.daemon.wire.messages import HandBack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batond.daemon.front.engine_desk import EngineDesk
    from batond.daemon.front.figures import Figures
    from batond.daemon.front.held import HeldJob
    from batond.daemon.front.held_jobs import HeldJobs
    from batond.daemon.front.redis_health import RedisHealth
    from batond.daemon.front.steps import JobStep
    from batond.daemon.front.traces import JobTraces
    from batond.daemon.queue import Chunk, JobStore, StepCommit
    from batond.daemon.telemetry.metrics import Metrics

RETRY_REDIS_S: Final = 0.25
#: Output kept while Redis is away; beyond, the engine waits. About 60,000 steps of one token for one job.
MOST_UNSAVED_BYTES: Final = 64 << 20
#: Of this, what goes to Redis in one call: encoding it holds the event loop, and writing it the server.
MOST_JOINED_BYTES: Final = 4 << 20
#: Jobs of one call. While Redis writes one part of a large step, watchers are shown the part before it.
JOBS_A_CALL: Final = 64
#: What a job's part of a step takes besides its output, in Python's objects.
_STEP_BYTES: Final = 1024
_TOKEN_BYTES: Final = 40
#: Redis may do next time what it refused: it was away, full, or its user's rights are being mended.
_PASSING: Final = (UnavailableError, ExhaustedError, ConfigError)

_log = get_logger(__name__)


class Committer:
    """The one place that writes what jobs did, and that delivers.

    Args:
        store: The queue.
        owner: This run of this daemon.
        jobs: Held jobs.
        desk: The engine.
        figures: Counts jobs that ended.
        metrics: Figures.
        health: Is told how Redis does.
        cancel: Ends a job that somebody asked to cancel.
        traces: Spans of jobs; None where there are none.
    """

    def __init__(
        self,
        *,
        store: JobStore,
        owner: str,
        jobs: HeldJobs,
        desk: EngineDesk,
        figures: Figures,
        metrics: Metrics,
        health: RedisHealth,
        cancel: Callable[[str, str], None],
        traces: JobTraces | None = None,
    ) -> None:
        self._store, self._owner, self._jobs, self._desk = store, owner, jobs, desk
        self._figures, self._metrics, self._health, self._cancel = figures, metrics, health, cancel
        self._traces = traces
        self._steps: asyncio.Queue[tuple[list[JobStep], int] | asyncio.Event] = asyncio.Queue()
        self._kept_bytes = 0
        self._room = asyncio.Event()

    @property
    def unsaved(self) -> int:
        """Steps that are not in Redis yet."""
        return self._steps.qsize()

    @property
    def full(self) -> bool:
        """Whether more output must wait, and the engine with it."""
        return self._kept_bytes >= MOST_UNSAVED_BYTES

    async def put(self, *steps: JobStep) -> None:
        """Commit what one step did to jobs, after all that was put before; waits while there is no room."""
        if self.full:
            _log.warning("generation_waits", unsaved_bytes=self._kept_bytes, steps=self.unsaved)
        while self.full:
            self._room.clear()
            await self._room.wait()
        size = sum(_size_bytes(step) for step in steps)
        self._kept(size)
        self._steps.put_nowait((list(steps), size))

    async def join(self) -> None:
        """Wait until all that was put before is committed."""
        reached = asyncio.Event()
        self._steps.put_nowait(reached)
        await reached.wait()

    async def run(self) -> None:
        """Commit and deliver until cancelled; steps that wait already go with the one before them."""
        following = None
        while True:
            item = following or await self._steps.get()
            following = None
            if isinstance(item, asyncio.Event):
                item.set()
                continue
            steps, size = item
            merger = Merger(steps)
            while size < MOST_JOINED_BYTES and not self._steps.empty():
                following = self._steps.get_nowait()
                if isinstance(following, asyncio.Event) or not merger.add(following[0]):
                    break
                size += following[1]
                following = None
            steps = merger.steps
            for first in range(0, len(steps), JOBS_A_CALL):
                await self._save(steps[first : first + JOBS_A_CALL])
            self._kept(-size)

    async def _save(self, steps: Sequence[JobStep]) -> None:
        """Commit, one part a job, and deliver."""
        started_s = time.monotonic()
        result = await self._commit([step.commit for step in steps])
        self._metrics.commit.observe(time.monotonic() - started_s)
        refused = {(r.tenant, r.job_id): r.why for r in result.refused}
        for step in steps:
            why = refused.get((step.held.tenant, step.held.job_id))
            if why is None:
                self._deliver(step)
            else:
                await self._drop(step.held, why)
        for tenant, job_id in result.cancel:
            self._cancel(tenant, job_id)

    async def hand_back(self, held: HeldJob, *, charge: str = "") -> HandBackOutcome | None:
        """Give a job back with what is committed of it; its engine must not have it any more.

        Args:
            held: Which.
            charge: Evidence that this claim counts as an attempt; empty if it does not.

        Returns:
            What became of it; None if Redis did not say: the lease runs out then.
        """
        try:
            outcome = await self._store.hand_back(
                self._owner,
                held.tenant,
                held.job_id,
                held.claimed.record.epoch,
                charge=bool(charge),
                why=charge,
            )
        except BatondError as error:
            _log.warning("hand_back_failed", **held.log_ids, error=error.message)
            return None
        if self._traces is not None:
            self._traces.handed_back(held, outcome, charged=bool(charge))
        return outcome

    def abandon(self, held: HeldJob) -> None:
        """Stop a job that is not ours any more."""
        self._desk.tell_all(HandBack, held)
        self._jobs.let_go(held)

    async def _commit(self, commits: Sequence[StepCommit]) -> CommitResult:
        """Commit a step; as often as it takes, unchanged, while Redis is away or full."""
        while True:
            try:
                with self._health.asking():
                    result = await self._store.commit_step(self._owner, commits)
            except _PASSING as error:
                self._health.note(error)
                await asyncio.sleep(RETRY_REDIS_S)
            except BatondError:
                _log.exception("commit_broke", jobs=len(commits))
                return await self._commit_apart(commits)
            else:
                self._health.note(None)
                return result

    async def _commit_apart(self, commits: Sequence[StepCommit]) -> CommitResult:
        """Commit job by job, so that one that Redis can't take fails alone."""
        if len(commits) == 1:
            lost = commits[0]
            self._store.forget(self._owner, lost.tenant, lost.job_id, epoch=lost.epoch)  # Its lease runs out.
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
            self._desk.tell_all(HandBack, step.held)  # Choices that go on although the job has failed.
            self._figures.ended(step)
            if self._traces is not None:
                self._traces.ended(step)
            self._jobs.let_go(step.held)

    async def _drop(self, held: HeldJob, why: Why) -> None:
        """A write was refused: somebody else has the job, or Redis forgot tokens (a failover)."""
        _log.warning("commit_refused", **held.log_ids, why=why.value)
        self._metrics.commits_refused.inc()
        self._desk.tell_all(HandBack, held)
        held.ended = True
        if why in {Why.GAP, Why.OVERLAP} and self._jobs.get(held.tenant, held.job_id) is held:
            await self.hand_back(held)  # It goes on from what Redis has.
        self._jobs.let_go(held)

    def _kept(self, more_bytes: int) -> None:
        self._kept_bytes += more_bytes
        self._metrics.unsaved_steps.set(self.unsaved)
        self._metrics.unsaved_bytes.set(self._kept_bytes)
        if not self.full:
            self._room.set()


def _size_bytes(step: JobStep) -> int:
    """About what a step takes until it is committed."""
    return _STEP_BYTES + sum(_chunk_bytes(chunk) for chunk in step.commit.chunks)


def _chunk_bytes(chunk: Chunk) -> int:
    logprobs = [*(chunk.logprobs or ()), *(chunk.prompt_logprobs or ())]
    numbers = sum(1 + 2 * len(one.top) for one in logprobs if one is not None)
    return _TOKEN_BYTES * (len(chunk.token_ids) + numbers) + 4 * len(chunk.text)
