"""A job that runs gets another class or deadline: its engine and its timer hear of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from batond.daemon.wire.messages import Cancel, Started, Submit, Update

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.front.held import HeldJob
    from batond.daemon.queue import ClaimedJob, JobRecord

    Hold = Callable[..., HeldJob]
    MakeScene = Callable[..., Any]


def claimed(held: HeldJob, **fields: Any) -> ClaimedJob:
    record = msgspec.structs.replace(held.claimed.record, **fields)
    return msgspec.structs.replace(held.claimed, record=record, now_ms=1000)


def newer(job: ClaimedJob, **fields: Any) -> JobRecord:
    record: JobRecord = msgspec.structs.replace(job.record, **fields)
    return record


def updates(told: list[Any]) -> list[Update]:
    return [command for command in told if isinstance(command, Update)]


async def test_every_open_choice_is_ranked_anew(hold: Hold, scene: MakeScene) -> None:
    held = hold(n=2)
    job = claimed(held)
    async with scene(job) as at:
        await at.engine.heard(Submit)
        at.queue.record = newer(job, sla_class="batch", deadline_ms=61_000)
        at.dispatcher.update("t", "j")
        await at.engine.heard(Update)
        (kept,) = at.dispatcher._jobs
        told = updates(at.engine.told)
        assert [one.query_id for one in told] == [held.query_id(0), held.query_id(1)]
        assert {one.sla_class for one in told} == {"batch"}
        assert all(59 < one.deadline_s <= 60 for one in told)
        assert kept.claimed.record.sla_class == "batch"
        assert kept.timer is not None
        at.dispatcher.engine_up(at.engine.ready)
        last = [command for command in at.engine.told if isinstance(command, Submit)][-1]
        assert last.sla_class == "batch", "a new engine hears the present class"


async def test_told_again_nothing_happens_again(hold: Hold, scene: MakeScene) -> None:
    job = claimed(hold())
    async with scene(job) as at:
        await at.engine.heard(Submit)
        at.queue.record = newer(job, sla_class="batch")
        for _ in range(3):
            at.dispatcher.update("t", "j")
        await at.engine.heard(Update)
        at.queue.record = newer(job, sla_class="interactive")
        at.dispatcher.update("t", "j")
        await at.engine.heard(Update, 2)
        assert [one.sla_class for one in updates(at.engine.told)] == ["batch", "interactive"]


async def test_an_earlier_deadline_ends_the_job_by_then(hold: Hold, scene: MakeScene) -> None:
    held = hold()
    job = claimed(held, deadline_ms=10**9)
    async with scene(job) as at:
        await at.engine.heard(Submit)
        await at.say(Started(query_id=held.query_id(), row=0))
        at.queue.record = newer(job, deadline_ms=1001)
        at.dispatcher.update("t", "j")
        await at.engine.heard(Cancel)
        (kept,) = at.dispatcher._jobs
        assert "its deadline is over" in kept.late


async def test_what_is_not_this_claims_is_left_alone(hold: Hold, scene: MakeScene) -> None:
    job = claimed(hold())
    async with scene(job) as at:
        await at.engine.heard(Submit)
        at.dispatcher.update("t", "elsewhere")  # Not held: the queue is not even asked.
        for record in (
            newer(job, sla_class="batch", epoch=job.record.epoch + 1),
            newer(job, sla_class="unknown here"),
        ):
            at.queue.record = record
            at.queue.read.clear()
            at.dispatcher.update("t", "j")
            await asyncio.wait_for(at.queue.read.wait(), 10)
        at.queue.record = newer(job, sla_class="batch")
        at.dispatcher.update("t", "j")
        await at.engine.heard(Update)
        assert len(updates(at.engine.told)) == 1
