"""News of jobs over one connection: nothing before the first read is lost, nor while it is broken."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import msgspec
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from batond.daemon.errors import UnavailableError
from batond.daemon.front.follow import Ended, Follower
from batond.daemon.front.hub import Hub
from batond.daemon.queue import Chunk, JobState, NewsFeed, look
from batond.daemon.queue import news as module
from batond.daemon.queue.keys import Keys
from batond.daemon.queue.look import Look, Sight
from batond.daemon.queue.records import encode_chunk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.queue.conftest import Queue

TIMEOUT_S = 30.0


class Daemon:
    """What another daemon needs to watch jobs."""

    def __init__(self, queue: Queue) -> None:
        self.store = queue.another()
        self.hub = Hub()
        self.feed = self.hub.listener = NewsFeed(self.store._client.pubsub, self.store.keys, self.hub.poke)
        self.stops = False
        self.follower = Follower(
            self.store, self.hub, stopping=lambda: self.stops, deaf=lambda: not self.feed.up
        )

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self.feed.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def listening(self, queue: Queue, job_id: str) -> None:
        """Returns once the server knows that the job is watched."""
        channel = self.store.keys.news(f"t/{job_id}")
        async with asyncio.timeout(TIMEOUT_S):
            while not dict(await queue.client.pubsub_numsub(channel))[channel.encode()]:
                continue


async def tokens(daemon: Daemon, job_id: str, from_index: int = 0) -> AsyncIterator[Chunk]:
    async for event in daemon.follower.follow("t", job_id, from_index):
        if isinstance(event, Chunk):
            yield event
        elif isinstance(event, Ended):
            assert event.record.state is JobState.SUCCEEDED


async def test_a_job_of_another_daemon_is_seen_token_by_token_without_polling(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token comes once, from any index, and each comes by news: nothing else would bring it."""
    monkeypatch.setattr("batond.daemon.front.follow.POLL_S", 3600.0)
    await queue.submit("a")
    job = await queue.claim_one()
    await queue.commit(queue.step(job, 0, 0, 1, 2))
    async with Daemon(queue) as daemon, asyncio.timeout(TIMEOUT_S):
        all_of_it, rest = tokens(daemon, "a"), tokens(daemon, "a", 2)
        assert (await anext(all_of_it)).token_ids == [0, 1, 2]
        assert (await anext(rest)).token_ids == [2]
        waiting = [asyncio.ensure_future(anext(stream)) for stream in (all_of_it, rest)]
        await daemon.listening(queue, "a")
        for index in range(3, 20):
            await queue.commit(queue.step(job, index, index))
            for seen in waiting:
                assert (await seen).token_ids == [index]
            waiting = [asyncio.ensure_future(anext(stream)) for stream in (all_of_it, rest)]
        await queue.store.finish("d1", queue.step(job, 20, state=JobState.SUCCEEDED, finish_reason="stop"))
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(end) for end in ends] == [StopAsyncIteration] * 2
        assert daemon.hub.waiting == 0
        channel = queue.store.keys.news("t/a")
        while dict(await queue.client.pubsub_numsub(channel))[channel.encode()]:
            continue  # It is left again: an ended job costs nothing.


async def test_a_broken_connection_is_made_anew_and_nothing_is_missed(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D4: as after a restart of Redis."""
    monkeypatch.setattr("batond.daemon.front.follow.POLL_S", 3600.0)
    monkeypatch.setattr("batond.daemon.front.follow.DEAF_POLL_S", 3600.0)
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    await queue.submit("a")
    job = await queue.claim_one()
    await queue.commit(queue.step(job, 0, 0))
    async with Daemon(queue) as daemon, asyncio.timeout(TIMEOUT_S):
        stream = tokens(daemon, "a")
        assert (await anext(stream)).token_ids == [0]
        for index in range(1, 4):
            seen = asyncio.ensure_future(anext(stream))
            await daemon.listening(queue, "a")
            await queue.client.client_kill_filter(_type="pubsub")
            await queue.commit(queue.step(job, index, index))
            assert (await seen).token_ids == [index]
        await stream.aclose()


async def test_a_daemon_that_stops_sends_watchers_of_other_daemons_on_at_once(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V2: with the index to go on from."""
    monkeypatch.setattr("batond.daemon.front.follow.POLL_S", 3600.0)
    await queue.submit("a")
    job = await queue.claim_one()
    await queue.commit(queue.step(job, 0, 0, 1))
    async with Daemon(queue) as daemon, asyncio.timeout(TIMEOUT_S):
        stream = tokens(daemon, "a")
        assert (await anext(stream)).token_ids == [0, 1]
        end = asyncio.ensure_future(anext(stream))
        await daemon.listening(queue, "a")
        daemon.stops = True
        daemon.hub.poke_all()
        with pytest.raises(UnavailableError) as caught:
            await end
        assert (caught.value.reason, caught.value.details["next_token_index"]) == ("STOPPING", "2")
    assert daemon.hub.waiting == 0


class Breaking:
    """A subscriber whose connection breaks in the moment in which its reader is cancelled."""

    def __init__(self) -> None:
        self.connection = SimpleNamespace(retry=None)
        self.read = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def subscribe(self, *_: str) -> None: ...

    async def get_message(self, **_: float) -> None:
        self.read.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise RedisConnectionError("closed by the writer") from None


async def test_a_feed_ends_even_if_its_connection_breaks_meanwhile() -> None:
    """V2: a daemon that stops must not wait for it for ever."""
    pubsub: Any = Breaking()
    feed = NewsFeed(lambda: pubsub, Keys("m"), lambda *_: None)
    feed.listen("t", "a")
    task = asyncio.create_task(feed.run())
    async with asyncio.timeout(TIMEOUT_S):
        await pubsub.read.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_many_jobs_of_one_feed(queue: Queue) -> None:
    """One connection, whatever is watched; only jobs that are watched are told of."""
    heard: set[str] = set()
    told = asyncio.Event()

    def note(_: str, job_id: str) -> None:
        heard.add(job_id)
        told.set()

    store = queue.another()
    feed = NewsFeed(store._client.pubsub, store.keys, note)
    for number in range(100):
        feed.listen("t", str(number))
    task = asyncio.create_task(feed.run())
    async with asyncio.timeout(TIMEOUT_S):
        while len(heard) < 100:  # The word that each is listened to.
            await told.wait()
            told.clear()
        subscribers = [one for one in await queue.client.client_list() if int(one["sub"])]
        assert [int(one["sub"]) for one in subscribers] == [100]
        heard.clear()
        feed.leave("t", "3")
        feed.listen("t", "x/y z")
        while "x/y z" not in heard:
            await told.wait()
            told.clear()
        heard.clear()
        for ref in ("t/3", "t/4"):
            await queue.client.publish(store.keys.news(ref), "")
        while "4" not in heard:
            await told.wait()
            told.clear()
    assert heard == {"4"}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_look_at_many_jobs_is_one_round_trip_and_garbage_fails_alone(queue: Queue) -> None:
    """D13."""
    for job_id in ("a", "b", "c", "d"):
        await queue.submit(job_id)
    for job in await queue.claim():
        await queue.commit(queue.step(job, 0, 5, 6))
    await queue.client.delete(queue.store.keys.job("t/b"))
    await queue.client.set(queue.store.keys.job("t/b"), "garbage")
    await queue.client.xadd(queue.store.keys.out("t/c"), {"x": "y"})
    await queue.client.hset(queue.store.keys.job("t/d"), "state", b"\xff")
    looks = [Look("t", job_id, [1]) for job_id in ("a", "b", "c", "d", "none")]
    seen = await queue.store.look([*looks, Look("other", "a", [0])])
    whole = Chunk(first_index=0, token_ids=[5, 6])
    assert seen[0] == Sight(JobState.RUNNING, [[whole]]), "a chunk that reaches over the index comes whole"
    assert [sight.state for sight in seen[1:]] == [None] * 5
    assert await queue.store.look([]) == []


async def test_a_long_job_is_watched_page_by_page(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes late gets every token of every choice, and the front has a page of them at a time."""
    monkeypatch.setattr(look, "LOOK_CHUNKS", 40)
    most = Look("t", "a", [0, 0]).limit
    spec = queue.spec()
    spec = msgspec.structs.replace(spec, sampling=msgspec.structs.replace(spec.sampling, n=2))
    await queue.submit("a", spec_json=msgspec.json.encode(spec), choices=2)
    job = await queue.claim_one()
    count = 2 * most + 7
    for i in range(count):
        chunks = tuple(Chunk(first_index=i, token_ids=[i], choice=choice) for choice in (0, 1))
        assert await queue.commit(queue.step(job, 0, chunks=chunks)) == []
    (sight,) = await queue.store.look([Look("t", "a", [0, count - 1])])
    assert ([len(chunks) for chunks in sight.outputs], sight.more) == ([most, 1], True)
    (sight,) = await queue.store.look([Look("t", "a", [count - 3, count - 1])])
    assert ([len(chunks) for chunks in sight.outputs], sight.more) == ([3, 1], False)
    await queue.store.finish("d1", queue.step(job, count, state=JobState.SUCCEEDED, finish_reason="stop"))
    follower = Follower(queue.store, Hub(), stopping=lambda: False)
    seen: dict[int, list[int]] = {0: [], 1: []}
    async with asyncio.timeout(TIMEOUT_S):
        async for event in follower.follow("t", "a", 0):
            if isinstance(event, Chunk):
                seen[event.choice] += event.token_ids
    assert seen == {0: list(range(count)), 1: list(range(count))}
    assert isinstance(event, Ended)


async def test_a_page_without_a_token_ends(queue: Queue) -> None:
    """D13: somebody wrote it by hand."""
    await queue.submit("a")
    job = await queue.claim_one()
    flush = encode_chunk(Chunk(first_index=0, token_ids=[], text=""))
    for number in range(1, 2 + Look("t", "a", [0]).limit):
        await queue.client.xadd(queue.store.keys.out("t/a"), {"c": flush}, id=f"0-{number}")
    await queue.store.finish("d1", queue.step(job, 0, state=JobState.SUCCEEDED, finish_reason="stop"))
    follower = Follower(queue.store, Hub(), stopping=lambda: False)
    async with asyncio.timeout(TIMEOUT_S):
        events = [event async for event in follower.follow("t", "a", 0)]
    assert isinstance(events[-1], Ended)


async def test_more_calls_at_once_than_connections_wait_for_one(queue: Queue) -> None:
    await queue.submit("a")
    async with asyncio.timeout(TIMEOUT_S):
        found = await asyncio.gather(*(queue.store.get("t", "a") for _ in range(300)))
    assert {record.job_id for record in found} == {"a"}


async def test_watchers_that_leave_while_the_connection_is_down_end_nothing(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nothing to subscribe to then: no connection is made, and the next watcher is served."""
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    heard = asyncio.Event()
    feed = NewsFeed(queue.another()._client.pubsub, queue.store.keys, lambda *_: heard.set())
    feed.listen("t", "a")
    feed.leave("t", "a")
    running = asyncio.create_task(feed.run())
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # It has taken the change up.
    feed.listen("t", "b")
    done, _ = await asyncio.wait(
        [running, asyncio.create_task(heard.wait())], timeout=TIMEOUT_S, return_when="FIRST_COMPLETED"
    )
    assert running not in done
    assert heard.is_set()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
