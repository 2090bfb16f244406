"""Looks are gathered, fail one by one, and take half the time at most."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from batond.daemon.errors import NotFoundError, UnavailableError
from batond.daemon.front import lookout as module
from batond.daemon.front.lookout import Lookout
from batond.daemon.queue import Chunk, JobState
from batond.daemon.queue.look import GONE, Look, Sight

if TYPE_CHECKING:
    from collections.abc import Sequence


class Store:
    """Sees every job running, but `gone` and what the error forbids."""

    def __init__(self, error: Exception | None = None) -> None:
        self.rounds: list[int] = []
        self.error = error

    async def look(self, looks: Sequence[Look]) -> list[Sight]:
        self.rounds.append(len(looks))
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        shown = [[Chunk(first_index=look.from_indexes[0], token_ids=[1])] for look in looks]
        return [
            GONE if look.job_id == "gone" else Sight(JobState.RUNNING, [chunks])
            for look, chunks in zip(looks, shown, strict=True)
        ]


async def test_looks_of_many_watchers_share_round_trips() -> None:
    store = Store()
    lookout = Lookout(store)
    async with asyncio.timeout(30):
        sights = await asyncio.gather(*(lookout.look("t", f"j{i}", [i]) for i in range(200)))
        assert [sight.outputs[0][0].first_index for sight in sights] == list(range(200))
        assert len(store.rounds) == -(-200 // module.MOST)
        await lookout.look("t", "j", [0])
    assert store.rounds[-1] == 1


async def test_a_job_that_is_gone_is_not_found_and_its_mates_are_seen() -> None:
    lookout = Lookout(Store())
    gone, seen = await asyncio.gather(
        lookout.look("t", "gone", [0]), lookout.look("t", "j", [0]), return_exceptions=True
    )
    assert isinstance(gone, NotFoundError)
    assert isinstance(seen, Sight)


@pytest.mark.parametrize("error", [UnavailableError("away"), ValueError("a bug")])
async def test_a_failure_reaches_every_watcher_and_the_next_look_is_made(error: Exception) -> None:
    store = Store(error)
    lookout = Lookout(store)
    async with asyncio.timeout(30):
        failed = await asyncio.gather(
            *(lookout.look("t", "j", [0]) for _ in range(3)), return_exceptions=True
        )
        assert failed == [error] * 3
        store.error = None
        assert (await lookout.look("t", "j", [0])).state is JobState.RUNNING


async def test_who_goes_away_is_not_looked_for() -> None:
    store = Store()
    lookout = Lookout(store)
    gone = asyncio.create_task(lookout.look("t", "j", [0]))
    kept = asyncio.create_task(lookout.look("t", "k", [0]))
    await asyncio.sleep(0)
    gone.cancel()
    async with asyncio.timeout(30):
        await kept
    assert store.rounds == [1]
