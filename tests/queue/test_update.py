"""A job moves to a less urgent class, or gets another deadline, whether it waits or runs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from batond.daemon.errors import DeadlineError, NotFoundError, StateError
from batond.daemon.queue import JobState, NoticeKind

if TYPE_CHECKING:
    from batond.daemon.queue import JobRecord


async def update(queue: Any, job_id: str, *, tenant: str = "t", **kw: Any) -> JobRecord:
    fields = {"present_class": "standard", "sla_class": "batch"} | kw
    record: JobRecord = await queue.store.update(tenant, job_id, **fields)
    return record


async def now_ms(queue: Any) -> int:
    seconds, microseconds = await queue.client.time()
    return int(seconds) * 1000 + int(microseconds) // 1000


async def test_a_lowered_job_comes_after_those_of_its_old_class(queue: Any) -> None:
    await queue.submit("first")
    await queue.submit("second")
    record = await update(queue, "first")
    assert (record.sla_class, record.state) == ("batch", JobState.QUEUED)
    claimed = await queue.claim()
    assert [(job.record.job_id, job.record.sla_class) for job in claimed] == [
        ("second", "standard"),
        ("first", "batch"),
    ]
    assert (await queue.store.counts()).queued["batch"] == 0


async def test_an_earlier_deadline_overtakes_in_the_line(queue: Any) -> None:
    await queue.submit("first")
    await queue.submit("second")
    deadline_ms = await now_ms(queue) + 60_000
    record = await update(queue, "second", sla_class="standard", deadline_ms=deadline_ms)
    assert record.deadline_ms == deadline_ms
    assert [job.record.job_id for job in await queue.claim()] == ["second", "first"]


async def test_a_deadline_stays_when_the_class_changes(queue: Any) -> None:
    deadline_ms = await now_ms(queue) + 60_000
    await queue.submit("j", deadline_ms=deadline_ms)
    assert (await update(queue, "j")).deadline_ms == deadline_ms


async def test_the_longest_queue_time_is_the_new_classs(queue: Any) -> None:
    await queue.submit("j", longest_queue_ms=5000)
    record = await update(queue, "j", longest_queue_ms=9000)
    assert record.start_by_ms == record.created_ms + 9000
    record = await update(queue, "j", present_class="batch", sla_class="batch")
    assert record.start_by_ms == record.created_ms + 9000
    record = await update(queue, "j", present_class="batch", sla_class="standard")
    assert record.start_by_ms == 0


async def test_a_deadline_that_has_passed_changes_nothing(queue: Any) -> None:
    await queue.submit("j")
    with pytest.raises(DeadlineError):
        await update(queue, "j", deadline_ms=1)
    assert (await queue.claim_one()).record.sla_class == "standard"


async def test_what_has_ended_stays(queue: Any) -> None:
    await queue.submit("j")
    await queue.store.cancel("t", "j")
    with pytest.raises(StateError, match="has not ended"):
        await update(queue, "j")


async def test_the_daemon_that_runs_a_job_is_told_and_told_again(queue: Any) -> None:
    """A lost notice costs no more than a renewal; the next claim knows anyway."""
    await queue.submit("j", tenant="a b")
    job = await queue.claim_one()
    held = [("a b", "j", job.record.epoch)]
    notices = queue.another().notices("d1")
    try:
        assert (await asyncio.wait_for(anext(notices), 10)).kind is NoticeKind.SYNC
        record = await update(queue, "j", tenant="a b", deadline_ms=(await now_ms(queue)) + 60_000)
        assert (record.state, record.sla_class, record.epoch) == (JobState.CLAIMED, "batch", job.record.epoch)
        notice = await asyncio.wait_for(anext(notices), 10)
    finally:
        await notices.aclose()
    assert (notice.kind, notice.tenant, notice.job_id) == (NoticeKind.UPDATE, "a b", "j")
    for _ in range(2):
        renewal = await queue.store.renew("d1", held, lease_ms=60_000)
        assert (renewal.updated, renewal.cancel, renewal.lost) == ([("a b", "j")], [], [])
    step = queue.step(job, 0, 1, 2, state=JobState.RUNNING)
    assert await queue.commit(step) == [], "its claim is as good as before"
    await queue.store.hand_back("d1", "a b", "j", job.record.epoch)
    again = await queue.claim_one()
    assert (again.record.sla_class, again.record.deadline_ms) == ("batch", record.deadline_ms)
    renewal = await queue.store.renew("d1", [("a b", "j", again.record.epoch)], lease_ms=60_000)
    assert renewal.updated == []


async def test_what_a_running_job_puts_out_is_charged_to_its_new_class(queue: Any) -> None:
    await queue.submit("j")
    job = await queue.claim_one()
    await update(queue, "j")
    await queue.commit(queue.step(job, 0, 1, 2, state=JobState.RUNNING))
    assert await queue.client.zscore(queue.store.keys.accounts("batch"), "t") == 2


async def test_the_longest_queue_time_of_a_running_job_is_the_new_classs(queue: Any) -> None:
    await queue.submit("j", longest_queue_ms=5000)
    await queue.claim_one()
    record = await update(queue, "j", longest_queue_ms=9000)
    assert record.start_by_ms == record.created_ms + 9000
    assert await queue.client.zscore(queue.store.keys.due, "t/j") is None, "its daemon looks at it"


async def test_two_writers_see_each_other(queue: Any) -> None:
    await queue.submit("j")
    await update(queue, "j")
    with pytest.raises(StateError, match="somebody else"):
        await update(queue, "j", sla_class="standard")


async def test_ids_are_scoped(queue: Any) -> None:
    """Q2."""
    await queue.submit("j")
    for tenant, job_id in (("other", "j"), ("t", "other")):
        with pytest.raises(NotFoundError):
            await update(queue, job_id, tenant=tenant)
