"""When jobs of dead daemons are taken back while Redis has its troubles."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from batond.daemon.errors import UnavailableError
from batond.daemon.front import reaper

MakeScene = Any


@pytest.mark.parametrize(("away_for_long", "reaps"), [(0.25, True), (-1.0, False)])
async def test_calls_that_fail_now_and_then_put_no_reap_off(
    scene: MakeScene, monkeypatch: pytest.MonkeyPatch, away_for_long: float, *, reaps: bool
) -> None:
    """D2: only an outage in which leases may have run out does."""
    monkeypatch.setattr(reaper, "REAP_EVERY_S", 0.001)
    monkeypatch.setattr(reaper, "AWAY_FOR_LONG", away_for_long)
    at = scene()
    counted, reaped, often = at.queue.counts, asyncio.Event(), asyncio.Event()
    calls = 0

    async def counts() -> Any:
        nonlocal calls
        calls += 1
        if calls > 20:
            often.set()
        if calls % 2:
            raise UnavailableError("late", reason="QUEUE_AWAY")
        return await counted()

    async def reap(reaping: Any = at.queue.reap) -> Any:
        reaped.set()
        return await reaping()

    monkeypatch.setattr(at.queue, "counts", counts)
    monkeypatch.setattr(at.queue, "reap", reap)
    async with at:
        await asyncio.wait_for(often.wait(), 10)
    assert reaped.is_set() is reaps


@pytest.mark.parametrize(("patient_s", "reaps"), [(0.0, True), (3600.0, False)])
async def test_a_start_reaps_when_all_who_live_could_renew(
    scene: MakeScene, monkeypatch: pytest.MonkeyPatch, patient_s: float, *, reaps: bool
) -> None:
    """D2: it counts at once; what it takes back waits."""
    monkeypatch.setattr(reaper, "REAP_EVERY_S", 0.001)
    at = scene(patient_s=patient_s)
    counted, reaped = asyncio.Semaphore(0), asyncio.Event()

    async def counts(counting: Any = at.queue.counts) -> Any:
        counted.release()
        return await counting()

    async def reap(reaping: Any = at.queue.reap) -> Any:
        reaped.set()
        return await reaping()

    monkeypatch.setattr(at.queue, "counts", counts)
    monkeypatch.setattr(at.queue, "reap", reap)
    async with at, asyncio.timeout(10):
        for _ in range(20):
            await counted.acquire()
    assert reaped.is_set() is reaps
    assert at.dispatcher.counts is not None


async def test_patience_begins_when_the_model_is_loaded(
    scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D2: Redis may have been away during a long load; leases that ran out then are renewed by who lives."""
    now_s = 0.0
    monkeypatch.setattr(reaper, "REAP_EVERY_S", 0.001)
    monkeypatch.setattr(reaper, "time", SimpleNamespace(monotonic=lambda: now_s))
    at = scene(patient_s=10.0)
    now_s = 100.0
    reaped: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def counts(counting: Any = at.queue.counts) -> Any:
        nonlocal now_s
        now_s += 1.0
        return await counting()

    async def reap(reaping: Any = at.queue.reap) -> Any:
        if not reaped.done():
            reaped.set_result(now_s)
        return await reaping()

    monkeypatch.setattr(at.queue, "counts", counts)
    monkeypatch.setattr(at.queue, "reap", reap)
    async with at:
        assert await asyncio.wait_for(reaped, 10) == 110.0
