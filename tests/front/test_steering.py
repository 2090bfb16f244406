"""A job is parked and resumed by hand: the answer comes once the record says so, or after a while."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from batond.daemon.front import dispatcher as module
from batond.daemon.queue import JobState
from batond.daemon.wire.messages import CommandResult, Park, Preempted, Resume, Resumed, Started, Submit

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from batond.daemon.front.held import HeldJob

    Hold = Callable[..., HeldJob]
    MakeScene = Callable[..., Any]


async def test_the_state_after_the_command_is_committed_when_it_is_answered(
    hold: Hold, scene: MakeScene
) -> None:
    """What `batonctl park` and `resume` print is read from the record."""
    held = hold()
    name = held.query_id()
    async with scene(held.claimed) as at:
        await at.engine.heard(Submit)
        await at.say(Started(query_id=name, row=0))
        parking = asyncio.create_task(at.dispatcher.park("t", "j"))
        asked = await at.engine.heard(Park)
        parked = Preempted(query_id=name, cause="manual", kept=True, parked_bytes=1)
        await at.say(CommandResult(request_id=asked.request_id), parked)
        await parking
        assert at.queue.commits[-1].state is JobState.PARKED
        resuming = asyncio.create_task(at.dispatcher.resume("t", "j"))
        asked = await at.engine.heard(Resume)
        await at.say(CommandResult(request_id=asked.request_id))
        done, _ = await asyncio.wait([resuming], timeout=0)
        assert not done, "its row comes with a later step"
        await at.say(Resumed(query_id=name, row=1))
        await resuming
        assert at.queue.commits[-1].state is JobState.RUNNING


async def test_where_no_row_is_free_nobody_waits_for_it(
    hold: Hold, scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STEER_WAIT_S", 0.01)
    held = hold()
    name = held.query_id()
    async with scene(held.claimed) as at:
        await at.engine.heard(Submit)
        parked = Preempted(query_id=name, cause="manual", kept=True, parked_bytes=1)
        await at.say(Started(query_id=name, row=0), parked)
        resuming = asyncio.create_task(at.dispatcher.resume("t", "j"))
        asked = await at.engine.heard(Resume)
        await at.say(CommandResult(request_id=asked.request_id))
        async with asyncio.timeout(10):
            await resuming
