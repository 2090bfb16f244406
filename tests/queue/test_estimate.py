"""When a waiting job is expected to start: measured, unset where nothing is known, never in the past."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from batond.daemon.queue import JobState, TenantLimits

if TYPE_CHECKING:
    from batond.daemon.queue import ClaimedJob, Place

LEASE_MS = 60_000
SLACK_MS = 1500  # What passes between the reads of a test: far below what is told apart.


class Clock:
    """Lets time pass for one class: everything that was noted down lies further back."""

    def __init__(self, queue: Any, sla_class: str = "standard") -> None:
        self._queue, self._class = queue, sla_class

    async def pass_ms(self, ms: int) -> None:
        client, keys = self._queue.client, self._queue.store.keys
        if await client.hexists(keys.pace(self._class), "last_ms"):
            await client.hincrby(keys.pace(self._class), "last_ms", -ms)
        async for key in client.scan_iter(keys.job("*")):
            for field in ("queued_ms", "claimed_ms"):
                if await client.hexists(key, field):
                    await client.hincrby(key, field, -ms)


async def now_ms(queue: Any) -> int:
    seconds, microseconds = await queue.client.time()
    return int(seconds) * 1000 + int(microseconds) // 1000


async def place(queue: Any, job_id: str, *, tenant: str = "t") -> Place:
    found = await queue.store.place(tenant, job_id)
    assert found is not None
    place: Place = found
    return place


async def left_ms(queue: Any, job_id: str, **kw: Any) -> int:
    """Expected time to the start; fails if none is known."""
    found = await place(queue, job_id, **kw)
    assert found.start_ms
    assert abs(found.start_ms - await now_ms(queue) - found.left_ms) < SLACK_MS
    return found.left_ms


async def claim(queue: Any, n: int, *, sla_class: str = "standard", **kw: Any) -> list[ClaimedJob]:
    jobs: list[ClaimedJob] = await queue.store.claim("d1", {sla_class: n}, lease_ms=LEASE_MS, **kw)
    return jobs


async def serve(queue: Any, *, every_ms: int, lag_ms: int, times: int, sla_class: str = "standard") -> None:
    """Serves a class that always has jobs waiting: one is claimed every so often, and starts after it."""
    clock = Clock(queue, sla_class)
    for i in range(times + 1):
        await queue.submit(f"{sla_class}-served-{i}", sla_class=sla_class)
    for _ in range(times + 1):
        (job,) = await claim(queue, 1, sla_class=sla_class)
        await clock.pass_ms(lag_ms)
        assert await queue.commit(queue.step(job, 0, 1, state=JobState.RUNNING)) == []
        await clock.pass_ms(every_ms - lag_ms)


async def test_the_estimate_is_jobs_ahead_times_the_pace_and_the_way_from_claim_to_row(queue: Any) -> None:
    await serve(queue, every_ms=20_000, lag_ms=5_000, times=5)
    for i in range(4):
        await queue.submit(f"j{i}")
    for i in range(4):
        assert (await place(queue, f"j{i}")).ahead == i
        assert abs(await left_ms(queue, f"j{i}") - ((i + 1) * 20_000 + 5_000)) < SLACK_MS
    assert await queue.store.place("t", "standard-served-0") is None


async def test_it_moves_on_with_the_queue(queue: Any) -> None:
    await serve(queue, every_ms=20_000, lag_ms=5_000, times=5)
    for i in range(3):
        await queue.submit(f"j{i}")
    before = await left_ms(queue, "j2")
    await claim(queue, 1)
    after = await left_ms(queue, "j2")
    assert before - after > 15_000


async def test_nothing_is_known_of_a_class_that_was_not_served(queue: Any) -> None:
    await queue.submit("j")
    assert (await place(queue, "j")).start_ms == 0
    await serve(queue, every_ms=20_000, lag_ms=0, times=5, sla_class="batch")
    assert (await place(queue, "j")).start_ms == 0, "others' pace says nothing"


async def test_idle_rows_say_nothing_of_how_fast_rows_come_free(queue: Any) -> None:
    for i in range(20):
        await queue.submit(f"i{i}")
        (job,) = await claim(queue, 1)
        await queue.commit(queue.step(job, 0, 1, state=JobState.RUNNING))
    await queue.submit("j")
    assert (await place(queue, "j")).start_ms == 0


async def test_too_few_claims_say_nothing(queue: Any) -> None:
    await serve(queue, every_ms=20_000, lag_ms=0, times=2)
    await queue.submit("j")
    assert (await place(queue, "j")).start_ms == 0


async def test_while_nobody_is_claimed_it_moves_away_and_is_never_in_the_past(queue: Any) -> None:
    """S8."""
    await serve(queue, every_ms=2_000, lag_ms=0, times=5)
    await queue.submit("j")
    clock, lefts = Clock(queue), []
    for _ in range(4):
        lefts.append(await left_ms(queue, "j"))
        await clock.pass_ms(60_000)
    assert lefts[0] > 0
    assert all(later > earlier + 5_000 for earlier, later in pairwise(lefts))


async def test_several_claimed_at_once_are_faster_together(queue: Any) -> None:
    await serve(queue, every_ms=20_000, lag_ms=0, times=5)
    for i in range(24):
        await queue.submit(f"m{i}")
    for _ in range(5):
        assert len(await claim(queue, 4)) == 4
        await Clock(queue).pass_ms(20_000)
    await claim(queue, 4)
    await queue.submit("j")
    assert 4_000 < await left_ms(queue, "j") < 9_000


async def test_more_urgent_jobs_go_first_at_their_own_pace(queue: Any) -> None:
    await serve(queue, every_ms=20_000, lag_ms=0, times=5, sla_class="batch")
    await queue.submit("j", sla_class="batch")
    alone = await left_ms(queue, "j")
    for i in range(3):
        await queue.submit(f"unknown{i}", sla_class="interactive")
    assert (await place(queue, "j")).ahead == 3
    assert abs(await left_ms(queue, "j") - alone - 60_000) < SLACK_MS, "as fast as its own, while not known"
    await claim(queue, 3, sla_class="interactive")
    await serve(queue, every_ms=1_000, lag_ms=0, times=6, sla_class="interactive")
    for i in range(3):
        await queue.submit(f"known{i}", sla_class="interactive")
    assert await left_ms(queue, "j") - alone < 60_000


async def test_nothing_is_said_to_a_tenant_at_its_quota(queue: Any) -> None:
    await serve(queue, every_ms=20_000, lag_ms=0, times=5)
    limits = {"quoted": TenantLimits(running=1)}
    for i in range(2):
        await queue.submit(f"q{i}", tenant="quoted")
    assert [job.record.job_id for job in await claim(queue, 9, tenants=limits)] == ["q0"]
    await queue.submit("j")
    assert (await place(queue, "q1", tenant="quoted")).start_ms == 0
    assert (await place(queue, "j")).start_ms > 0


@pytest.mark.parametrize("wrong", ["type", "numbers"])
async def test_what_was_written_by_hand_is_mended(queue: Any, wrong: str) -> None:
    """D13."""
    key = queue.store.keys.pace("standard")
    if wrong == "type":
        await queue.client.set(key, "x")
    else:
        fields = dict.fromkeys(("last_ms", "claims", "claims_ms", "starts", "starts_ms"), "nan")
        await queue.client.hset(key, mapping=fields | {"claims": "-1e300", "left": "1"})
    await queue.submit("j")
    assert (await place(queue, "j")).start_ms == 0
    await serve(queue, every_ms=20_000, lag_ms=0, times=6)
    assert abs(await left_ms(queue, "standard-served-6") - 20_000) < SLACK_MS


async def test_what_it_costs_does_not_depend_on_what_waits(queue: Any) -> None:
    async def commands() -> int:
        stats = await queue.client.info("commandstats")
        return sum(int(one["calls"]) for name, one in stats.items() if name != "cmdstat_info")

    async def cost() -> int:
        await queue.store.place("t", "last")
        before = await commands()
        await queue.store.place("t", "last")
        return await commands() - before

    await serve(queue, every_ms=20_000, lag_ms=0, times=5)
    await queue.submit("last", sla_class="batch")
    few = await cost()
    for i in range(300):
        await queue.submit(f"s{i}")
        await queue.submit(f"b{i}", sla_class="batch")
    assert await cost() == few


async def test_the_measure_goes_with_time(queue: Any) -> None:
    """D10."""
    await serve(queue, every_ms=20_000, lag_ms=0, times=1)
    assert 0 < await queue.client.pttl(queue.store.keys.pace("standard")) <= 600_000
