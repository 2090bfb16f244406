"""Held jobs that are late, or that have nothing left to do: the dispatcher at work."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from batond.daemon.front import endings as module
from batond.daemon.queue import CommittedChoice, JobState
from batond.daemon.wire.messages import (
    Cancel,
    Finished,
    FinishReason,
    HandBack,
    Started,
    Submit,
    Tokens,
    Usage,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.front.held import HeldJob
    from batond.daemon.queue import ClaimedJob

    Hold = Callable[..., HeldJob]
    MakeScene = Callable[..., Any]

USAGE = Usage(prompt_tokens=2, output_tokens=1, parks=0, recomputed_tokens=0, waited_s=0.0, parked_s=0.0)


def timed(held: HeldJob, **times: int) -> ClaimedJob:
    """The claim with deadlines, at 1000 ms of the Redis clock."""
    record = msgspec.structs.replace(held.claimed.record, waited_ms=70, **times)
    return msgspec.structs.replace(held.claimed, record=record, now_ms=1000)


def finished(held: HeldJob, reason: FinishReason) -> Finished:
    return Finished(query_id=held.query_id(), finish_reason=reason, usage=USAGE)


async def test_a_running_job_past_its_deadline_ends_with_what_it_has(hold: Hold, scene: MakeScene) -> None:
    held = hold(max_tokens=9)
    async with scene(timed(held, deadline_ms=1200)) as at:
        submit = await at.engine.heard(Submit)
        assert 0.0 < submit.deadline_s <= 0.2
        assert submit.tenant_weight == 2.5
        name = held.query_id()
        await at.say(Started(query_id=name, row=0))
        await at.say(Tokens(query_id=name, first_index=0, token_ids=[4], text=""))
        await at.engine.heard(Cancel)
        flush = Tokens(query_id=name, first_index=1, token_ids=[5], text="xy")
        await at.say(flush, finished(held, FinishReason.CANCELLED))
        last = await at.last()
    assert (last.state, last.error_reason, last.finish_reason) == (JobState.FAILED, "DEADLINE_EXCEEDED", "")
    assert "its deadline is over; it waited 70 ms in the queue" in last.error_message
    chunks = [chunk for commit in at.queue.commits for chunk in commit.chunks]
    assert [(chunk.token_ids, chunk.text) for chunk in chunks] == [([4], ""), ([5], "xy")]
    assert at.dispatcher.running_jobs == 0


async def test_a_silent_engine_does_not_keep_a_late_job(
    hold: Hold, scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LATE_GRACE_S", 0.05)
    held = hold(max_tokens=9)
    async with scene(timed(held, deadline_ms=1010)) as at:
        last = await at.last()
        assert last.state is JobState.FAILED
        await at.say(Tokens(query_id=held.query_id(), first_index=0, token_ids=[4], text="late"))
        assert at.queue.commits == [last]
    assert any(isinstance(command, Cancel) for command in at.engine.told)


async def test_without_an_engine_a_late_job_ends_at_once(hold: Hold, scene: MakeScene) -> None:
    async with scene(timed(hold(), deadline_ms=1200)) as at:
        await at.engine.heard(Submit)
        at.engine.ready = None
        assert (await at.last()).error_reason == "DEADLINE_EXCEEDED"


async def test_a_claimed_job_without_a_row_fails_after_its_longest_queue_time(
    hold: Hold, scene: MakeScene
) -> None:
    held = hold()
    async with scene(timed(held, start_by_ms=1050)) as at:
        await at.engine.heard(Cancel)
        await at.say(finished(held, FinishReason.CANCELLED))
        last = await at.last()
    assert last.error_reason == "DEADLINE_EXCEEDED"
    assert "longest queue time" in last.error_message


def test_a_row_in_time_ends_the_queue_time(hold: Hold) -> None:
    held = hold()
    held.claimed, held.claimed_s = timed(held, start_by_ms=2000), time.monotonic()
    assert 0.5 < held.left_to_start_s <= 1.0
    assert held.left_s == math.inf
    held.digest([Started(query_id=held.query_id(), row=0)])
    assert held.left_to_start_s == math.inf


async def test_a_job_that_ends_in_the_same_moment_has_ended_well(hold: Hold, scene: MakeScene) -> None:
    held = hold(max_tokens=1)
    async with scene(timed(held, deadline_ms=1050)) as at:
        await at.engine.heard(Cancel)
        tokens = Tokens(query_id=held.query_id(), first_index=0, token_ids=[4], text="x")
        await at.say(tokens, finished(held, FinishReason.LENGTH))
        assert (await at.last()).state is JobState.SUCCEEDED


async def test_a_job_with_time_is_left_alone_and_its_timer_ends_with_it(hold: Hold, scene: MakeScene) -> None:
    held = hold(max_tokens=1)
    async with scene(timed(held, deadline_ms=10**12)) as at:
        await at.engine.heard(Submit)
        (kept,) = at.dispatcher._jobs
        await at.say(finished(held, FinishReason.CANCELLED))
        assert (await at.last()).state is JobState.CANCELLED
        async with asyncio.timeout(10):
            await at.dispatcher._jobs.empty.wait()
        assert kept.timer is not None
        assert kept.timer.cancelled()
    assert not any(isinstance(command, (Cancel, HandBack)) for command in at.engine.told)


@pytest.mark.parametrize(
    ("reasons", "end"),
    [
        (("stop", "length"), (JobState.SUCCEEDED, "stop", "")),
        (("stop", "cancelled"), (JobState.CANCELLED, "cancelled", "")),
        (("stop", "error"), (JobState.FAILED, "", "INTERNAL")),
    ],
)
async def test_a_claimed_job_without_an_open_choice_ends_at_once(
    hold: Hold,
    scene: MakeScene,
    reasons: tuple[str, str],
    end: tuple[JobState, str, str],
) -> None:
    """D13: no query would ever report its end; it must not be held for ever."""
    committed = [CommittedChoice(token_ids=[1], text="x", finish_reason=reason) for reason in reasons]
    held = hold(n=2, committed=committed)
    async with scene(timed(held)) as at:
        last = await at.last()
        async with asyncio.timeout(10):
            await at.dispatcher._jobs.empty.wait()
    assert (last.state, last.finish_reason, last.error_reason) == end
    assert not any(isinstance(command, Submit) for command in at.engine.told)
