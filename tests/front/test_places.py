"""A waiting job's watcher hears of its place, and of its expected start when that has moved."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from batond.clients import convert as client_convert
from batond.clients.model import Queued
from batond.daemon.front import convert
from batond.daemon.front import follow as module
from batond.daemon.front.follow import Follower, InLine
from batond.daemon.front.hub import Hub
from batond.daemon.queue import JobState, Place
from batond.daemon.queue.look import Sight

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from batond.daemon.front.held import HeldJob

RECORD = SimpleNamespace(
    tenant="t", job_id="j", state=JobState.QUEUED, choices=1, sla_class="standard", epoch=0
)


class Line:
    """A queue in which one job waits, at one place after the other; at the end nobody is told any more."""

    def __init__(self, *places: Place | None) -> None:
        self._places = list(places)
        self.told_all = asyncio.Event()

    async def get(self, *_: Any) -> Any:
        return RECORD

    async def look(self, looks: list[Any]) -> list[Sight]:
        return [Sight(JobState.QUEUED, [[]]) for _ in looks]

    async def place(self, *_: Any) -> Place | None:
        if len(self._places) > 1:
            return self._places.pop(0)
        self.told_all.set()
        return self._places[0]


async def heard(monkeypatch: pytest.MonkeyPatch, *places: Place | None, announce: bool = False) -> list[Any]:
    monkeypatch.setattr(module, "PLACE_S", 0.001)
    line, events = Line(*places), []
    store: Any = line

    async def listen() -> None:
        follower = Follower(store, Hub(), stopping=lambda: False)
        async for event in follower.follow("t", "j", 0, announce=announce):
            events.append(event)  # noqa: PERF401 - what came until the end of the task counts

    task = asyncio.create_task(listen())
    await asyncio.wait_for(line.told_all.wait(), 10)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert all(isinstance(event, InLine) for event in events)
    return [event.place for event in events]


def at(ahead: int, start_ms: int = 0, left_ms: int = 0) -> Place:
    return Place(ahead=ahead, start_ms=start_ms, left_ms=left_ms)


async def test_a_place_is_told_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [at(3), at(3), at(1), at(1), at(1)]
    assert await heard(monkeypatch, *places) == [at(3), at(1)]


async def test_an_expected_start_is_told_when_it_becomes_known_and_when_it_is_not_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = at(1, 50_000, 20_000)
    assert await heard(monkeypatch, at(1), known, at(1), at(1)) == [at(1), known, at(1)]


async def test_a_start_that_moves_a_little_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    first, near, far = at(1, 50_000, 20_000), at(1, 51_900, 21_800), at(1, 53_000, 22_800)
    assert await heard(monkeypatch, first, near, far, far) == [first, far]
    soon, sooner = at(0, 50_000, 900), at(0, 50_800, 900)
    assert await heard(monkeypatch, soon, sooner, sooner) == [soon]


async def test_a_generation_begins_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    places = await heard(monkeypatch, at(2, 7, 7), at(2, 7, 7), at(2, 7, 7), announce=True)
    assert places == [at(2, 7, 7)]


def test_place_and_start_reach_the_client(hold: Callable[..., HeldJob]) -> None:
    record = hold().claimed.record
    start = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    place = at(2, int(start.timestamp() * 1000), 9)
    shown = client_convert.event(convert.stream_event(InLine(record, place), 0))
    assert shown == Queued("j", 3, "standard", start)
    assert client_convert.event(convert.stream_event(InLine(record, None), 0)) == Queued("j", 0, "standard")
    job = client_convert.job(convert.job(record, now_ms=0.0, place=place))
    assert (job.queue_position, job.estimated_start_time) == (3, start)
    job = client_convert.job(convert.job(record, now_ms=0.0, place=at(2)))
    assert (job.queue_position, job.estimated_start_time) == (3, None)
