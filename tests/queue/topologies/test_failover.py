"""D5: the primary is killed with SIGKILL and a replica takes over. Nothing is lost, nothing is done twice."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any

import pytest

from batond.bench.local_redis import HOST, Cluster, Sentinels, await_true, free_port
from batond.daemon.errors import BatondError, ConfigError, UnavailableError
from batond.daemon.queue import (
    JobState,
    LeaseKeeper,
    NewsFeed,
    NoticeKind,
    check_target,
    open_async,
    open_sync,
)
from batond.daemon.queue.calls import call
from batond.daemon.queue.keys import Keys
from batond.daemon.queue.target import RedisTarget

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from conftest import Queue

    from batond.bench.local_redis import RedisServer

WAIT_S = 60.0


async def fail_over(place: Sentinels | Cluster, queue: Queue) -> RedisServer:
    """Kills the primary of this queue; gives the new one."""
    if isinstance(place, Cluster):
        return await asyncio.to_thread(place.fail_over, queue.store.keys.base)
    return await asyncio.to_thread(place.fail_over)


async def primary_of(place: Sentinels | Cluster, queue: Queue) -> RedisServer:
    """The one that serves this queue."""
    if isinstance(place, Cluster):
        return await asyncio.to_thread(place.primary_of, queue.store.keys.base)
    return await asyncio.to_thread(lambda: place.primary)


@contextlib.contextmanager
def forgetful(place: Sentinels | Cluster, primary: RedisServer) -> Iterator[None]:
    """Nothing that is written meanwhile reaches a replica; then the primary is killed and one takes over.

    What was written before is with all of them.
    """
    await_true("the replicas have all there is", lambda: _caught_up(primary, len(place.replicas_of(primary))))
    with contextlib.ExitStack() as stack:
        for replica in place.replicas_of(primary):
            stack.enter_context(replica.frozen())
        primary.ask("CLIENT", "KILL", "TYPE", "replica")  # What lies in its socket would still arrive.
        yield
        primary.kill()
    if isinstance(place, Sentinels):
        place.await_promotion(primary)


def _caught_up(primary: RedisServer, replicas: int) -> bool:
    with primary.client() as client:
        info: Any = client.info("replication")
    known = [info[f"slave{place}"]["offset"] for place in range(info["connected_slaves"])]
    return len(known) >= replicas and min(known, default=0) >= info["master_repl_offset"]


async def insist(attempt: Callable[[], Awaitable[Any]]) -> Any:
    """Tries again while the queue is away, as daemons and clients do; any other failure is one."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await attempt()
            except UnavailableError:
                await asyncio.sleep(0.05)


async def test_replicated_work_survives_and_goes_on(mended: Sentinels | Cluster, queue: Queue) -> None:
    """Between claim and commit: the claim holds at the new primary, and tokens go on at their index."""
    for job_id in ("a", "b"):
        await queue.submit(job_id)
    job, waiting = await queue.claim()
    await queue.commit(queue.step(job, 0, 1, 2))
    assert await queue.client.wait(1, 5000) >= 1
    await fail_over(mended, queue)
    assert await insist(lambda: queue.commit(queue.step(job, 0, 1, 2), queue.step(job, 2, 3))) == []
    end = queue.step(waiting, 0, 7, state=JobState.SUCCEEDED)
    assert await insist(lambda: queue.commit(end)) == []
    assert await queue.tokens("a") == [1, 2, 3]
    assert await insist(queue.claim) == []  # Nothing is run twice.
    assert (await queue.store.get("t", "b")).state is JobState.SUCCEEDED


async def test_lost_claim_and_tokens_are_made_up_for(mended: Sentinels | Cluster, queue: Queue) -> None:
    """What the replicas never got: the job waits again, the old claim is refused, no token is doubled."""
    await queue.submit("a")
    with forgetful(mended, await primary_of(mended, queue)):
        lost = await queue.claim_one()
        assert await queue.commit(queue.step(lost, 0, 1)) == []
    assert (await insist(lambda: queue.store.get("t", "a"))).state is JobState.QUEUED
    assert await insist(lambda: queue.commit(queue.step(lost, 1, 2))) == ["fenced"]
    other = queue.another()
    again = await insist(lambda: queue.claim_one(owner="d2", store=other))
    # The same epoch as the lost claim's, but another owner: still fenced.
    assert (again.record.epoch, again.choices[0].token_ids) == (lost.record.epoch, [])
    assert await insist(lambda: queue.commit(queue.step(lost, 0, 9))) == ["fenced"]
    assert await queue.commit(queue.step(again, 0, 1), owner="d2") == []
    assert await queue.tokens("a") == [1]


async def test_lost_tokens_show_as_a_gap(mended: Sentinels | Cluster, queue: Queue) -> None:
    """The daemon is told how many are there, and goes on from those."""
    await queue.submit("a")
    job = await queue.claim_one()
    await queue.commit(queue.step(job, 0, 1))
    with forgetful(mended, await primary_of(mended, queue)):
        await queue.commit(queue.step(job, 1, 2))
    assert await insist(lambda: queue.commit(queue.step(job, 2, 3))) == ["gap"]
    assert await queue.commit(queue.step(job, 1, 2), queue.step(job, 2, 3)) == []
    assert await queue.tokens("a") == [1, 2, 3]


async def test_what_was_waited_for_is_not_lost(
    mended: Sentinels | Cluster, target: RedisTarget, open_queue: Callable[..., Queue]
) -> None:
    """`queue.wait_replicas` of all replicas: what was acknowledged is there after the failover."""
    queue = open_queue(target, replicas=2 if isinstance(mended, Sentinels) else 1)
    acknowledged: list[str] = []
    enough = asyncio.Event()

    async def submit_all() -> None:
        for number in range(10_000):
            job_id = f"j{number}"
            if enough.is_set():
                await queue.submit(job_id)
            else:  # On a busy machine a replica may need a while.
                await insist(lambda one=job_id: queue.submit(one))  # type: ignore[misc]
            acknowledged.append(job_id)
            if number == 50:
                enough.set()

    submitting = asyncio.create_task(submit_all())
    waiting = asyncio.create_task(enough.wait())
    await asyncio.wait({submitting, waiting}, return_when=asyncio.FIRST_COMPLETED)
    assert waiting.done(), submitting
    await asyncio.to_thread((await primary_of(mended, queue)).kill)
    with pytest.raises(UnavailableError):
        await submitting
    found = [await insist(lambda one=job_id: queue.store.get("t", one)) for job_id in acknowledged]  # type: ignore[misc]
    assert {record.state for record in found} == {JobState.QUEUED}


async def test_without_enough_replicas_nothing_is_acknowledged(
    mended: Sentinels | Cluster, target: RedisTarget, open_queue: Callable[..., Queue]
) -> None:
    """A repeated call waits for the first one's write; it does not pass because there is nothing to write."""
    probe = open_queue(target)
    replicas = mended.replicas_of(await primary_of(mended, probe))
    queue = open_queue(target, replicas=len(replicas), model=probe.store.keys.model)
    await insist(lambda: queue.submit("a"))  # On a busy machine a replica may need a while.
    with replicas[0].frozen():
        for _ in range(2):
            with pytest.raises(
                UnavailableError, match=f"of {len(replicas)} replicas have the write"
            ) as caught:
                await queue.submit("b")
            assert caught.value.reason == "QUEUE_REPLICAS"
    assert not await insist(lambda: queue.submit("b"))  # It is there, and now it counts.


async def test_listeners_come_back(mended: Sentinels | Cluster, queue: Queue) -> None:
    """Notices, news and leases go on at the new primary, by themselves."""
    renewed, heard = threading.Event(), asyncio.Event()
    keeper = LeaseKeeper(
        open_sync(queue.url, key=queue.store.keys.base, budget_s=2.0),
        queue.store.keys,
        "d1",
        lease_ms=2000,
        on_lost=lambda *_: None,
        on_cancel=lambda *_: renewed.set(),
    )
    feed = NewsFeed(queue.client.pubsub, queue.store.keys, lambda *_: heard.set())
    await queue.submit("a")
    job = await queue.claim_one()
    assert await queue.client.wait(1, 5000) >= 1
    keeper.start()
    keeper.hold("t", "a", job.record.epoch)
    feed.listen("t", "a")
    listening = asyncio.create_task(feed.run())
    try:
        async with asyncio.timeout(WAIT_S):
            await heard.wait()
            await fail_over(mended, queue)
            notice = await listen_again(queue)
            assert notice is NoticeKind.SYNC
            await insist(lambda: queue.store.cancel("t", "a"))
            assert await asyncio.to_thread(renewed.wait, WAIT_S)
            heard.clear()
            while not heard.is_set():  # News may be lost while the feed connects anew; not for ever.
                await insist(lambda: queue.commit(queue.step(job, 0, 1, state=JobState.PARKED)))
                await insist(lambda: queue.commit(queue.step(job, 0, state=JobState.RUNNING)))
                await asyncio.sleep(0.05)
    finally:
        while not listening.done():
            listening.cancel()
            await asyncio.wait([listening], timeout=0.2)
        await asyncio.to_thread(keeper.stop)


async def listen_again(queue: Queue) -> NoticeKind:
    """The first notice at the new primary."""

    async def first() -> NoticeKind:
        notices = queue.store.notices("d1")
        try:
            return (await anext(notices)).kind
        finally:
            await notices.aclose()  # type: ignore[attr-defined] # a generator, said to be an iterator

    kind: NoticeKind = await insist(first)
    return kind


async def test_a_new_primary_knows_no_script_and_is_taught(mended: Sentinels | Cluster, queue: Queue) -> None:
    """NOSCRIPT: the hash means nothing to it."""
    await queue.submit("a")
    (await fail_over(mended, queue)).ask("SCRIPT", "FLUSH")
    assert await insist(lambda: queue.submit("b"))


async def test_a_slot_that_moves_stops_the_queue_until_it_is_there(
    cluster: Cluster, make_target: Callable[..., RedisTarget], open_queue: Callable[..., Queue]
) -> None:
    """ASK is not followed: at the other node a script would take the keys that are still here for lost."""
    queue = open_queue(make_target(cluster))
    await queue.submit("a")
    base = queue.store.keys.base
    source = cluster.primary_of(base)
    goal = next(one for one in cluster.primaries if one is not source)
    slot = str(source.ask("CLUSTER", "KEYSLOT", base))
    names = [str(one.ask("CLUSTER", "MYID"), "ascii") for one in (source, goal)]
    goal.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", names[0])
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", names[1])
    try:
        with pytest.raises(UnavailableError, match="being moved"):
            await queue.submit("b")
        keys = source.ask("CLUSTER", "GETKEYSINSLOT", slot, "100")
        source.ask("MIGRATE", HOST, str(goal.port), "", "0", "5000", "KEYS", *keys)
        with pytest.raises(UnavailableError, match="being moved"):
            await queue.submit("b")
    finally:
        for one in (goal, source, *cluster.primaries):
            one.ask("CLUSTER", "SETSLOT", slot, "NODE", names[1])
    assert await insist(lambda: queue.submit("b"))
    assert [job.record.job_id for job in await queue.claim()] == ["a", "b"]
    assert cluster.primary_of(base) is goal


async def test_a_cluster_that_is_down_is_away(
    cluster: Cluster, make_target: Callable[..., RedisTarget], open_queue: Callable[..., Queue]
) -> None:
    """CLUSTERDOWN: most primaries are gone, so nobody may write; it is back when they are."""
    queue = open_queue(make_target(cluster))
    await queue.submit("a")
    source = cluster.primary_of(queue.store.keys.base)
    gone = [one for one in cluster.servers if one is not source]
    for server in gone:
        server.kill()
    try:
        await_true("it notices", lambda: b"cluster_state:fail" in source.ask("CLUSTER", "INFO"))
        with pytest.raises(UnavailableError):
            await queue.submit("b")
    finally:
        await asyncio.to_thread(cluster.mend)
    assert await insist(lambda: queue.submit("b"))
    assert [job.record.job_id for job in await queue.claim()] == ["a", "b"]


async def check_on_and_on(target: RedisTarget) -> None:
    """On a busy machine Sentinels may take a replica to be down for a moment, and a check passes it over."""
    while True:
        await check_target(target)
        await asyncio.sleep(0.1)


async def test_a_replica_that_would_evict_is_refused(
    place: Sentinels | Cluster, target: RedisTarget, queue: Queue
) -> None:
    """D11: it may be the next primary."""
    replica = place.replicas_of(await primary_of(place, queue))[0]
    replica.ask("CONFIG", "SET", "maxmemory-policy", "volatile-lru")
    try:
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(ConfigError, match="volatile-lru"):
                await check_on_and_on(target)
    finally:
        replica.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")


async def test_another_topology_is_refused(place: Sentinels | Cluster, queue: Queue) -> None:
    """Each is told from the other two at the start, not by a job that fails."""
    server = await primary_of(place, queue)
    address = (HOST, server.port)
    if isinstance(place, Cluster):
        with pytest.raises(ConfigError, match="is a node of a Redis Cluster"):
            await check_target(f"redis://{server.address}/0")
        client = open_async(f"redis://{place.replicas_of(server)[0].address}/0")
        with pytest.raises(ConfigError, match=r"queue\.mode = 'cluster'"):
            await call(client, queue.store.keys, "counts")
        await client.aclose()
    else:
        with pytest.raises(ConfigError, match="is no node of a Redis Cluster"):
            await check_target(RedisTarget(mode="cluster", nodes=(address,)))
        with pytest.raises(BatondError):
            await check_target(RedisTarget(mode="sentinel", nodes=(address,), service="jobs"))


async def test_unknown_service_and_silent_nodes_are_away() -> None:
    """The message names who was asked."""
    port = free_port()
    for target in (
        RedisTarget(mode="sentinel", nodes=((HOST, port),), service="jobs"),
        RedisTarget(mode="cluster", nodes=((HOST, port),)),
    ):
        with pytest.raises(UnavailableError, match=str(port)):
            await check_target(target)
        client = open_async(target, key="batond:{m}")
        with pytest.raises(UnavailableError, match=str(port)):
            await call(client, Keys("m"), "counts")
        await client.aclose()
