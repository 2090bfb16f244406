"""Fan-out: watchers hold an index, miss nothing, see nothing twice, and leave nothing behind."""

from __future__ import annotations

import asyncio

import pytest

from batond.daemon.front.hub import GotRow, Hub, LiveEvent, LiveJob
from batond.daemon.queue import Chunk

TIMEOUT_S = 30.0


def chunk(index: int) -> Chunk:
    return Chunk(first_index=index, token_ids=[index], text=str(index))


class Listener:
    """Keeps which jobs it is to hear of."""

    def __init__(self) -> None:
        self.jobs: set[str] = set()

    def listen(self, _: str, job_id: str) -> None:
        assert job_id not in self.jobs
        self.jobs.add(job_id)

    def leave(self, _: str, job_id: str) -> None:
        self.jobs.remove(job_id)


async def read_all(live: LiveJob) -> list[LiveEvent]:
    seen: list[LiveEvent] = []
    while True:
        seen += live.events[len(seen) :]
        if live.closed:
            return seen
        await live.wait_beyond(len(seen))


async def test_every_watcher_sees_every_event_once_whenever_it_comes() -> None:
    """R7."""
    hub = Hub()
    live = hub.open("t", "j", base_indexes=(0,))
    early = [asyncio.create_task(read_all(live)) for _ in range(3)]
    await asyncio.sleep(0)
    live.publish([GotRow(), chunk(0)])
    await asyncio.sleep(0)
    late = asyncio.create_task(read_all(live))
    for index in range(1, 50):
        live.publish([chunk(index)])
    hub.close("t", "j")
    wanted = [GotRow(), *(chunk(index) for index in range(50))]
    async with asyncio.timeout(TIMEOUT_S):
        for watcher in (*early, late):
            assert await watcher == wanted
    assert await read_all(live) == wanted, "who comes after the end still reads all"


async def test_a_watcher_that_does_not_read_delays_nobody() -> None:
    """C4: the writer never waits, and what is kept is the job's own events."""
    live = Hub().open("t", "j", base_indexes=(0,))
    sleeper = asyncio.create_task(live.wait_beyond(10_000))
    for index in range(1000):
        live.publish([chunk(index)])
    assert len(live.events) == 1000
    assert not sleeper.done()
    live.close()
    async with asyncio.timeout(TIMEOUT_S):
        await sleeper


async def test_who_waits_for_a_job_is_woken_by_its_begin_its_end_and_news_of_it() -> None:
    hub = Hub()
    watch = hub.watch("t", "j")
    async with asyncio.timeout(TIMEOUT_S):
        hub.open("t", "j", base_indexes=(0,))
        await watch.wait(600)
        watch.clear()
        assert hub.get("t", "j") is not None
        assert hub.get("other", "j") is None
        hub.close("t", "j")
        await watch.wait(600)
        watch.clear()
        hub.poke("t", "j")
        await watch.wait(600)
        watch.clear()
        hub.poke_all()
        await watch.wait(600)
    watch.clear()
    hub.poke("other", "j")
    await watch.wait(0.01)
    assert not watch.told


async def test_the_listener_hears_of_a_job_as_long_as_it_is_watched() -> None:
    hub, heard = Hub(), Listener()
    hub.listener = heard
    first, second, other = hub.watch("t", "j"), hub.watch("t", "j"), hub.watch("t", "k")
    assert (heard.jobs, hub.waiting) == ({"j", "k"}, 3)
    first.close()
    first.close()
    assert (heard.jobs, hub.waiting) == ({"j", "k"}, 2)
    second.close()
    assert heard.jobs == {"k"}
    other.close()
    assert (heard.jobs, hub.waiting) == (set(), 0)
    assert not hub._watches, "C5: nothing stays"


async def test_a_new_claim_ends_the_record_of_the_old_one() -> None:
    hub = Hub()
    old = hub.open("t", "j", base_indexes=(0,))
    new = hub.open("t", "j", base_indexes=(7,))
    assert old.closed
    assert hub.get("t", "j") is new
    assert new.base_indexes == (7,)


@pytest.mark.parametrize("position", [0, 3])
async def test_a_closed_record_makes_nobody_wait(position: int) -> None:
    live = LiveJob((0,))
    live.close()
    await asyncio.wait_for(live.wait_beyond(position), TIMEOUT_S)
