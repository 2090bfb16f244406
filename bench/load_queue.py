"""The queue's scripts against the same writes without a script, on one Redis, in turn.

Both sides are sent by the same client in pipelines of the same length. Beside jobs a second, which two
processes share, stands what Redis itself spends: that says how many it could take from many clients.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from batond.bench import load_bare as bare
from batond.bench.load_cpu import Meter
from batond.daemon.queue import Chunk, JobSpec, JobState, JobStore, StepCommit, open_async
from batond.daemon.requests.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from batond.bench.load_bare import Writer
    from batond.bench.load_cpu import Spent
    from batond.daemon.queue import ClaimedJob, EmbeddedRedis

CLASSES: Final = ("interactive", "standard", "batch")
TENANTS: Final = 20
PROMPT_TOKENS: Final = 32
LEASE_MS: Final = 600_000
MOST_QUEUED: Final = 10_000_000
BODY_HASH: Final = "0" * 64
SPEC_JSON: Final = msgspec.json.encode(
    JobSpec(prompt_token_ids=list(range(PROMPT_TOKENS)), sampling=SamplingParams(max_tokens=64), seed=7)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRate:
    """One kind of work, medians over the rounds.

    Attributes:
        work: What was done.
        per_s: Jobs a second through the scripts.
        bare_per_s: The same writes a second without a script.
        redis_us: CPU time of Redis a job, microseconds.
        bare_redis_us: The same without a script.
        client_us: CPU time of the client a job, microseconds.
        commands: Redis commands a job inside the scripts.
    """

    work: str
    per_s: float
    bare_per_s: float
    redis_us: float
    bare_redis_us: float
    client_us: float
    commands: float

    @property
    def ratio(self) -> float:
        """Share of the bare rate that the scripts reach."""
        return self.per_s / self.bare_per_s

    @property
    def redis_per_s(self) -> float:
        """Jobs a second that fill one core of Redis."""
        return 1e6 / self.redis_us

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "ratio": self.ratio, "redis_per_s": self.redis_per_s}


class QueueBench:
    """Measures one queue on a server of its own.

    Args:
        server: Running; emptied at the start and the end.
        window: Jobs a pipeline, and a claim.
        round_jobs: Jobs a round.
        rounds: Rounds of each kind of work; scripts and bare writes take turns.
    """

    def __init__(self, server: EmbeddedRedis, *, window: int, round_jobs: int, rounds: int) -> None:
        self._server = server
        self._window = max(1, window // len(CLASSES)) * len(CLASSES)  # As many of each class.
        self._round_jobs = max(1, round_jobs // self._window) * self._window
        self._rounds = rounds
        self._client = open_async(server.url, timeout_s=60.0)
        self._store = JobStore(self._client, "load", CLASSES, max_queued=MOST_QUEUED)
        self._names, self._owners, self._bare_names = itertools.count(), itertools.count(), itertools.count()

    async def run(self, tell: Callable[[str], None]) -> list[QueueRate]:
        """Do all kinds of work; `tell` hears what is being done."""
        rates = []
        try:
            await self._client.flushall()
            await self._teach()
            rates.append(await self._measure("submit", self._submit_round, self._bare_submit, tell))
            rates.append(await self._measure("claim", self._claim, self._bare_claim, tell))
            await self._client.flushall()
            for _ in range(self._rounds):
                await self._submit_round()
            rates.append(await self._measure("claim, commit, finish", self._cycle, self._bare_cycle, tell))
        finally:
            await self._client.flushall()
            await self._client.aclose()
        return rates

    async def _teach(self) -> None:
        """Let the server learn the scripts, which is not what is measured."""
        await self._store.submit("t", "x", spec_json=SPEC_JSON, body_hash=BODY_HASH, sla_class="standard")
        (job,) = await self._store.claim("o", dict.fromkeys(CLASSES, 1), lease_ms=LEASE_MS)
        await self._store.commit_step("o", [_end(job)])

    async def _measure(
        self,
        work: str,
        scripts: Callable[[], Awaitable[None]],
        plain: Callable[[], Awaitable[None]],
        tell: Callable[[str], None],
    ) -> QueueRate:
        """Let scripts and bare writes take turns."""
        pid = self._server.pid
        assert pid is not None  # noqa: S101 - for type checkers: it runs
        meter = Meter({"redis": pid, "client": os.getpid()})
        laps: list[tuple[Spent, Spent]] = []
        commands = 0
        for number in range(self._rounds):
            tell(f"{work}: {number + 1} of {self._rounds}")
            before = await self._commands()
            meter.lap()
            await scripts()
            with_scripts = meter.lap()
            commands += await self._commands() - before
            meter.lap()
            await plain()
            laps.append((with_scripts, meter.lap()))
        jobs = self._round_jobs

        def median(side: int, pick: Callable[[Spent], float]) -> float:
            return statistics.median(pick(lap[side]) for lap in laps)

        return QueueRate(
            work=work,
            per_s=jobs / median(0, lambda lap: lap.wall_s),
            bare_per_s=jobs / median(1, lambda lap: lap.wall_s),
            redis_us=median(0, lambda lap: lap.cpu_s["redis"]) / jobs * 1e6,
            bare_redis_us=median(1, lambda lap: lap.cpu_s["redis"]) / jobs * 1e6,
            client_us=median(0, lambda lap: lap.cpu_s["client"]) / jobs * 1e6,
            commands=commands / (jobs * self._rounds),
        )

    async def _commands(self) -> int:
        """Commands the server has run, those inside scripts too."""
        stats = await self._client.info("commandstats")
        return sum(int(one["calls"]) for one in stats.values())

    # -- submits ----------------------------------------------------------------------------------------

    async def _submit(self) -> None:
        number = next(self._names)
        _, created = await self._store.submit(
            f"tenant-{number % TENANTS}",
            f"job-{number:012}",
            spec_json=SPEC_JSON,
            body_hash=BODY_HASH,
            sla_class=CLASSES[number % len(CLASSES)],
            prompt_tokens=PROMPT_TOKENS,
        )
        if not created:
            raise RuntimeError("a new job was there already")

    async def _submit_round(self) -> None:
        """As the front does, `window` at a time."""

        async def some() -> None:
            for _ in range(self._round_jobs // self._window):
                await self._submit()

        await asyncio.gather(*(some() for _ in range(self._window)))

    async def _bare_submit(self) -> None:
        await self._bare(partial(bare.submit, spec=SPEC_JSON))

    # -- claims -----------------------------------------------------------------------------------------

    async def _windows(self) -> list[tuple[str, list[ClaimedJob]]]:
        """Claim a round's jobs, each window for another daemon."""
        windows = []
        left = self._round_jobs
        while left > 0:
            owner = f"daemon-{next(self._owners)}"
            room = {name: min(self._window, left) // len(CLASSES) for name in CLASSES}
            taken = await self._store.claim(owner, room, lease_ms=LEASE_MS)
            if not taken:
                raise RuntimeError("the queue is empty too early")
            left -= len(taken)
            windows.append((owner, taken))
        return windows

    async def _claim(self) -> None:
        await self._windows()

    async def _cycle(self) -> None:
        for owner, jobs in await self._windows():
            result = await self._store.commit_step(owner, [_token(job) for job in jobs])
            ended = await self._store.commit_step(owner, [_end(job) for job in jobs])
            if result.refused or ended.refused:
                raise RuntimeError("a commit was refused")

    async def _bare_claim(self) -> None:
        await self._bare(bare.claim)

    async def _bare_cycle(self) -> None:
        await self._bare(bare.claim, bare.commit, bare.end)

    # -- the same without scripts -----------------------------------------------------------------------

    async def _bare(self, *writers: Writer) -> None:
        """Send what writers write for a round's jobs, a pipeline a window and writer."""
        first = next(self._bare_names) * self._round_jobs
        for start in range(first, first + self._round_jobs, self._window):
            for write in writers:
                pipe = self._client.pipeline(transaction=False)
                for number in range(start, start + self._window):
                    write(
                        pipe,
                        CLASSES[number % len(CLASSES)],
                        f"tenant-{number % TENANTS}/job-{number:012}",
                        number,
                    )
                await pipe.execute()


def _token(job: ClaimedJob) -> StepCommit:
    chunk = Chunk(first_index=0, token_ids=[5], text="a")
    return StepCommit(
        tenant=job.record.tenant,
        job_id=job.record.job_id,
        epoch=job.record.epoch,
        chunks=(chunk,),
        state=JobState.RUNNING,
        prompt_tokens=PROMPT_TOKENS,
        preemptions=0,
    )


def _end(job: ClaimedJob) -> StepCommit:
    return StepCommit(
        tenant=job.record.tenant,
        job_id=job.record.job_id,
        epoch=job.record.epoch,
        state=JobState.SUCCEEDED,
        recomputed_tokens=0,
        cached_prompt_tokens=0,
        finish_reason="length",
    )
