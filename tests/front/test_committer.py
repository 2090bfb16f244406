"""A large step goes to Redis in parts, in order, and each part is shown while the next is being written."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from batond.daemon.errors import BatondError
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
    held: Any = SimpleNamespace(tenant="t", job_id=name, live=LiveJob((0,)), log_ids={})
    return JobStep(held=held, commit=commit, events=[chunk], usage=None)


def shown(steps: list[JobStep]) -> int:
    return sum(bool(one.held.live.events) for one in steps)


def committer_on(store: Any, jobs: Any = None) -> Committer:
    metrics = Metrics()
    return Committer(
        store=store,
        owner="o",
        jobs=jobs,
        desk=cast("Any", SimpleNamespace(tell_all=lambda *_: None)),
        figures=cast("Any", None),
        metrics=metrics,
        health=RedisHealth(metrics),
        cancel=lambda *_: None,
    )


async def test_a_part_is_shown_before_the_next_is_durable() -> None:
    """C1 holds part by part: nothing is shown that Redis does not have."""
    store = Store()
    committer = committer_on(store)
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


async def test_a_job_that_breaks_its_commit_fails_alone_and_is_no_longer_taken_for_held() -> None:
    """Only then can a claim give it back to this daemon when its lease has run out."""
    forgotten: list[tuple[str, int]] = []
    let_go: list[str] = []

    async def commit_step(_: str, commits: Sequence[StepCommit]) -> CommitResult:
        if any(commit.job_id == "bad" for commit in commits):
            raise BatondError("no script takes this", reason="INTERNAL")
        return CommitResult(refused=[], cancel=[])

    def forget(_: str, __: str, job_id: str, *, epoch: int) -> None:
        forgotten.append((job_id, epoch))

    jobs = SimpleNamespace(let_go=lambda held: let_go.append(held.job_id))
    committer = committer_on(SimpleNamespace(commit_step=commit_step, forget=forget), jobs)
    working = asyncio.create_task(committer.run())
    try:
        good, bad = step("good"), step("bad")
        await committer.put(good, bad)
        await committer.join()
    finally:
        working.cancel()
    assert (shown([good]), shown([bad])) == (1, 0)
    assert forgotten == [("bad", 1)]
    assert let_go == ["bad"]
