"""The whole life of jobs behind Sentinels and in a Cluster: the same promises as on one server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Literal

import msgspec
import pytest
from redis.exceptions import RedisError

from batond.bench.local_redis import HOST, Cluster, RedisServer
from batond.daemon.config_tenants import TenantRights
from batond.daemon.front.identity import Identities
from batond.daemon.front.tenant_book import TenantBook
from batond.daemon.queue import (
    HandBackOutcome,
    JobSpec,
    JobState,
    LeaseKeeper,
    NewsFeed,
    NoticeKind,
    check_target,
    open_async,
    open_sync,
)
from batond.daemon.queue.keys import TENANTS_KEY, Keys
from batond.daemon.queue.target import RedisTarget
from batond.daemon.requests.params import SamplingParams
from batond.policies.classes import DEFAULT_CLASSES, SlaClasses

if TYPE_CHECKING:
    from pathlib import Path

    import redis
    from conftest import Queue

    from batond.bench.local_redis import Sentinels

WAIT_S = 30.0
BUDGET_S = 8.0


async def test_the_servers_are_found_fit(place: Sentinels | Cluster, target: RedisTarget) -> None:
    counts = "3 primaries, 3 replicas" if isinstance(place, Cluster) else "1 primaries, 2 replicas"
    async with asyncio.timeout(30):  # On a busy machine Sentinels may take one to be down for a moment.
        about = ""
        while not about.endswith(counts):
            about = await check_target(target)


async def test_a_job_lives(queue: Queue) -> None:
    """Submitted, claimed, committed, handed back, claimed by another, read, finished; and nothing is left."""
    assert await queue.submit("a")
    assert not await queue.submit("a")
    first = await queue.claim_one()
    assert await queue.commit(queue.step(first, 0, 1, 2)) == []
    assert await queue.store.hand_back("d1", "t", "a", first.record.epoch) is HandBackOutcome.QUEUED
    other = queue.another()
    second = await queue.claim_one(owner="d2", store=other)
    assert second.choices[0].token_ids == [1, 2]
    assert await queue.commit(queue.step(first, 2, 9)) == ["fenced"]
    end = queue.step(second, 2, 3, state=JobState.SUCCEEDED, finish_reason="stop")
    assert await queue.commit(end, owner="d2") == []
    assert await queue.commit(end, owner="d2") == []
    assert await queue.tokens("a") == [1, 2, 3]
    assert [chunk.first_index for chunk in await queue.store.read_chunks("t", "a", 2)] == [2]
    assert (await queue.store.get("t", "a")).state is JobState.SUCCEEDED
    assert [job.job_id for job in (await queue.store.list_jobs("t")).jobs] == ["a"]
    assert (await queue.store.counts()).totals["succeeded"] == 1


async def test_a_lapsed_lease_is_reaped_and_a_job_that_kills_engines_dies(queue: Queue) -> None:
    """D3, D8."""
    await queue.submit("a")
    await queue.claim_one()
    await queue.lapse("t", "a")
    assert (await queue.store.reap()).requeued == [("t", "a")]
    outcome = HandBackOutcome.QUEUED
    while outcome is HandBackOutcome.QUEUED:
        job = await queue.claim_one()
        outcome = await queue.store.hand_back(
            "d1", "t", "a", job.record.epoch, charge=True, why="the engine died"
        )
    assert outcome is HandBackOutcome.DEAD
    (letter,) = await queue.store.dead_letters()
    assert (await queue.store.dead_retry(letter.name)).state is JobState.QUEUED


async def test_several_choices_come_in_one_pipeline(queue: Queue) -> None:
    spec = JobSpec(prompt_token_ids=[1], sampling=SamplingParams(n=2), seed=7)
    await queue.submit("a", choices=2, spec_json=msgspec.json.encode(spec))
    job = await queue.claim_one()
    await queue.commit(queue.step(job, 0, 1))
    assert [len(chunks) for chunks in await queue.store.read_choices("t", "a", [0, 0])] == [1, 0]


async def test_notices_and_news_arrive(queue: Queue) -> None:
    """C1: a daemon hears of new jobs and cancels, a watcher of tokens, though another client wrote."""
    other = queue.another()
    notices = queue.store.notices("d1")
    assert (await anext(notices)).kind is NoticeKind.SYNC
    await queue.submit("a")
    assert (await anext(notices)).kind is NoticeKind.WAKE
    job = await queue.claim_one()
    heard: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    feed = NewsFeed(queue.client.pubsub, queue.store.keys, lambda *job: heard.put_nowait(job))
    feed.listen("t", "a")
    listening = asyncio.create_task(feed.run())
    async with asyncio.timeout(WAIT_S):
        assert await heard.get() == ("t", "a")  # Listening.
        await other.commit_step("d1", [queue.step(job, 0, 1)])
        assert await heard.get() == ("t", "a")
        await other.cancel("t", "a")
        notice = await anext(notices)
    assert (notice.kind, notice.tenant, notice.job_id) == (NoticeKind.CANCEL, "t", "a")
    await _end(listening)
    await notices.aclose()  # type: ignore[attr-defined] # a generator, said to be an iterator


async def test_a_keeper_renews(queue: Queue) -> None:
    """D2: the thread finds the primary by itself."""
    cancelled = threading.Event()
    keeper = LeaseKeeper(
        open_sync(queue.url, key=queue.store.keys.base, budget_s=5.0),
        queue.store.keys,
        "d1",
        lease_ms=400,
        on_lost=lambda *_: None,
        on_cancel=lambda *_: cancelled.set(),
    )
    await queue.submit("a")
    job = await queue.claim_one(lease_ms=400)
    keeper.start()
    keeper.hold("t", "a", job.record.epoch)
    before = await queue.client.zscore(queue.store.keys.leases, "t/a")
    try:
        await queue.store.cancel("t", "a")
        assert await asyncio.to_thread(cancelled.wait, WAIT_S)
        assert await queue.client.zscore(queue.store.keys.leases, "t/a") > before
    finally:
        await asyncio.to_thread(keeper.stop)


async def test_tenants_are_shared(target: RedisTarget) -> None:
    """The tenants' slot is another than the jobs'."""
    classes = SlaClasses(DEFAULT_CLASSES)
    clients = [open_async(target, key=TENANTS_KEY) for _ in range(2)]
    identities = [Identities([], classes, required=True) for _ in clients]
    changed = asyncio.Event()
    first, second = (
        TenantBook(client, known, classes, on_change=changed.set)
        for client, known in zip(clients, identities, strict=True)
    )
    following = asyncio.create_task(second.run())
    try:
        tenant, _ = await first.create("red", TenantRights())
        async with asyncio.timeout(WAIT_S):
            while "red" not in second.added:
                changed.clear()
                await changed.wait()
        assert second.added["red"].token_sha256 == tenant.token_sha256
    finally:
        await _end(following)
        await clients[0].delete(TENANTS_KEY)
        for client in clients:
            await client.aclose()


async def _end(task: asyncio.Task[None]) -> None:
    """Cancels until it ends: the client sends by `wait_for`, which on Python 3.11 can swallow a cancel."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=0.2)


def test_models_and_tenants_lie_in_different_slots_and_a_model_in_one(cluster: Cluster) -> None:
    """Every key that a script builds from the base is in the base's slot."""
    keys = Keys("Some/Model-1.5 {x}")
    slots = {
        cluster.servers[0].ask("CLUSTER", "KEYSLOT", name)
        for name in (keys.base, keys.job("t/a"), keys.out("t/a", 3), keys.queue("batch"), keys.owner("d:1"))
    }
    assert len(slots) == 1
    assert cluster.servers[0].ask("CLUSTER", "KEYSLOT", TENANTS_KEY) not in slots


@pytest.mark.parametrize("mode", ["sentinel", "cluster"])
def test_no_renewal_takes_longer_than_its_budget(mode: Literal["sentinel", "cluster"]) -> None:
    """A lease thread is held up for a quarter of the lease at most: here nobody says who to go to."""
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(3)]
        nodes = tuple((HOST, int(one.getsockname()[1])) for one in silent)
        target = RedisTarget(mode=mode, nodes=nodes, service="jobs" if mode == "sentinel" else "")
        assert_bounded(stack.enter_context(open_sync(target, key="x", budget_s=BUDGET_S)))


def test_no_renewal_waits_longer_for_an_answer(tmp_path: Path) -> None:
    """The same where the connection stands, and the answer fails to come."""
    server = RedisServer(tmp_path / "redis")
    target = RedisTarget(mode="cluster", nodes=((HOST, server.port),))
    try:
        with open_sync(target, key="x", budget_s=BUDGET_S) as client:
            assert client.exists("x") == 0
            with server.frozen():
                assert_bounded(client)
    finally:
        server.kill()


def assert_bounded(client: redis.Redis) -> None:
    """A call fails within the budget."""
    started_s = time.monotonic()
    with pytest.raises(RedisError):
        client.exists("x")
    assert time.monotonic() - started_s < BUDGET_S


def test_a_renewal_is_tried_again_at_once_where_the_connection_was_cut(
    place: Sentinels | Cluster, target: RedisTarget
) -> None:
    key = Keys("m").base
    with open_sync(target, key=key, budget_s=4.0) as client:
        client.exists(key)
        primary = place.primary_of(key) if isinstance(place, Cluster) else place.primary
        primary.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert client.exists(key) == 0
