"""Who may write: epochs, indexes, replays, final states, leases, hand-back, reap, dead letters."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from batond.bench.faults.counts import full_or
from batond.daemon.errors import BatondError, InvalidRequestError, NotFoundError
from batond.daemon.queue import HandBackOutcome, JobState, JobStore

if TYPE_CHECKING:
    from conftest import Queue


async def test_late_writes_of_an_earlier_claim_are_refused(queue: Queue) -> None:
    """D2: a daemon paused past its lease can't write over the one that took its job."""
    await queue.submit("a")
    old = await queue.claim_one()
    await queue.commit(queue.step(old, 0, 1, text="x"))
    await queue.lapse("t", "a")
    assert (await queue.store.reap()).requeued == [("t", "a")]
    assert await queue.commit(queue.step(old, 1, 9)) == ["fenced"]  # Waiting again: nobody may write.

    other = queue.another()
    new = await queue.claim_one(owner="d2", store=other)
    assert (new.record.epoch, new.record.attempts, new.record.lapses) == (2, 0, 1)
    assert (new.token_ids, new.text) == ([1], "x")
    for step in (
        queue.step(old, 1, 9),
        queue.step(old, 1, state=JobState.PARKED),
        queue.step(old, 1, state=JobState.FAILED),
        queue.step(old, 1, 9, epoch=2),
    ):
        assert await queue.commit(step) == ["fenced"]
    assert (await queue.store.renew("d1", [("t", "a", 1)], lease_ms=9)).lost == [("t", "a")]
    assert await queue.store.hand_back("d1", "t", "a", 1) is HandBackOutcome.REFUSED
    assert await queue.commit(queue.step(new, 1, 2, state=JobState.SUCCEEDED), owner="d2") == []
    assert await queue.tokens("a") == [1, 2]
    assert await queue.commit(queue.step(old, 1, 9)) == ["final"]
    assert await queue.commit(queue.step(old, 1, state=JobState.SUCCEEDED)) == ["final"]


async def test_nobody_is_no_owner(queue: Queue) -> None:
    await queue.submit("a")
    with pytest.raises(InvalidRequestError):
        await queue.claim(owner="")


async def test_the_same_owner_is_fenced_by_its_own_later_claim(queue: Queue) -> None:
    await queue.submit("a")
    old = await queue.claim_one()
    await queue.store.hand_back("d1", "t", "a", 1)
    new = await queue.claim_one()
    assert await queue.commit(queue.step(old, 0, 9), queue.step(new, 0, 1)) == ["fenced"]
    assert await queue.tokens("a") == [1]


async def test_a_replayed_commit_changes_nothing(queue: Queue) -> None:
    """D4: a step whose reply was lost is sent again, also one that ended the job."""
    await queue.submit("a")
    job = await queue.claim_one()
    first = queue.step(job, 0, 1, 2, text="x")
    last = queue.step(job, 2, 3, text="y", state=JobState.SUCCEEDED, finish_reason="stop")
    flush = queue.step(job, 2, text="!")
    assert await queue.commit(first, first) == []
    assert await queue.commit(flush, flush) == []
    assert await queue.commit(first) == []
    assert await queue.commit(last) == []
    record = await queue.store.get("t", "a")
    assert await queue.commit(last) == []
    assert await queue.store.get("t", "a") == record
    chunks = await queue.store.read_chunks("t", "a")
    assert [(c.token_ids, c.text) for c in chunks] == [([1, 2], "x"), ([], "!"), ([3], "y")]
    assert (await queue.store.counts()).totals["succeeded"] == 1


async def test_a_gap_or_overlap_is_refused_and_its_mates_are_not(queue: Queue) -> None:
    await queue.submit("a")
    await queue.submit("b")
    a, b = await queue.claim()
    await queue.commit(queue.step(a, 0, 1, 2))
    result = await queue.store.commit_step(
        "d1",
        [
            queue.step(a, 3, 9, state=JobState.SUCCEEDED),
            queue.step(b, 0, 5),
            queue.step(a, 1, 8, 8),
            queue.step(a, 2, 3),
        ],
    )
    assert [(r.job_id, r.why.value, r.output_tokens) for r in result.refused] == [
        ("a", "gap", 2),
        ("a", "overlap", 2),
    ]
    assert await queue.tokens("a") == [1, 2, 3]
    assert await queue.tokens("b") == [5]
    assert (await queue.store.get("t", "a")).state is JobState.RUNNING


async def test_no_commit_makes_a_job_queued_or_dead(queue: Queue) -> None:
    await queue.submit("a")
    job = await queue.claim_one()
    for state in (JobState.QUEUED, JobState.CLAIMED, JobState.DEAD):
        with pytest.raises(BatondError, match="can't make"):
            await queue.commit(queue.step(job, 0, 1, state=state))
    assert await queue.commit(queue.step(job, 0, 1), owner="d2") == ["fenced"]
    missing = queue.step(job, 0, 1)
    await queue.client.delete(queue.store.keys.job("t/a"))
    assert await queue.commit(missing) == ["missing"]


async def test_a_final_state_is_final(queue: Queue) -> None:
    """D7: reaper, cancel and a late failure race with the end; the first end stays (10,000 in a soak)."""
    rng = random.Random(7)
    other = queue.another()
    for i in range(full_or(300, 10_000)):
        job_id = f"j{i}"
        await queue.submit(job_id)
        job = await queue.claim_one()
        await queue.lapse("t", job_id)
        ending = queue.step(job, 0, 1, state=JobState.SUCCEEDED, finish_reason="stop")
        racers = [
            queue.store.commit_step("d1", [ending]),
            other.reap(),
            other.cancel("t", job_id),
            other.commit_step("d1", [queue.step(job, 0, state=JobState.FAILED, error_reason="INTERNAL")]),
        ]
        rng.shuffle(racers)
        await asyncio.gather(*racers)
        record = await queue.store.get("t", job_id)
        if not record.state.final:
            assert record.state is JobState.QUEUED
            record = await other.cancel("t", job_id)
        for attempt in (other.reap(), other.cancel("t", job_id), queue.store.commit_step("d1", [ending])):
            await attempt
        assert await queue.store.get("t", job_id) == record
    assert (await queue.store.counts()).held == 0


async def test_a_live_lease_is_not_reaped_and_a_short_one_is(queue: Queue) -> None:
    """D2: with a real, short lease; the clock is Redis's."""
    await queue.submit("long")
    await queue.submit("short")
    await queue.claim_one(lease_ms=60_000)
    await queue.claim_one(lease_ms=1)
    store = queue.another()
    requeued: list[tuple[str, str]] = []
    async with asyncio.timeout(30):
        while not requeued:
            requeued = (await store.reap()).requeued
    assert requeued == [("t", "short")]
    assert (await store.get("t", "long")).state is JobState.CLAIMED


async def test_times_come_from_the_redis_clock(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """D11: a daemon whose clock is five minutes ahead steals no lease and expires nothing."""
    await queue.submit("a")
    await queue.claim_one()
    monkeypatch.setattr("time.time", lambda: 4e9)
    reaped = await queue.another().reap()
    assert (reaped.requeued, reaped.swept) == ([], 0)


async def test_a_renewed_lease_lives_on(queue: Queue) -> None:
    await queue.submit("a")
    await queue.claim_one()
    await queue.lapse("t", "a")
    renewal = await queue.store.renew("d1", [("t", "a", 1), ("t", "gone", 1)], lease_ms=60_000)
    assert renewal.lost == [("t", "gone")]
    assert (await queue.store.reap()).requeued == []


async def test_hand_back_keeps_tokens_and_place(queue: Queue) -> None:
    """V2: handed back with its tokens, claimed before those that came later, attempts not charged."""
    for job_id in ("a", "b", "c"):
        await queue.submit(job_id)
    a, b = (await queue.claim(2))[:2]
    await queue.commit(queue.step(a, 0, 1, 2, text="xy", preemptions=2, state=JobState.PARKED))
    assert await queue.store.hand_back("d1", "t", "b", b.record.epoch) is HandBackOutcome.QUEUED
    assert await queue.store.hand_back("d1", "t", "a", a.record.epoch) is HandBackOutcome.QUEUED
    record = await queue.store.get("t", "a")
    assert (record.state, record.owner, record.attempts) == (JobState.QUEUED, "", 0)
    assert (record.epoch, record.handed_back) == (1, 1)
    again = await queue.claim(10, owner="d2", store=queue.another())
    assert [job.record.job_id for job in again] == ["a", "b", "c"]
    assert (again[0].token_ids, again[0].text, again[0].record.preemptions) == ([1, 2], "xy", 2)
    assert again[0].record.waited_ms >= a.record.waited_ms


async def test_release_gives_back_all_that_a_daemon_holds(queue: Queue) -> None:
    for job_id in ("a", "b", "c"):
        await queue.submit(job_id)
    await queue.claim(2)
    await queue.store.cancel("t", "b")
    other = queue.another()
    await queue.claim(1, owner="d2", store=other)
    assert sorted(await queue.store.release_owner("d1")) == [("t", "a"), ("t", "b")]
    states = {job.job_id: job.state.value for job in (await queue.store.list_jobs("t")).jobs}
    assert states == {"a": "queued", "b": "cancelled", "c": "claimed"}
    assert await queue.store.release_owner("d1") == []


async def test_a_cancelled_job_of_a_dead_daemon_ends_cancelled(queue: Queue) -> None:
    """C1: nobody is left to hear the cancel; the reaper ends the job, its tokens stay."""
    await queue.submit("a")
    job = await queue.claim_one()
    await queue.commit(queue.step(job, 0, 1))
    await queue.store.cancel("t", "a")
    await queue.lapse("t", "a")
    reaped = await queue.store.reap()
    assert (reaped.requeued, reaped.cancelled) == ([], [("t", "a")])
    record = await queue.store.get("t", "a")
    assert (record.state, record.finish_reason) == (JobState.CANCELLED, "cancelled")
    assert await queue.tokens("a") == [1]


async def test_a_job_that_kills_its_daemons_becomes_a_dead_letter(queue: Queue) -> None:
    """D8: three charged attempts, then evidence; its mate is not charged; operators retry or drop."""
    await queue.submit("mate")
    await queue.submit("poison")
    for attempt in range(3):
        jobs = {job.record.job_id: job for job in await queue.claim()}
        if attempt == 0:
            await queue.commit(queue.step(jobs["poison"], 0, 4, text="p"))
        await queue.store.hand_back("d1", "t", "mate", jobs["mate"].record.epoch)
        outcome = await queue.store.hand_back(
            "d1", "t", "poison", jobs["poison"].record.epoch, charge=True, why=f"engine died: {attempt}"
        )
        assert outcome is (HandBackOutcome.DEAD if attempt == 2 else HandBackOutcome.QUEUED)
    assert (await queue.store.get("t", "mate")).attempts == 0
    record = await queue.store.get("t", "poison")
    assert (record.state, record.attempts, record.error_reason) == (JobState.DEAD, 3, "ATTEMPTS")
    (letter,) = await queue.store.dead_letters()
    assert (letter.name, letter.reason, letter.is_job) == ("t/poison", "ATTEMPTS", True)
    assert [line.rpartition(": ")[2] for line in letter.history.splitlines()] == ["0", "1", "2"]
    assert [job.record.job_id for job in await queue.claim()] == ["mate"]

    await queue.store.dead_retry("t/poison")
    assert await queue.store.dead_letters() == []
    retried = await queue.claim_one()
    assert (retried.record.attempts, retried.record.epoch, retried.token_ids) == (0, 4, [4])
    with pytest.raises(NotFoundError):
        await queue.store.dead_retry("t/poison")
    for _ in range(3):
        await queue.lapse("t", "poison", alone=True)
        reaped = await queue.store.reap()
        await queue.claim()
    assert reaped.dead == [("t", "poison")]
    await queue.store.dead_drop("t/poison")
    with pytest.raises(NotFoundError):
        await queue.store.get("t", "poison")
    with pytest.raises(NotFoundError):
        await queue.store.dead_drop("t/poison")


async def test_a_power_cut_buries_nobody(queue: Queue) -> None:
    """D8: leases that ran out among others say nothing about a job: noted, never charged, however often."""
    names = [f"j{i}" for i in range(5)]
    for name in names:
        await queue.submit(name)
    for cut in range(7):
        jobs = await queue.claim(owner=f"d{cut}")
        assert [(job.record.attempts, job.record.lapses) for job in jobs] == [(0, cut)] * 5
        for name in names:
            await queue.lapse("t", name)
        assert len((await queue.store.reap()).requeued) == 5
    history = (await queue.client.hget(queue.store.keys.job("t/j0"), "history")).decode()
    assert "epoch 1 owner d0: the lease ran out; not charged" in history


async def test_a_lease_that_runs_out_alone_is_charged(queue: Queue) -> None:
    """D8: a job that takes its daemon along. The note holds for its claim, and can be taken back."""
    await queue.submit("a")
    job = (await queue.claim_one()).record
    assert await queue.store.mark_alone("d1", "t", "a", job.epoch, alone=True)
    assert not await queue.store.mark_alone("d2", "t", "a", job.epoch, alone=True)
    assert await queue.store.mark_alone("d1", "t", "a", job.epoch, alone=False)
    await queue.lapse("t", "a")
    await queue.store.reap()
    second = (await queue.claim_one()).record
    assert (second.attempts, second.lapses) == (0, 1)
    assert not await queue.store.mark_alone("d1", "t", "a", job.epoch, alone=True)
    await queue.lapse("t", "a", alone=True)
    await queue.store.reap()
    third = (await queue.claim_one()).record
    assert (third.attempts, third.lapses) == (1, 1)
    await queue.lapse("t", "a")  # The earlier claim's note does not count any more.
    await queue.store.reap()
    assert ((await queue.claim_one()).record.attempts) == 1


async def test_a_tenant_is_not_told_what_an_engine_said(queue: Queue) -> None:
    """D8: the evidence may name anything; it is for operators."""
    await queue.submit("a")
    store = queue.another(max_attempts=1)
    job = await queue.claim_one()
    await store.hand_back("d1", "t", "a", job.record.epoch, charge=True, why="RuntimeError: /secret/path")
    record = await queue.store.get("t", "a")
    assert record.error_message == "given up after 1 attempts: each time its engine died while it ran alone"
    (letter,) = await queue.store.dead_letters()
    assert "/secret/path" in letter.message
    assert "/secret/path" in letter.history


async def test_each_job_is_claimed_once_by_many_daemons(queue: Queue) -> None:
    """D1, small: 4 claimers, 500 jobs, submits and claims at once; each runs once."""
    total = 500
    ran: list[str] = []
    stores = [queue.another() for _ in range(4)]

    async def work(store: JobStore, owner: str) -> None:
        while len(ran) < total:
            jobs = await queue.claim(3, owner=owner, store=store)
            ran.extend(job.record.job_id for job in jobs)
            steps = [queue.step(job, 0, 1, state=JobState.SUCCEEDED) for job in jobs]
            assert (await store.commit_step(owner, steps)).refused == []
            await store.reap()

    async def fill() -> None:
        for i in range(total):
            await queue.submit(f"j{i}", sla_class=("batch", "interactive")[i % 2])

    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        group.create_task(fill())
        for i, store in enumerate(stores):
            group.create_task(work(store, f"d{i}"))
    assert sorted(ran) == sorted(f"j{i}" for i in range(total))
    assert (await queue.store.counts()).totals["succeeded"] == total


async def test_a_claim_whose_reply_was_lost_is_given_again(queue: Queue) -> None:
    """D5: cut between claim and acknowledgement; the daemon gets the job at its next claim, uncharged."""
    await queue.submit("a")
    await queue.submit("b")
    known = await queue.claim_one()
    # A store that knows of no claim.
    lost = (await queue.another().claim("d1", {}, lease_ms=60_000))[0]
    assert lost.record.job_id == known.record.job_id
    queue.store.forget("d1", "t", "a", epoch=known.record.epoch)
    jobs = [job.record for job in await queue.claim()]
    assert [(record.job_id, record.epoch, record.attempts) for record in jobs] == [
        ("a", 1, 0),
        ("b", 1, 0),
    ]
    assert await queue.claim() == []
