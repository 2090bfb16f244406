"""The thread that keeps leases."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

import pytest

from batond.daemon.queue import JobState, LeaseKeeper, open_sync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conftest import Queue

WAIT_S = 30.0


class Heard:
    """Collects what a keeper reports; each kind can be waited for."""

    def __init__(self) -> None:
        self.lost: list[tuple[str, str, int]] = []
        self.cancel: list[tuple[str, str]] = []
        self.event = threading.Event()

    def on_lost(self, tenant: str, job_id: str, epoch: int) -> None:
        """Notes a lost job."""
        self.lost.append((tenant, job_id, epoch))
        self.event.set()

    def on_cancel(self, tenant: str, job_id: str) -> None:
        """Notes a cancel."""
        self.cancel.append((tenant, job_id))
        self.event.set()


@pytest.fixture
def heard() -> Heard:
    """Gives a listener."""
    return Heard()


@pytest.fixture
def keep(queue: Queue, heard: Heard) -> Iterator[Callable[[int], LeaseKeeper]]:
    """Starts keepers for owner d1; they are stopped at the end."""
    started: list[LeaseKeeper] = []

    def start(lease_ms: int) -> LeaseKeeper:
        keeper = LeaseKeeper(
            open_sync(queue.url),
            queue.store.keys,
            "d1",
            lease_ms=lease_ms,
            on_lost=heard.on_lost,
            on_cancel=heard.on_cancel,
        )
        keeper.start()
        started.append(keeper)
        return keeper

    yield start
    for keeper in started:
        keeper.stop()


async def test_leases_live_on_while_the_event_loop_is_blocked(
    queue: Queue, keep: Callable[[int], LeaseKeeper]
) -> None:
    """D2, D12: blocked for three leases, nothing is lost; dropped, the lease runs out."""
    lease_ms = 800
    keeper = keep(lease_ms)
    await queue.submit("a")
    job = await queue.claim_one(lease_ms=lease_ms)
    keeper.hold("t", "a", job.record.epoch)
    time.sleep(3 * lease_ms / 1000)  # noqa: ASYNC251 - to block the loop is the point
    assert (await queue.store.reap()).requeued == []
    assert keeper.age_s < lease_ms / 1000
    assert await queue.commit(queue.step(job, 0, 1)) == []
    keeper.drop("t", "a")
    requeued: list[tuple[str, str]] = []
    deadline_s = time.monotonic() + WAIT_S
    while not requeued and time.monotonic() < deadline_s:
        requeued = (await queue.store.reap()).requeued
    assert requeued == [("t", "a")]


async def test_a_lost_job_is_reported_once(
    queue: Queue, keep: Callable[[int], LeaseKeeper], heard: Heard
) -> None:
    """D2: after somebody else took it, the keeper says so and leaves it alone."""
    await queue.submit("a")
    await queue.claim_one()
    await queue.lapse("t", "a")
    await queue.store.reap()
    other = await queue.claim_one(owner="d2", store=queue.another())
    keeper = keep(100)
    keeper.hold("t", "a", 1)
    assert heard.event.wait(WAIT_S)
    before = await queue.client.zscore(queue.store.keys.leases, "t/a")
    keeper.stop()
    assert heard.lost == [("t", "a", 1)]
    assert before == await queue.client.zscore(queue.store.keys.leases, "t/a")
    assert other.record.epoch == 2


async def test_a_cancel_whose_message_was_missed_comes_with_a_renewal(
    queue: Queue, keep: Callable[[int], LeaseKeeper], heard: Heard
) -> None:
    """C1: channels are lossy, renewals are not."""
    await queue.submit("a")
    job = await queue.claim_one()
    await queue.store.cancel("t", "a")
    keeper = keep(100)
    keeper.hold("t", "a", job.record.epoch)
    assert heard.event.wait(WAIT_S)
    assert heard.cancel[0] == ("t", "a")


async def test_a_job_that_just_ended_is_not_lost(queue: Queue, heard: Heard) -> None:
    await queue.submit("a")
    job = await queue.claim_one()
    await queue.commit(queue.step(job, 0, 1, state=JobState.SUCCEEDED))
    renewal = await queue.store.renew("d1", [("t", "a", 1)], lease_ms=100)
    assert (renewal.lost, renewal.cancel) == ([], [])


async def test_a_failing_callback_or_server_does_not_end_the_thread(
    queue: Queue, keep: Callable[[int], LeaseKeeper], heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def explode(tenant: str, job_id: str) -> None:
        calls.append(job_id)
        if len(calls) == 1:
            raise ValueError("from a callback")
        heard.event.set()

    monkeypatch.setattr(heard, "on_cancel", explode)
    await queue.submit("a")
    await queue.claim_one()
    await queue.store.cancel("t", "a")
    keeper = keep(100)
    keeper.hold("t", "a", 1)
    assert heard.event.wait(WAIT_S)
    assert len(calls) >= 2


async def test_a_cancelled_task_ends_whatever_the_client_does_with_the_cancel(queue: Queue) -> None:
    """V2: redis-py 8.1 lost cancels that came while it checked a connection, and the exit hung on it."""

    async def work() -> None:
        while True:
            await queue.store.reap()
            await queue.store.counts()
            await queue.store.list_jobs("t")

    for turns in range(120):
        tasks = [asyncio.create_task(work()) for _ in range(3)]
        for _ in range(turns % 40):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        _, left = await asyncio.wait(tasks, timeout=WAIT_S)
        assert not left
