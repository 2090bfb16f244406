"""From submit to the end: states, output, races of ids, lists."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec
import pytest

from batond.daemon.errors import ConflictError, ExhaustedError, InvalidRequestError, NotFoundError, StateError
from batond.daemon.front import convert
from batond.daemon.queue import JobState, NoticeKind, reader

if TYPE_CHECKING:
    from conftest import Queue


async def test_a_job_lives_from_submit_to_success(queue: Queue) -> None:
    assert await queue.submit("a", prompt_tokens=3)
    record = await queue.store.get("t", "a")
    assert (record.state, record.epoch, record.prompt_tokens) == (JobState.QUEUED, 0, 3)
    assert record.created_ms == record.queued_ms > 0

    job = await queue.claim_one()
    assert (job.record.state, job.record.epoch, job.record.owner) == (JobState.CLAIMED, 1, "d1")
    assert job.spec == queue.spec()
    assert (job.token_ids, job.text) == ([], "")

    assert await queue.commit(queue.step(job, 0, 5, 6, text="ab", state=JobState.RUNNING)) == []
    assert await queue.commit(queue.step(job, 2, preemptions=1, state=JobState.PARKED)) == []
    record = await queue.store.get("t", "a")
    assert (record.state, record.preemptions, record.output_tokens) == (JobState.PARKED, 1, 2)
    last = queue.step(job, 2, 7, text="c", state=JobState.SUCCEEDED, finish_reason="length", prompt_tokens=4)
    assert await queue.commit(last) == []

    record = await queue.store.get("t", "a")
    assert (record.state, record.finish_reason) == (JobState.SUCCEEDED, "length")
    assert (record.output_tokens, record.prompt_tokens, record.owner) == (3, 4, "")
    assert record.created_ms <= record.claimed_ms <= record.started_ms <= record.finished_ms
    assert record.first_token_ms == record.started_ms
    assert record.expires_ms == record.finished_ms + record.ttl_ms
    chunks = await queue.store.read_chunks("t", "a")
    assert [(c.first_index, c.token_ids, c.text) for c in chunks] == [(0, [5, 6], "ab"), (2, [7], "c")]
    counts = await queue.store.counts()
    assert (counts.held, sum(counts.queued.values())) == (0, 0)
    assert counts.totals == {"submitted": 1, "claimed": 1, "succeeded": 1}


async def test_most_urgent_class_first_and_first_come_first_served(queue: Queue) -> None:
    order = [("b1", "batch"), ("s1", "standard"), ("b2", "batch"), ("i1", "interactive"), ("s2", "standard")]
    for job_id, sla_class in order:
        await queue.submit(job_id, sla_class=sla_class)
    assert [(await queue.store.place("t", job_id)).ahead for job_id, _ in order] == [3, 1, 4, 0, 2]
    jobs = await queue.store.claim("d1", {"batch": 1, "standard": 5, "interactive": 5}, lease_ms=60_000)
    assert [job.record.job_id for job in jobs] == ["i1", "s1", "s2", "b1"]
    assert await queue.store.place("t", "i1") is None
    assert (await queue.store.counts()).queued == {"batch": 1, "standard": 0, "interactive": 0}


async def test_one_round_trip_commits_all_jobs_of_a_step(queue: Queue) -> None:
    for i in range(20):
        await queue.submit(f"j{i}")
    jobs = await queue.claim(20)
    await queue.commit(*(queue.step(job, 0, state=JobState.RUNNING) for job in jobs))  # Loads the script.
    before = (await queue.client.info("commandstats"))["cmdstat_evalsha"]["calls"]
    assert await queue.commit(*(queue.step(job, 0, i) for i, job in enumerate(jobs))) == []
    after = await queue.client.info("commandstats")
    assert after["cmdstat_evalsha"]["calls"] == before + 1
    assert [await queue.tokens(job.record.job_id) for job in jobs] == [[i] for i in range(20)]


async def test_same_id_at_once_attaches_or_conflicts(queue: Queue) -> None:
    """Q2: one creation; the same body attaches, another conflicts, tenants don't collide."""
    stores = [queue.another() for _ in range(4)]
    raw = msgspec.json.encode(queue.spec())

    async def submit(i: int) -> tuple[str, str]:
        tenant, body = f"t{i % 2}", f"h{i // 2 % 2}"
        try:
            record, created = await stores[i % 4].submit(
                tenant, "same", spec_json=raw, body_hash=body, sla_class="standard"
            )
        except ConflictError:
            return tenant, "conflict"
        assert (record.tenant, record.body_hash) == (tenant, body)
        return tenant, "created" if created else "attached"

    results = await asyncio.gather(*(submit(i) for i in range(80)))
    for tenant in ("t0", "t1"):
        outcomes = [outcome for whose, outcome in results if whose == tenant]
        assert [outcomes.count(kind) for kind in ("created", "attached", "conflict")] == [1, 19, 20]
    assert len(await queue.claim()) == 2


async def test_a_submit_attaches_to_an_ended_job(queue: Queue) -> None:
    """Q2: a retry after the end gets the result, not a second run."""
    await queue.submit("a")
    job = await queue.claim_one()
    await queue.commit(queue.step(job, 0, 1, state=JobState.SUCCEEDED, finish_reason="stop"))
    assert not await queue.submit("a")
    assert await queue.claim() == []


async def test_ids_cannot_forge_keys_of_others(queue: Queue) -> None:
    """Q2: separators and braces in ids are only text."""
    pairs = [("a/b", "c"), ("a", "b/c"), ("a:b", "{c}"), ("ä", "\N{HORSE}"), ("a%2Fb", "c")]
    for tenant, job_id in pairs:
        assert await queue.submit(job_id, tenant=tenant)
    claimed = await queue.claim()
    assert [(job.record.tenant, job.record.job_id) for job in claimed] == pairs
    for bad in ("", "x" * 257, "\ud800"):
        with pytest.raises(InvalidRequestError):
            await queue.submit(bad)


async def test_a_full_queue_refuses(queue: Queue) -> None:
    store = queue.another(max_queued=2)
    raw = msgspec.json.encode(queue.spec())

    async def submit(job_id: str, sla_class: str) -> bool:
        return (await store.submit("t", job_id, spec_json=raw, body_hash="h", sla_class=sla_class))[1]

    assert await submit("a", "batch")
    assert await submit("b", "standard")
    with pytest.raises(ExhaustedError) as caught:
        await submit("c", "interactive")
    assert caught.value.details == {"waiting": "2", "limit": "2", "retry_ms": "1000"}
    assert not await submit("a", "batch")  # Attaching needs no room.
    await queue.claim(1)
    assert await submit("c", "interactive")


async def test_cancel_of_a_waiting_job_is_immediate(queue: Queue) -> None:
    await queue.submit("a")
    record = await queue.store.cancel("t", "a")
    assert (record.state, record.finish_reason) == (JobState.CANCELLED, "cancelled")
    assert await queue.claim() == []
    assert (await queue.store.cancel("t", "a")).finished_ms == record.finished_ms


async def test_cancel_of_a_running_job_reaches_its_daemon(queue: Queue) -> None:
    """C1: by message, and again with the next commit and the next renewal."""
    await queue.submit("a")
    job = await queue.claim_one()
    notices = queue.another().notices("d1")
    assert (await anext(notices)).kind is NoticeKind.SYNC
    record = await queue.store.cancel("t", "a")
    assert (record.state, record.cancel_requested) == (JobState.CLAIMED, True)
    notice = await asyncio.wait_for(anext(notices), 10)
    assert (notice.kind, notice.tenant, notice.job_id) == (NoticeKind.CANCEL, "t", "a")
    await notices.aclose()
    assert (await queue.store.commit_step("d1", [queue.step(job, 0, 1)])).cancel == [("t", "a")]
    assert (await queue.store.renew("d1", [("t", "a", 1)], lease_ms=1000)).cancel == [("t", "a")]
    await queue.store.finish("d1", queue.step(job, 1, state=JobState.CANCELLED, finish_reason="cancelled"))
    assert (await queue.store.get("t", "a")).state is JobState.CANCELLED


async def test_a_submit_wakes_idle_daemons(queue: Queue) -> None:
    listeners = [queue.another().notices(owner) for owner in ("d1", "d2")]
    for notices in listeners:
        assert (await anext(notices)).kind is NoticeKind.SYNC
    await queue.submit("a", sla_class="batch")
    for notices in listeners:
        notice = await asyncio.wait_for(anext(notices), 10)
        assert (notice.kind, notice.sla_class) == (NoticeKind.WAKE, "batch")
        await notices.aclose()


async def test_a_watcher_elsewhere_hears_of_output_and_end(queue: Queue) -> None:
    await queue.submit("a")
    job = await queue.claim_one()
    last = queue.step(job, 1, state=JobState.FAILED, error_reason="INTERNAL")
    async with queue.news("a") as news:
        for step in (queue.step(job, 0, 1), last):
            await queue.commit(step)
            await news()
    record = await queue.store.get("t", "a")
    assert (record.state, record.error_reason) == (JobState.FAILED, "INTERNAL")


async def test_finish_outside_a_step_says_why_it_is_refused(queue: Queue) -> None:
    await queue.submit("a")
    job = await queue.claim_one()
    with pytest.raises(StateError, match="gap"):
        await queue.store.finish("d1", queue.step(job, 3, 1, state=JobState.SUCCEEDED))
    with pytest.raises(StateError, match="does not end"):
        await queue.store.finish("d1", queue.step(job, 0, state=JobState.RUNNING))
    assert (await queue.store.get("t", "a")).state is JobState.CLAIMED


async def test_reading_from_any_index(queue: Queue) -> None:
    """C4: a chunk that reaches over the index comes whole; a text-only flush is read too."""
    await queue.submit("a")
    job = await queue.claim_one()
    await queue.commit(queue.step(job, 0, 1, 2, 3, text="x"), queue.step(job, 3, 4, text="y"))
    await queue.commit(queue.step(job, 4, text="z", state=JobState.SUCCEEDED))
    starts = [[c.first_index for c in await queue.store.read_chunks("t", "a", i)] for i in range(6)]
    assert starts == [[0, 3, 4], [0, 3, 4], [0, 3, 4], [3, 4], [4], []]
    assert [c.first_index for c in await queue.store.read_chunks("t", "a", 1, limit=2)] == [0, 3]
    with pytest.raises(InvalidRequestError):
        await queue.store.read_chunks("t", "a", -1)


@pytest.mark.parametrize("page_chunks", [1, 2, 3, 5])
async def test_long_output_is_read_in_pages(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, page_chunks: int
) -> None:
    """C4: nobody else waits while a long result is read; where a page ends, nothing is lost or doubled."""
    monkeypatch.setattr(reader, "PAGE_CHUNKS", page_chunks)
    await queue.submit("a")
    job = await queue.claim_one()
    for index in range(0, 10, 2):
        await queue.commit(queue.step(job, index, index, index + 1, text=f"<{index}>"))
    await queue.commit(queue.step(job, 10, text="end", state=JobState.SUCCEEDED))
    for start in range(12):
        chunks = await queue.store.read_chunks("t", "a", start)
        firsts = [index for index in (0, 2, 4, 6, 8) if index + 2 > start]
        assert [c.first_index for c in chunks] == [*firsts, *([10] if start <= 10 else [])]
    assert [c.first_index for c in await queue.store.read_chunks("t", "a", 3, limit=3)] == [2, 4, 6]


async def test_jobs_of_other_tenants_do_not_exist(queue: Queue) -> None:
    """V4: another tenant's job id is NOT_FOUND, for every call."""
    await queue.submit("a", tenant="mine")
    store = queue.store
    for call in (store.get, store.get_spec, store.cancel, store.place):
        with pytest.raises(NotFoundError):
            await call("other", "a")
    assert await store.read_chunks("other", "a") == []
    assert (await store.list_jobs("other")).jobs == []
    assert (await store.get("mine", "a")).state is JobState.QUEUED


async def test_list_pages_newest_first(queue: Queue) -> None:
    for i in range(7):
        await queue.submit(f"j{i}")
    await queue.submit("foreign", tenant="u")
    for i in (1, 4):
        await queue.store.cancel("t", f"j{i}")
    seen, cursor, pages = [], "", 0
    while True:
        page = await queue.store.list_jobs("t", cursor=cursor, limit=3)
        seen += [job.job_id for job in page.jobs]
        pages += 1
        cursor = page.next_cursor
        if not cursor:
            break
        await queue.submit(f"late{pages}")  # A newer job does not shift the pages.
    assert (seen, pages) == ([f"j{i}" for i in reversed(range(7))], 3)
    page = await queue.store.list_jobs("t", state=JobState.CANCELLED, limit=1)
    assert [job.job_id for job in page.jobs] == ["j4"]
    page = await queue.store.list_jobs("t", state=JobState.CANCELLED, cursor=page.next_cursor)
    assert [job.job_id for job in page.jobs] == ["j1"]
    assert page.next_cursor == ""
    for bad in ({"cursor": "-inf"}, {"cursor": "x"}, {"limit": 0}, {"limit": 1001}):
        with pytest.raises(InvalidRequestError):
            await queue.store.list_jobs("t", **bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong_s", [-300.0, 0.0, 300.0])
async def test_waiting_is_told_by_the_clock_of_redis(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, wrong_s: float
) -> None:
    """D11: a daemon whose clock is wrong by minutes shows what the job waited all the same."""
    true_time = time.time
    monkeypatch.setattr("batond.daemon.queue.reader.time.time", lambda: true_time() + wrong_s)
    assert await queue.claim() == []
    await queue.submit("a")
    record = await queue.store.get("t", "a")
    assert 0 <= convert.queue_time_s(record, queue.store.now_ms) < 60
