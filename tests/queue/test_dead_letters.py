"""The dead-letter list: pages, what a letter says, what can be retried, and that all of it stays readable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from batond.daemon.errors import InvalidRequestError, NotFoundError, StateError
from batond.daemon.queue import JobState
from batond.daemon.queue.dead import (
    LATEST_MS,
    MAX_PAGE,
    decode_cursor,
    decode_name,
    encode_cursor,
    encode_name,
)

if TYPE_CHECKING:
    from conftest import Queue

    from batond.daemon.queue import DeadLetter

SECRET = "the prompt nobody but its tenant reads"


async def kill(queue: Queue, *job_ids: str, tenant: str = "t", **kw: Any) -> None:
    """Submits jobs and lets their first lease be their last."""
    store = queue.another(max_attempts=1)
    for job_id in job_ids:
        await queue.submit(job_id, tenant=tenant, **kw)
    await queue.claim(len(job_ids))
    for job_id in job_ids:
        await queue.lapse(tenant, job_id, alone=True)
    assert len((await store.reap()).dead) == len(job_ids)


async def names(queue: Queue, limit: int) -> list[str]:
    """Gives the names of all letters, page by page."""
    found, cursor = [], ""
    while True:
        page = await queue.store.dead_page(cursor=cursor, limit=limit)
        found += [letter.name for letter in page.letters]
        cursor = page.next_cursor
        if not cursor:
            return found


async def only(queue: Queue) -> DeadLetter:
    (letter,) = await queue.store.dead_letters()
    return letter


async def test_a_letter_says_what_happened(queue: Queue) -> None:
    """D8: whose job, its class, why, how often, by whom, when; not what its prompt is."""
    spec = msgspec.json.encode(queue.spec(prompt_text=SECRET))
    await kill(queue, "a", spec_json=spec)
    letter = await only(queue)
    assert (letter.name, letter.tenant, letter.job_id, letter.sla_class) == ("t/a", "t", "a", "standard")
    assert (letter.reason, letter.attempts, letter.obstacle) == ("ATTEMPTS", 1, "")
    assert "1 attempts" in letter.message
    assert "epoch 1 owner d1: the lease ran out while it was tried alone" in letter.history
    assert letter.died_ms == (await queue.store.get("t", "a")).finished_ms
    assert SECRET not in repr(letter)


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 50])
async def test_pages_are_in_order_and_complete(queue: Queue, limit: int) -> None:
    """Newest first, each once, also where many died in the same millisecond."""
    keys = queue.store.keys
    scores: dict[str | bytes, float] = {f"garbage:{i}": 1000 + i // 5 for i in range(20)}
    await queue.client.zadd(keys.dead, scores)
    expected = [name.decode() for name in await queue.client.zrevrange(keys.dead, 0, -1)]
    assert await names(queue, limit) == expected


async def test_pages_go_on_after_what_was_dropped(queue: Queue) -> None:
    """Whoever drops what a page showed misses nothing of the next, and new letters move nothing into it."""
    await queue.client.zadd(queue.store.keys.dead, {f"garbage:{i}": 5 for i in range(6)})
    page = await queue.store.dead_page(limit=2)
    assert [letter.name for letter in page.letters] == ["garbage:5", "garbage:4"]
    for letter in page.letters:
        await queue.store.dead_drop(letter.name)
    await queue.client.zadd(queue.store.keys.dead, {"garbage:new": 9, "garbage:9": 5})
    page = await queue.store.dead_page(cursor=page.next_cursor, limit=2)
    assert [letter.name for letter in page.letters] == ["garbage:3", "garbage:2"]


@pytest.mark.parametrize(
    "cursor", ["x", "!!!!", encode_cursor(b"a", b"nan"), encode_cursor(b"a", b"1_2"), "ü"]
)
async def test_cursors_that_are_none(queue: Queue, cursor: str) -> None:
    with pytest.raises(InvalidRequestError):
        await queue.store.dead_page(cursor=cursor)


@pytest.mark.parametrize("limit", [0, -1, MAX_PAGE + 1])
async def test_limits_out_of_range(queue: Queue, limit: int) -> None:
    with pytest.raises(InvalidRequestError):
        await queue.store.dead_page(limit=limit)


@pytest.mark.parametrize(
    "member", [b"", b"t/a", b"garbage:\\x00", b"raw:x", b"\xff\xfe\x00", "t/ü".encode(), b"a b%"]
)
def test_names_and_cursors_come_back(member: bytes) -> None:
    """D13: any bytes can be named, so any letter can be dropped."""
    assert encode_name(member).isprintable()
    assert encode_name(member).isascii()
    assert decode_name(encode_name(member)) == member
    assert decode_cursor(encode_cursor(member, b"17.5")) == ("17.5", member)


EVIDENCE = [
    None,
    b"",
    b"\xff\xfe",
    b"[]",
    b'{"reason": 7, "message": []}',
    b'{"died_ms": 1e300}',
    b'{"died_ms": -5, "name": "forged"}',
    b'{"reason": "\\u001b[31m", "message": "\\u0007'
    + b"x" * 100_000
    + b'", "history": "'
    + b"y" * 100_000
    + b'"}',
]


@pytest.mark.parametrize("evidence", EVIDENCE)
@pytest.mark.parametrize("member", [b"t/a", b"t/b", b"\x00\xff", b"", b"garbage:x", b"z" * 100_000])
@pytest.mark.parametrize("score", ["inf", "-1", "5", "1e300"])
async def test_any_garbage_is_readable(
    queue: Queue, member: bytes, evidence: bytes | None, score: str
) -> None:
    """D13: whatever was written into the list by hand is shown, bounded and printable."""
    keys = queue.store.keys
    await queue.client.zadd(keys.dead, {member: score})
    await queue.client.hset(
        keys.job("t/a"), mapping={"state": b"\xff", "attempts": "9" * 30, "sla_class": b"\x1b"}
    )
    if evidence is not None:
        await queue.client.hset(keys.evidence, member, evidence)
    letter = await only(queue)
    assert letter.obstacle
    assert letter.reason
    assert 0 <= letter.died_ms <= LATEST_MS
    shown = [letter.name, letter.reason, letter.message, letter.history, letter.sla_class, letter.obstacle]
    assert all(text.replace("\n", "").isprintable() for text in shown)
    assert len(msgspec.json.encode(letter)) < 4 * (1 << 20) / MAX_PAGE
    with pytest.raises(StateError if len(member) < 8000 else NotFoundError):
        await queue.store.dead_retry(letter.name)
    if len(member) < 8000:
        await queue.store.dead_drop(letter.name)
        assert await queue.store.dead_letters() == []


async def test_lists_where_the_list_belongs(queue: Queue) -> None:
    """D13: keys of another type make no error before the next reap mends them."""
    await queue.client.rpush(queue.store.keys.dead, "x")
    assert await queue.store.dead_letters() == []
    await queue.client.delete(queue.store.keys.dead)
    await kill(queue, "a")
    for key in (queue.store.keys.evidence, queue.store.keys.job("t/a")):
        await queue.client.delete(key)
        await queue.client.rpush(key, "x")
    letter = await only(queue)
    assert (letter.name, letter.message) == ("t/a", "no evidence was kept")
    with pytest.raises(StateError):
        await queue.store.dead_retry("t/a")


async def test_a_retried_job_leaves_the_list_and_runs(queue: Queue) -> None:
    """D8: with fresh attempts, once; its result is that of a job that never died."""
    await kill(queue, "a")
    record = await queue.store.dead_retry("t/a")
    assert (record.state, record.attempts, record.error_reason) == (JobState.QUEUED, 0, "")
    assert await queue.store.dead_letters() == []
    with pytest.raises(NotFoundError):
        await queue.store.dead_retry("t/a")
    job = await queue.claim_one()
    assert await queue.commit(queue.step(job, 0, 1, state=JobState.SUCCEEDED)) == []
    with pytest.raises(NotFoundError):
        await queue.store.dead_retry("t/a")


async def test_what_nobody_can_read_is_refused_until_it_is_mended(queue: Queue) -> None:
    """D13: a job with a broken spec stays in the list; the daemon that could not read it is named."""
    good = msgspec.json.encode(queue.spec())
    key = queue.store.keys.spec("t/a")
    await queue.submit("a")
    await queue.client.set(key, b'{"prompt_text":"' + SECRET.encode() + b'"}')
    assert await queue.claim() == []
    letter = await only(queue)
    assert letter.reason == "BAD_RECORD"
    assert "epoch 1 owner d1: spec" in letter.history
    assert "spec" in letter.obstacle
    assert SECRET not in repr(letter)
    with pytest.raises(StateError, match="spec") as caught:
        await queue.store.dead_retry("t/a")
    assert caught.value.reason == "NOT_RETRYABLE"
    assert (await queue.store.get("t", "a")).state is JobState.DEAD
    await queue.client.delete(key)
    assert (await only(queue)).obstacle == "its spec is missing"
    await queue.client.set(key, good)
    assert (await only(queue)).obstacle == ""
    await queue.store.dead_retry("t/a")
    assert (await queue.claim_one()).record.job_id == "a"


async def test_a_dropped_letter_takes_its_job_along(queue: Queue) -> None:
    """D10: nothing of the job stays, and no other job is touched."""
    await kill(queue, "a", "b")
    await queue.store.dead_drop("t/a")
    assert [key async for key in queue.client.scan_iter("*a")] == []
    assert (await only(queue)).name == "t/b"
    with pytest.raises(NotFoundError):
        await queue.store.dead_drop("t/a")
    await queue.submit("live")
    with pytest.raises(NotFoundError):
        await queue.store.dead_drop("t/live")
    assert (await queue.store.get("t", "live")).state is JobState.QUEUED
