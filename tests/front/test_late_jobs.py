"""Held jobs that are late: the dispatcher, with a queue and an engine of the test's own."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Any, Self

import msgspec

from batond.daemon.front import dispatcher as module
from batond.daemon.front.dispatcher import Dispatcher
from batond.daemon.front.hub import Hub
from batond.daemon.queue import CommitResult, Counts, JobState, Reaped, StepCommit, TenantLimits
from batond.daemon.telemetry.metrics import Metrics
from batond.daemon.wire.messages import (
    Cancel,
    Finished,
    FinishReason,
    HandBack,
    Ready,
    Started,
    StepEvents,
    Submit,
    Tokens,
    Usage,
)
from batond.policies.classes import SlaClasses

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import pytest

    from batond.daemon.front.held import HeldJob
    from batond.daemon.queue import ClaimedJob

    Hold = Callable[..., HeldJob]

USAGE = Usage(prompt_tokens=2, output_tokens=1, parks=0, recomputed_tokens=0, waited_s=0.0, parked_s=0.0)


def timed(held: HeldJob, **times: int) -> ClaimedJob:
    """The claim with deadlines, at 1000 ms of the Redis clock."""
    record = msgspec.structs.replace(held.claimed.record, waited_ms=70, **times)
    return msgspec.structs.replace(held.claimed, record=record, now_ms=1000)


class Queue:
    """A queue that gives what it was made with and keeps what is committed."""

    def __init__(self, *jobs: ClaimedJob) -> None:
        self.jobs = list(jobs)
        self.commits: list[StepCommit] = []
        self.ended = asyncio.Event()

    async def claim(self, *_: Any, **__: Any) -> list[ClaimedJob]:
        jobs, self.jobs = self.jobs, []
        return jobs

    async def commit_step(self, _: str, commits: list[StepCommit]) -> CommitResult:
        self.commits += commits
        if any(one.state is not None and one.state.final for one in commits):
            self.ended.set()
        return CommitResult(refused=[], cancel=[])

    async def reap(self) -> Reaped:
        return Reaped(requeued=[], cancelled=[], dead=[], late=[], swept=0)

    async def counts(self) -> Counts:
        return Counts(queued={}, oldest_wait_ms={}, held=0, dead=0, totals={})

    async def notices(self, _: str) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield None


class Engine:
    """A link that keeps what it is told and answers when the test says so."""

    def __init__(self, ready: Ready) -> None:
        self.ready: Ready | None = ready
        self.told: list[Any] = []

    def send(self, command: Any) -> None:
        self.told.append(command)

    async def heard(self, kind: type) -> Any:
        async with asyncio.timeout(10):
            while True:
                for command in self.told:
                    if isinstance(command, kind):
                        return command
                await asyncio.sleep(0.005)


class Keeper:
    """Leases are not this test's matter."""

    def hold(self, *_: Any) -> None: ...

    def drop(self, *_: Any) -> None: ...


class Scene:
    """A dispatcher at work."""

    def __init__(self, *jobs: ClaimedJob) -> None:
        self.queue = Queue(*jobs)
        ready = Ready(
            model="m",
            device="none",
            rows=4,
            max_query_tokens=64,
            vocab_size=100,
            eos_token_ids=[0],
            batch_kind="none",
            batch_reason="",
            preemption_mode="offload",
            kv_bytes_per_token=1,
            host_pool_bytes=1,
            policy="fcfs",
            load_s=0.0,
        )
        self.engine = Engine(ready)
        parts: dict[str, Any] = {"store": self.queue, "keeper": Keeper(), "link": self.engine}
        self.dispatcher = Dispatcher(
            **parts,
            hub=Hub(),
            classes=SlaClasses(),
            metrics=Metrics(),
            owner="d1",
            lease_s=10,
            claim_ahead=2,
            max_attempts=3,
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


def finished(held: HeldJob, reason: FinishReason) -> Finished:
    return Finished(query_id=held.query_id(), finish_reason=reason, usage=USAGE)


async def test_a_running_job_past_its_deadline_ends_with_what_it_has(hold: Hold) -> None:
    held = hold(max_tokens=9)
    async with Scene(timed(held, deadline_ms=1200)) as scene:
        submit = await scene.engine.heard(Submit)
        assert 0.0 < submit.deadline_s <= 0.2
        assert submit.tenant_weight == 2.5
        name = held.query_id()
        await scene.say(Started(query_id=name, row=0))
        await scene.say(Tokens(query_id=name, first_index=0, token_ids=[4], text=""))
        await scene.engine.heard(Cancel)
        flush = Tokens(query_id=name, first_index=1, token_ids=[5], text="xy")
        await scene.say(flush, finished(held, FinishReason.CANCELLED))
        last = await scene.last()
    assert (last.state, last.error_reason, last.finish_reason) == (JobState.FAILED, "DEADLINE_EXCEEDED", "")
    assert "its deadline is over; it waited 70 ms in the queue" in last.error_message
    chunks = [chunk for commit in scene.queue.commits for chunk in commit.chunks]
    assert [(chunk.token_ids, chunk.text) for chunk in chunks] == [([4], ""), ([5], "xy")]
    assert scene.dispatcher.running_jobs == 0


async def test_a_silent_engine_does_not_keep_a_late_job(hold: Hold, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LATE_GRACE_S", 0.05)
    held = hold(max_tokens=9)
    async with Scene(timed(held, deadline_ms=1010)) as scene:
        last = await scene.last()
        assert last.state is JobState.FAILED
        await scene.say(Tokens(query_id=held.query_id(), first_index=0, token_ids=[4], text="late"))
        assert scene.queue.commits == [last]
    assert any(isinstance(command, Cancel) for command in scene.engine.told)


async def test_without_an_engine_a_late_job_ends_at_once(hold: Hold) -> None:
    async with Scene(timed(hold(), deadline_ms=1200)) as scene:
        await scene.engine.heard(Submit)
        scene.engine.ready = None
        assert (await scene.last()).error_reason == "DEADLINE_EXCEEDED"


async def test_a_claimed_job_without_a_row_fails_after_its_longest_queue_time(hold: Hold) -> None:
    held = hold()
    async with Scene(timed(held, start_by_ms=1050)) as scene:
        await scene.engine.heard(Cancel)
        await scene.say(finished(held, FinishReason.CANCELLED))
        last = await scene.last()
    assert last.error_reason == "DEADLINE_EXCEEDED"
    assert "longest queue time" in last.error_message


def test_a_row_in_time_ends_the_queue_time(hold: Hold) -> None:
    held = hold()
    held.claimed, held.claimed_s = timed(held, start_by_ms=2000), time.monotonic()
    assert 0.5 < held.left_to_start_s <= 1.0
    assert held.left_s == math.inf
    held.digest([Started(query_id=held.query_id(), row=0)])
    assert held.left_to_start_s == math.inf


async def test_a_job_that_ends_in_the_same_moment_has_ended_well(hold: Hold) -> None:
    held = hold(max_tokens=1)
    async with Scene(timed(held, deadline_ms=1050)) as scene:
        await scene.engine.heard(Cancel)
        tokens = Tokens(query_id=held.query_id(), first_index=0, token_ids=[4], text="x")
        await scene.say(tokens, finished(held, FinishReason.LENGTH))
        assert (await scene.last()).state is JobState.SUCCEEDED


async def test_a_job_with_time_is_left_alone_and_its_timer_ends_with_it(hold: Hold) -> None:
    held = hold(max_tokens=1)
    async with Scene(timed(held, deadline_ms=10**12)) as scene:
        await scene.engine.heard(Submit)
        (kept,) = scene.dispatcher._held.values()
        await scene.say(finished(held, FinishReason.CANCELLED))
        assert (await scene.last()).state is JobState.CANCELLED
        async with asyncio.timeout(10):
            await scene.dispatcher._empty.wait()
        assert kept.timer is not None
        assert kept.timer.cancelled()
    assert not any(isinstance(command, (Cancel, HandBack)) for command in scene.engine.told)
