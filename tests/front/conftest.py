"""What tests of the front share: a tenant, held jobs without a queue, a dispatcher at work."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

import pytest

from batond.bench.fake_engine import fake_ready
from batond.daemon.front.dispatcher import Dispatcher
from batond.daemon.front.held import HeldJob
from batond.daemon.front.hub import Hub, LiveJob
from batond.daemon.front.identity import Tenant
from batond.daemon.queue import (
    ClaimedJob,
    CommitResult,
    CommittedChoice,
    Counts,
    JobRecord,
    JobSpec,
    JobState,
    Reaped,
    StepCommit,
    TenantLimits,
)
from batond.daemon.requests.params import SamplingParams
from batond.daemon.telemetry.metrics import Metrics
from batond.daemon.wire.messages import Ready, StepEvents
from batond.policies.classes import SlaClasses

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


@pytest.fixture
def tenant() -> Tenant:
    """A tenant of the standard class."""
    return Tenant(name="red", admin=False, classes=frozenset({"standard"}), default_class="standard")


@pytest.fixture
def hold() -> Callable[..., HeldJob]:
    """Holds a job as if it had just been claimed."""

    def make(
        *,
        token_ids: tuple[int, ...] = (),
        committed: list[CommittedChoice] | None = None,
        epoch: int = 1,
        job_id: str = "j",
        **sampling: Any,
    ) -> HeldJob:
        record = JobRecord(
            tenant="t",
            job_id=job_id,
            model="m",
            sla_class="standard",
            state=JobState.CLAIMED,
            body_hash="h",
            arrival_us=1,
            epoch=epoch,
            output_tokens=len(token_ids),
            ttl_ms=1,
            created_ms=1,
        )
        spec = JobSpec(prompt_token_ids=[5, 6], sampling=SamplingParams(**sampling), seed=7, session_id="s")
        choices = committed or [CommittedChoice(token_ids=list(token_ids))]
        choices += [CommittedChoice()] * (spec.sampling.n - len(choices))
        claimed = ClaimedJob(record=record, spec=spec, choices=choices)
        return HeldJob(claimed, LiveJob(tuple(len(one.token_ids) for one in choices)), 0.0)

    return make


READY = fake_ready()


@pytest.fixture
def ready() -> Ready:
    """What an engine says of itself."""
    return READY


class Queue:
    """A queue that gives what it was made with and keeps what is committed."""

    def __init__(self, *jobs: ClaimedJob) -> None:
        self.jobs = list(jobs)
        self.commits: list[StepCommit] = []
        self.ended = asyncio.Event()
        self.record: JobRecord | None = None
        self.read = asyncio.Event()

    async def claim(self, *_: Any, **__: Any) -> list[ClaimedJob]:
        jobs, self.jobs = self.jobs, []
        return jobs

    async def commit_step(self, _: str, commits: list[StepCommit]) -> CommitResult:
        self.commits += commits
        if any(one.state is not None and one.state.final for one in commits):
            self.ended.set()
        return CommitResult(refused=[], cancel=[])

    def forget(self, *_: Any, **__: Any) -> None: ...

    async def reap(self) -> Reaped:
        return Reaped(requeued=[], cancelled=[], dead=[], late=[], swept=0)

    async def counts(self) -> Counts:
        return Counts(queued={}, oldest_wait_ms={}, held=0, dead=0, totals={})

    async def get(self, *_: Any) -> JobRecord:
        assert self.record is not None
        self.read.set()
        return self.record

    async def notices(self, _: str) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield None


class Engine:
    """A link that keeps what it is told and answers when the test says so."""

    def __init__(self, ready: Ready) -> None:
        self.ready: Ready | None = ready
        self.told: list[Any] = []
        self._news = asyncio.Event()

    def send(self, command: Any) -> None:
        self.told.append(command)
        self._news.set()

    async def heard(self, kind: type, count: int = 1) -> Any:
        """The last of the first `count` commands of a kind, once it has come."""
        async with asyncio.timeout(10):
            while len(found := [command for command in self.told if isinstance(command, kind)]) < count:
                self._news.clear()
                await self._news.wait()
        return found[count - 1]


class Keeper:
    """Leases are not this test's matter."""

    def hold(self, *_: Any) -> None: ...

    def drop(self, *_: Any) -> None: ...


class Scene:
    """A dispatcher at work."""

    def __init__(self, *jobs: ClaimedJob, **options: Any) -> None:
        self.queue = Queue(*jobs)
        self.engine = Engine(READY)
        parts: dict[str, Any] = {"store": self.queue, "keeper": Keeper(), "link": self.engine, **options}
        self.dispatcher = Dispatcher(
            **parts,
            hub=Hub(),
            classes=SlaClasses(),
            metrics=Metrics(),
            owner="d1",
            lease_s=10,
            claim_ahead=2,
            tenants=lambda: {"t": TenantLimits(weight=2.5)},
        )

    async def __aenter__(self) -> Self:
        self.task = asyncio.create_task(self.dispatcher.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def say(self, *events: Any) -> None:
        await self.dispatcher.engine_step(StepEvents(step=1, events=list(events)))

    async def last(self) -> StepCommit:
        await asyncio.wait_for(self.queue.ended.wait(), 10)
        return self.queue.commits[-1]


@pytest.fixture
def scene() -> type[Scene]:
    """A dispatcher with a queue and an engine of the test's own, to be entered."""
    return Scene
