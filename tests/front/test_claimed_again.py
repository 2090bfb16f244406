"""Jobs that come again under the epoch they had, and steps that can't be taken in."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from batond.daemon.queue import JobState
from batond.daemon.wire.messages import Finished, FinishReason, Started, Submit, Tokens, Usage

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.front.held import HeldJob

    Hold = Callable[..., HeldJob]
    MakeScene = Callable[..., Any]

USAGE = Usage(prompt_tokens=2, output_tokens=1, parks=0, recomputed_tokens=0, waited_s=0.0, parked_s=0.0)


async def test_a_step_under_way_does_not_count_for_the_claim_after_it(hold: Hold, scene: MakeScene) -> None:
    """D2: Redis forgot a claim in a failover and gives it again, as the same epoch."""
    held = hold(max_tokens=9)
    async with scene(held.claimed) as at:
        first = await at.engine.heard(Submit)
        await at.say(Started(query_id=first.query_id, row=0))
        at.dispatcher.lost("t", "j", 1)
        at.queue.jobs = [held.claimed]
        at.dispatcher.wake()
        second = await at.engine.heard(Submit, 2)
        await at.say(Tokens(query_id=first.query_id, first_index=3, token_ids=[4], text="late"))
        await at.say(Finished(query_id=first.query_id, finish_reason=FinishReason.LENGTH, usage=USAGE))
        await at.say(Tokens(query_id=second.query_id, first_index=0, token_ids=[5], text="x"))
        await at.say(Finished(query_id=second.query_id, finish_reason=FinishReason.LENGTH, usage=USAGE))
        await at.last()
    assert [chunk.token_ids for commit in at.queue.commits for chunk in commit.chunks] == [[5]]


async def test_jobs_of_a_step_that_breaks_do_not_hang(hold: Hold, scene: MakeScene) -> None:
    """D3: the one that was taken in before ends; the one that could not be is given again."""
    one, other = hold(max_tokens=9), hold(max_tokens=9, job_id="k")
    async with scene(one.claimed, other.claimed) as at:
        await at.engine.heard(Submit, 2)
        end = Finished(query_id=one.query_id(), finish_reason=FinishReason.LENGTH, usage=USAGE)
        with pytest.raises(IndexError):
            await at.say(end, Tokens(query_id=other.query_id(7), first_index=0, token_ids=[4], text="x"))
        last = await at.last()
        assert (last.job_id, last.state) == ("j", JobState.SUCCEEDED)
        async with asyncio.timeout(10):
            await at.dispatcher._jobs.empty.wait()
