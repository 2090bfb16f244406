"""Clients of a crew in distress: they submit until they are heard, and watch from daemon to daemon."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import grpc

from batond.bench.faults.work import CLASSES, Job, Watcher
from batond.v1 import jobs_pb2, jobs_pb2_grpc, types_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batond.bench.faults.crew import Daemon

CALL_TIMEOUT_S: Final = 3.0
STREAM_TIMEOUT_S: Final = 15.0  # A paused daemon says nothing: then another is asked.
PAUSE_S: Final = 0.1
PATIENCE_S: Final = 120.0  # Whoever is not answered for so long never will be.
#: A daemon that was started again is found soon.
_CHANNEL: Final = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500))
#: What a caller may meet while daemons and Redis die; everything else is a fault of ours.
_PASSING: Final = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
)


class Crowd:
    """Submits and watches, each call at a daemon drawn anew.

    Args:
        daemons: Whom to ask.
        seed: Of the draws.
        patience_s: How long a call is made again.

    Attributes:
        accepted: Jobs that a daemon said yes to.
        watchers: Of jobs that are watched.
        counts: Tokens delivered, calls that had to be made again.
        surprises: Errors that nobody should see.
    """

    def __init__(self, daemons: Sequence[Daemon], seed: int, *, patience_s: float = PATIENCE_S) -> None:
        self._daemons = daemons
        self._patience_s = patience_s
        self._random = random.Random(seed)  # noqa: S311 - for a schedule, not for secrets
        self._stubs: list[Any] = []
        self._channels: list[grpc.aio.Channel] = []
        for daemon in daemons:
            channel = grpc.aio.insecure_channel(f"unix:{daemon.socket}", _CHANNEL)
            self._channels.append(channel)
            self._stubs.append(jobs_pb2_grpc.JobServiceStub(channel))
        self.accepted: dict[str, Job] = {}
        self.watchers: dict[str, Watcher] = {}
        self.counts: Counter[str] = Counter()
        self.surprises: list[str] = []

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def submit(self, job: Job) -> None:
        """Submit until somebody has accepted it.

        Raises:
            TimeoutError: Nobody did for too long.
        """
        spec = types_pb2.JobSpec(
            tokens=types_pb2.TokenInput(token_ids=job.prompt),
            sampling=types_pb2.SamplingParams(max_tokens=job.max_tokens, seed=job.seed),
            sla_class=job.sla_class,
        )
        request = jobs_pb2.SubmitJobRequest(job_id=job.job_id, spec=spec)
        await self._insist("SubmitJob", job, request)
        self.accepted[job.job_id] = job

    async def watch(self, job: Job) -> None:
        """Watch to the end, from daemon to daemon."""
        watcher = self.watchers[job.job_id] = Watcher(job)
        while not watcher.finished:
            before = len(watcher.token_ids)
            try:
                call = self._stub().WatchJob(
                    watcher.request(), metadata=self._who(job), timeout=STREAM_TIMEOUT_S
                )
                async for event in call:
                    watcher.see(event)
            except grpc.RpcError as error:
                await self._note(error, job)
            self.counts["tokens delivered"] += len(watcher.token_ids) - before

    async def get(self, job: Job) -> types_pb2.Job:
        """The job as it stands.

        Raises:
            TimeoutError: Nobody told for too long.
        """
        answer = await self._insist("GetJob", job, jobs_pb2.GetJobRequest(job_id=job.job_id))
        found: types_pb2.Job = answer.job
        return found

    async def _insist(self, method: str, job: Job, request: Any) -> Any:
        deadline_s = time.monotonic() + self._patience_s
        while True:
            try:
                return await getattr(self._stub(), method)(
                    request, metadata=self._who(job), timeout=CALL_TIMEOUT_S
                )
            except grpc.RpcError as error:
                if time.monotonic() >= deadline_s:
                    raise TimeoutError(
                        f"no answer to {method} for {job.job_id} in {self._patience_s:.0f} s; "
                        f"the last: {error.code()}: {error.details()}"
                    ) from error
                await self._note(error, job)

    async def _note(self, error: grpc.RpcError, job: Job) -> None:
        code = error.code()
        if code not in _PASSING:
            self.surprises.append(f"{job.job_id}: {code}: {error.details()}")
        self.counts["calls made again"] += 1
        await asyncio.sleep(PAUSE_S)

    def _stub(self) -> Any:
        return self._random.choice(self._stubs)

    def _who(self, job: Job) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self._daemons[0].tokens[job.tenant]}"),)


def draw_jobs(rng: random.Random, count: int, tenants: Sequence[str], mean_tokens: float) -> list[Job]:
    """Jobs of all classes and tenants; many short ones, a few that outlive several kills."""
    jobs = []
    for number in range(count):
        low, high = rng.choices([(0.1, 0.4), (0.5, 2.0), (4.0, 12.0)], [70, 25, 5])[0]
        max_tokens = max(1, round(mean_tokens * rng.uniform(low, high)))
        prompt = tuple(rng.randrange(1, 900) for _ in range(rng.randint(1, 12)))
        jobs.append(
            Job(
                f"c{number}",
                rng.choice(list(tenants)),
                prompt,
                max_tokens,
                rng.randrange(1 << 31),
                rng.choice(CLASSES),
            )
        )
    return jobs
