"""Quotas of tenants: waiting jobs, running jobs, tokens per minute; all daemons count together."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from batond.daemon.errors import ConfigError, ExhaustedError
from batond.daemon.queue import JobState, NoticeKind, TenantLimits

if TYPE_CHECKING:
    from conftest import Queue

    from batond.daemon.queue import JobStore


async def claim(
    queue: Queue, limits: TenantLimits, n: int = 10, owner: str = "d1", store: JobStore | None = None
) -> list[str]:
    """Claims under one tenant's limits; gives job ids."""
    jobs = await (store or queue.store).claim(
        owner, {"standard": n, "batch": n}, lease_ms=60_000, tenants={"t": limits}
    )
    return [job.record.job_id for job in jobs]


async def minute_of(queue: Queue) -> tuple[int, int]:
    """Minute of the Redis clock and the ms that are left of it; waits while it is nearly over."""
    async with asyncio.timeout(60):
        while True:
            seconds, _ = await queue.client.time()
            if seconds % 60 < 50:
                return seconds // 60, 60_000 - seconds % 60 * 1000
            await asyncio.sleep(0.5)


async def test_a_tenants_waiting_jobs_are_limited(queue: Queue) -> None:
    limits = TenantLimits(queued=2)
    await queue.submit("a", limits=limits)
    await queue.submit("b", limits=limits, sla_class="batch")  # All classes count.
    with pytest.raises(ExhaustedError) as caught:
        await queue.submit("c", limits=limits)
    assert caught.value.reason == "TENANT_QUEUE_FULL"
    assert caught.value.details == {
        "quota": "max_queued",
        "waiting": "2",
        "limit": "2",
        "retry_ms": "1000",
    }
    assert not await queue.submit("a", limits=limits)  # Attaching needs no room.
    assert await queue.submit("c", tenant="u", limits=limits)
    await queue.store.cancel("t", "a")
    assert await queue.submit("c", limits=limits)


async def test_who_loses_its_turn_is_named_with_its_quota(queue: Queue) -> None:
    limits = {"one ä": TenantLimits(running=1), "few": TenantLimits(tokens_per_minute=5)}
    for tenant in limits:
        for i in range(3):
            await queue.submit(f"j{i}", tenant=tenant, prompt_tokens=9)
    rests: list[tuple[str, str]] = []
    for _ in range(2):  # Who rests already is not told again.
        claimed = await queue.store.claim(
            "d1",
            {"standard": 9},
            lease_ms=60_000,
            tenants=limits,
            on_rest=lambda tenant, quota: rests.append((tenant, quota)),
        )
    assert claimed == []
    assert sorted(rests) == [("few", "tokens_per_minute"), ("one ä", "max_running")]


async def test_the_age_of_the_oldest_job_counts_all_its_stays(queue: Queue) -> None:
    """S8."""
    await queue.submit("a")
    key = queue.store.keys.job("t/a")
    await queue.client.hincrby(key, "queued_ms", -5000)
    job = await queue.claim_one()
    assert (await queue.store.counts()).oldest_wait_ms["standard"] == 0
    await queue.store.hand_back("d1", "t", "a", job.record.epoch)
    await queue.client.hincrby(key, "queued_ms", -2000)
    assert 7000 <= (await queue.store.counts()).oldest_wait_ms["standard"] < 30_000


async def test_submits_at_once_do_not_pass_the_limit(queue: Queue) -> None:
    stores = [queue.another() for _ in range(3)]

    async def submit(i: int) -> bool:
        try:
            await stores[i % 3].submit(
                "t",
                f"j{i}",
                spec_json=b"{}",
                body_hash="h",
                sla_class="standard",
                limits=TenantLimits(queued=7),
            )
        except ExhaustedError:
            return False
        return True

    assert sum(await asyncio.gather(*(submit(i) for i in range(40)))) == 7


async def test_running_jobs_are_limited_over_all_daemons(queue: Queue) -> None:
    limits, other = TenantLimits(running=3), queue.another()
    for i in range(8):
        await queue.submit(f"j{i}", sla_class="standard" if i % 2 else "batch")
    taken = await asyncio.gather(
        *(claim(queue, limits, 1, f"d{i}", store) for i, store in enumerate((queue.store, other) * 3))
    )
    assert sum(map(len, taken)) == 3
    assert await claim(queue, limits) == []
    await queue.submit("u", tenant="u")
    assert await claim(queue, limits) == ["u"]  # Others are not held up.


async def test_the_end_of_a_job_lets_the_next_one_run(queue: Queue) -> None:
    limits = TenantLimits(running=1)
    for job_id in ("a", "b", "c"):
        await queue.submit(job_id)
    (a,) = await queue.store.claim("d1", {"standard": 9}, lease_ms=60_000, tenants={"t": limits})
    assert await claim(queue, limits) == []
    notices = queue.another().notices("d2")
    assert (await anext(notices)).kind is NoticeKind.SYNC
    await queue.commit(queue.step(a, 0, 1, state=JobState.SUCCEEDED))
    assert (await asyncio.wait_for(anext(notices), 10)).kind is NoticeKind.WAKE
    await notices.aclose()
    assert await claim(queue, limits, owner="d2") == ["b"]
    assert await claim(queue, limits, owner="d2") == []
    await queue.lapse("t", "b")  # Its daemon died: the job counts no more, and comes back.
    await queue.store.reap()
    assert await claim(queue, limits) == ["b"]
    assert await queue.store.release_owner("d1") == [("t", "b")]
    assert await claim(queue, limits) == ["b"]


async def test_a_larger_quota_is_seen_without_an_end(queue: Queue) -> None:
    for job_id in ("a", "b"):
        await queue.submit(job_id)
    assert await claim(queue, TenantLimits(running=1)) == ["a"]
    assert await claim(queue, TenantLimits(running=1)) == []
    resting = queue.store.keys.resting("standard")
    assert await queue.client.zrange(resting, 0, -1) == [b"t"]
    await queue.client.zadd(resting, {"t": 1})  # The time to look again has come.
    assert await claim(queue, TenantLimits(running=2)) == ["b"]
    assert not await queue.client.exists(resting)


async def test_tokens_per_minute_count_prompts_and_output(queue: Queue) -> None:
    limits = TenantLimits(tokens_per_minute=100)
    minute, left_ms = await minute_of(queue)
    for i in range(4):
        await queue.submit(f"j{i}", prompt_tokens=40)
    (job,) = await queue.store.claim("d1", {"standard": 1}, lease_ms=60_000, tenants={"t": limits})
    await queue.commit(queue.step(job, 0, *range(50)))
    await queue.commit(queue.step(job, 0, *range(50)))  # A replay costs nothing.
    assert await queue.client.get(queue.store.keys.minute("t", minute)) == b"90"
    assert await claim(queue, limits) == ["j1"]  # Below the limit: one more, which passes it.
    assert await claim(queue, limits) == []
    with pytest.raises(ExhaustedError) as caught:
        await queue.submit("more", limits=TenantLimits(queued=2, tokens_per_minute=100))
    assert left_ms - 15_000 < int(caught.value.details["retry_ms"]) < left_ms + 60_000
    assert await queue.submit("more", limits=limits)  # Only the quota on waiting jobs refuses.
    assert await queue.client.ttl(queue.store.keys.minute("t", minute)) > 60
    await queue.submit("u", tenant="u")
    assert await claim(queue, limits) == ["u"]


async def test_the_minute_slides(queue: Queue) -> None:
    """What was used in the minute before counts by the part of it that lies in the last 60 s."""
    limits = TenantLimits(tokens_per_minute=100)
    minute, left_ms = await minute_of(queue)
    keys = queue.store.keys
    await queue.submit("a")
    await queue.client.set(keys.minute("t", minute - 1), int(100 * 60_000 / left_ms) + 60)
    assert await claim(queue, limits) == []
    seconds, _ = await queue.client.time()
    until_ms = await queue.client.zscore(keys.resting("standard"), "t")
    assert seconds * 1000 < until_ms <= (minute + 1) * 60_000
    await queue.client.set(keys.minute("t", minute - 1), 90)
    await queue.client.zadd(keys.resting("standard"), {"t": 1})
    assert await claim(queue, limits) == ["a"]


async def test_a_tenant_back_from_rest_has_no_credit(queue: Queue) -> None:
    """S10: time spent at a quota gives no burst afterwards."""
    limits = {"t": TenantLimits(running=1)}
    for i in range(6):
        await queue.submit(f"t{i}", prompt_tokens=10)
    (held,) = await queue.store.claim("d1", {"standard": 1}, lease_ms=60_000, tenants=limits)
    for i in range(40):
        await queue.submit(f"u{i}", tenant="u", prompt_tokens=1000)
    await queue.store.claim("d1", {"standard": 20}, lease_ms=60_000, tenants=limits)
    await queue.commit(queue.step(held, 0, 1, state=JobState.SUCCEEDED))
    turns = dict(await queue.client.zrange(queue.store.keys.turn("standard"), 0, -1, withscores=True))
    assert turns[b"u"] - turns[b"t"] <= 1000


async def test_many_resting_tenants_do_not_hold_up_another(queue: Queue) -> None:
    limits = {f"t{i}": TenantLimits(running=1) for i in range(60)}
    for i in range(60):
        for j in range(2):
            await queue.submit(f"j{j}", tenant=f"t{i}")
    await queue.submit("free", tenant="z")
    first = await queue.store.claim("d1", {"standard": 100}, lease_ms=60_000, tenants=limits)
    assert len(first) == 61
    await queue.submit("again", tenant="z")
    (job,) = await queue.store.claim("d1", {"standard": 100}, lease_ms=60_000, tenants=limits)
    assert job.record.job_id == "again"


async def test_keys_of_quotas_put_there_by_hand_do_no_harm(queue: Queue) -> None:
    """D13: lists where counters, sets and turns belong."""
    keys, (minute, _) = queue.store.keys, await minute_of(queue)
    for key in (
        keys.minute("t", minute),
        keys.turn("standard"),
        keys.accounts("standard"),
        keys.floor("standard"),
        keys.due,
        f"{keys.base}:holds:t",
        keys.resting("standard"),
        keys.line("standard", "t"),
    ):
        await queue.client.rpush(key, b"x")
    limits = TenantLimits(running=1, tokens_per_minute=5, queued=3)
    await queue.submit("a", limits=limits, deadline_in_ms=60_000, prompt_tokens=9)
    assert await claim(queue, limits) == ["a"]
    assert await queue.client.get(keys.minute("t", minute)) == b"9"
    await queue.store.reap()


@pytest.mark.parametrize("floor", ["nan", "-nan", "inf", "-inf", "x", "", "1e300"])
async def test_a_floor_written_by_hand_is_mended(queue: Queue, floor: str) -> None:
    """D13: tenants are served, and the next claim has counters again."""
    keys = queue.store.keys
    await queue.client.set(keys.floor("standard"), floor)
    for i in range(3):
        await queue.submit(f"a{i}", tenant="a", prompt_tokens=100)
        await queue.submit(f"b{i}", tenant="b", prompt_tokens=10)
    assert len(await queue.claim(1)) == 1
    assert len(await queue.claim(1)) == 1
    assert 0 <= float(await queue.client.get(keys.floor("standard"))) < 1000
    assert len(await queue.claim()) == 4


@pytest.mark.parametrize("field", ["queued", "running", "tokens_per_minute"])
def test_negative_limits_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        TenantLimits(**{field: -1})
