"""Jobs that are late: deadlines of their own, longest queue times of their classes, by the clock of Redis."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING

import pytest

from batond.daemon.errors import DeadlineError
from batond.daemon.queue import JobState

if TYPE_CHECKING:
    from conftest import Queue

    from batond.daemon.queue import JobRecord


async def now_ms(queue: Queue) -> int:
    """Clock of Redis."""
    seconds, micros = await queue.client.time()
    return int(seconds * 1000 + micros // 1000)


async def let_pass(queue: Queue, job_id: str, field: str = "deadline_ms") -> None:
    """Lets the time of a job be over, without waiting for it."""
    await queue.client.hset(queue.store.keys.job(f"t/{job_id}"), field, 1)
    await queue.client.zadd(queue.store.keys.due, {f"t/{job_id}": 1}, xx=True)


def is_late(record: JobRecord) -> bool:
    return (record.state, record.error_reason) == (JobState.FAILED, "DEADLINE_EXCEEDED")


@pytest.mark.parametrize("given", [{"deadline_in_ms": 0}, {"deadline_in_ms": -5}, {"deadline_ms": 1}])
async def test_a_hopeless_job_is_refused_at_once(queue: Queue, given: dict[str, int]) -> None:
    with pytest.raises(DeadlineError) as caught:
        await queue.submit("a", **given)
    assert caught.value.details["queue_ms"] == "0"
    assert int(caught.value.details["late_ms"]) >= 0
    assert await queue.client.exists(queue.store.keys.job("t/a")) == 0
    assert await queue.submit("a")  # The id is free.
    assert not await queue.submit("a", **given)  # Attaching to a job that is there needs no time.


async def test_deadlines_are_kept_by_the_redis_clock(queue: Queue) -> None:
    before_ms = await now_ms(queue)
    await queue.submit("a", deadline_in_ms=60_000, deadline_ms=before_ms + 50_000, longest_queue_ms=40_000)
    await queue.submit("b", deadline_in_ms=30_000, deadline_ms=before_ms + 50_000)
    a, b = await queue.store.get("t", "a"), await queue.store.get("t", "b")
    assert (a.deadline_ms, a.start_by_ms) == (before_ms + 50_000, a.created_ms + 40_000)
    assert (b.deadline_ms, b.start_by_ms) == (b.created_ms + 30_000, 0)
    jobs = {job.record.job_id: job for job in await queue.claim()}
    assert 49_000 < (jobs["a"].deadline_in_ms or 0) <= 50_000
    assert 39_000 < (jobs["a"].start_in_ms or 0) <= 40_000
    assert jobs["b"].start_in_ms is None


async def test_clocks_of_daemons_play_no_part(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """D11: a daemon whose clock is five minutes ahead ends nothing early."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 300)
    await queue.submit("a", deadline_in_ms=60_000, longest_queue_ms=60_000)
    other = queue.another()
    assert (await other.reap()).late == []
    job = await queue.claim_one(store=other)
    assert 59_000 < (job.deadline_in_ms or 0) <= 60_000


@pytest.mark.parametrize("field", ["deadline_ms", "start_by_ms"])
async def test_the_reaper_fails_late_jobs_with_their_queue_time(queue: Queue, field: str) -> None:
    await queue.submit("late", deadline_in_ms=60_000, longest_queue_ms=60_000)
    await queue.submit("other", deadline_in_ms=60_000)
    queued_ms = (await queue.store.get("t", "late")).queued_ms
    await queue.client.hset(queue.store.keys.job("t/late"), "queued_ms", queued_ms - 7000)
    await let_pass(queue, "late", field)
    async with queue.news("late") as news:
        assert (await queue.store.reap()).late == [("t", "late")]
        await news()
    record = await queue.store.get("t", "late")
    assert is_late(record)
    assert 7000 <= record.waited_ms < 60_000
    assert f"waited {record.waited_ms} ms" in record.error_message
    assert ("deadline" if field == "deadline_ms" else "longest queue time") in record.error_message
    assert record.expires_ms > 0
    assert (await queue.store.reap()).late == []
    assert [job.record.job_id for job in await queue.claim()] == ["other"]
    assert (await queue.store.counts()).totals["late"] == 1


async def test_a_claim_does_not_give_late_jobs(queue: Queue) -> None:
    for job_id in ("a", "b", "c"):
        await queue.submit(job_id, deadline_in_ms=60_000)
    await let_pass(queue, "a")
    await let_pass(queue, "b")
    assert [job.record.job_id for job in await queue.claim(1)] == ["c"]
    assert is_late(await queue.store.get("t", "a"))
    assert not await queue.client.exists(queue.store.keys.due)


async def test_a_real_short_time_runs_out(queue: Queue) -> None:
    await queue.submit("a", longest_queue_ms=1)
    late: list[tuple[str, str]] = []
    async with asyncio.timeout(30):
        while not late:
            late = (await queue.store.reap()).late
    assert is_late(await queue.store.get("t", "a"))


async def test_who_had_a_row_may_wait_again_but_keeps_its_deadline(queue: Queue) -> None:
    """The longest queue time is that to the first row; a hand-back or a death does not bring it back."""
    await queue.submit("a", deadline_in_ms=60_000, longest_queue_ms=50_000)
    job = await queue.claim_one()
    assert not await queue.client.exists(queue.store.keys.due)
    await queue.commit(queue.step(job, 0, 5, text="x", state=JobState.RUNNING))
    await queue.store.hand_back("d1", "t", "a", 1)
    await queue.client.hset(queue.store.keys.job("t/a"), "start_by_ms", 1)
    assert (await queue.store.reap()).late == []
    again = await queue.claim_one()
    assert again.start_in_ms is None
    assert 0 < (again.deadline_in_ms or 0) <= 60_000
    await queue.client.hset(queue.store.keys.job("t/a"), "deadline_ms", 1)
    await queue.lapse("t", "a")
    reaped = await queue.store.reap()
    assert reaped.requeued == reaped.late == [("t", "a")]
    assert is_late(await queue.store.get("t", "a"))
    assert await queue.tokens("a") == [5]  # What there is, is kept.


async def test_a_reap_is_bounded_and_the_rest_comes_next(queue: Queue) -> None:
    for i in range(230):
        await queue.submit(f"j{i}", deadline_in_ms=600_000)
    names = await queue.client.zrange(queue.store.keys.due, 0, -1)
    await queue.client.zadd(queue.store.keys.due, dict.fromkeys(names, 1))
    for name in names:
        await queue.client.hset(queue.store.keys.job(name.decode()), "deadline_ms", 1)
    assert [len((await queue.store.reap()).late) for _ in range(3)] == [200, 30, 0]
    assert sum((await queue.store.counts()).queued.values()) == 0


async def test_rubbish_among_the_due_ones_goes(queue: Queue) -> None:
    """D13: an ended job, a job with time, and something that is no job, put there by hand."""
    await queue.submit("time", deadline_in_ms=60_000)
    await queue.submit("end")
    await queue.store.cancel("t", "end")
    await queue.client.zadd(queue.store.keys.due, {"t/time": 1, "t/end": 1, b"\xff": 1})
    assert (await queue.store.reap()).late == []
    assert (await queue.store.get("t", "end")).state is JobState.CANCELLED
    assert (await queue.claim_one()).record.job_id == "time"


async def test_lateness_races_with_claims_and_cancels(queue: Queue) -> None:
    """D7: one end each, whoever comes first; nothing is left behind."""
    rng = random.Random(11)
    other = queue.another()
    ends = set()
    for i in range(150):
        job_id = f"j{i}"
        await queue.submit(job_id, deadline_in_ms=60_000)
        await let_pass(queue, job_id)
        racers = [queue.store.reap(), other.reap(), queue.claim(1, store=other), other.cancel("t", job_id)]
        rng.shuffle(racers)
        await asyncio.gather(*racers)
        record = await queue.store.get("t", job_id)
        assert record.state in {JobState.FAILED, JobState.CANCELLED}
        ends.add(record.state)
    assert ends == {JobState.FAILED, JobState.CANCELLED}
    counts = await queue.store.counts()
    assert (counts.held, sum(counts.queued.values())) == (0, 0)
    assert counts.totals["failed"] == counts.totals["late"]
