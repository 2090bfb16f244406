"""A large step goes to Redis in parts, in order, and each part is shown while the next is being written."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from batond.daemon.front.committer import JOBS_A_CALL, Committer
from batond.daemon.front.hub import LiveJob
from batond.daemon.front.redis_health import RedisHealth
from batond.daemon.front.steps import JobStep
from batond.daemon.queue import Chunk, CommitResult, JobState, StepCommit
from batond.daemon.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Sequence


class Store:
    """Answers a commit when it is told to."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[list[str]] = asyncio.Queue()
        self.answers: asyncio.Queue[None] = asyncio.Queue()

    async def commit_step(self, _: str, commits: Sequence[StepCommit]) -> CommitResult:
        self.asked.put_nowait([commit.job_id for commit in commits])
        await self.answers.get()
        return CommitResult(refused=[], cancel=[])


def step(name: str) -> JobStep:
    chunk = Chunk(first_index=0, token_ids=[1], text="a")
    commit = StepCommit(tenant="t", job_id=name, epoch=1, chunks=(chunk,), state=JobState.RUNNING)
    held: Any = SimpleNamespace(tenant="t", job_id=name, live=LiveJob((0,)))
    return JobStep(held=held, commit=commit, events=[chunk], usage=None)


def shown(steps: list[JobStep]) -> int:
    return sum(bool(one.held.live.events) for one in steps)


async def test_a_part_is_shown_before_the_next_is_durable() -> None:
    """C1 holds part by part: nothing is shown that Redis does not have."""
    metrics, store = Metrics(), Store()
    committer = Committer(
        store=cast("Any", store),
        owner="o",
        jobs=cast("Any", None),
        desk=cast("Any", None),
        figures=cast("Any", None),
        metrics=metrics,
        health=RedisHealth(metrics),
        cancel=lambda *_: None,
    )
    steps = [step(str(number)) for number in range(2 * JOBS_A_CALL + 1)]
    working = asyncio.create_task(committer.run())
    asked: list[list[str]] = []
    try:
        await committer.put(*steps)
        for part in range(3):
            asked.append(await asyncio.wait_for(store.asked.get(), 10))
            assert shown(steps) == part * JOBS_A_CALL
            store.answers.put_nowait(None)
        await committer.join()
        assert shown(steps) == len(steps)
    finally:
        working.cancel()
    assert [name for part in asked for name in part] == [one.commit.job_id for one in steps]
    assert [len(part) for part in asked] == [JOBS_A_CALL, JOBS_A_CALL, 1]
