"""Jobs of several choices: an output of its own each, one end, nothing left behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from batond.daemon.errors import InvalidRequestError
from batond.daemon.queue import Chunk, JobSpec, JobState, StepCommit
from batond.daemon.queue.keys import Keys, job_ref
from batond.daemon.requests.params import SamplingParams

if TYPE_CHECKING:
    from conftest import Queue

    from batond.daemon.queue import ClaimedJob

N = 3
SPEC = msgspec.json.encode(JobSpec(prompt_token_ids=[1], sampling=SamplingParams(n=N), seed=7))


async def submit(queue: Queue, job_id: str = "a", *, choices: int = N) -> None:
    await queue.submit(job_id, spec_json=SPEC, choices=choices)


def chunk(choice: int, first: int, *tokens: int, **more: Any) -> Chunk:
    return Chunk(first_index=first, token_ids=list(tokens), text="x" * len(tokens), choice=choice, **more)


def step(job: ClaimedJob, *chunks: Chunk, **more: Any) -> StepCommit:
    record = job.record
    return StepCommit(tenant=record.tenant, job_id=record.job_id, epoch=record.epoch, chunks=chunks, **more)


async def read(queue: Queue, choice: int, start: int = 0) -> list[Chunk]:
    return await queue.store.read_chunks("t", "a", start, choice=choice)


async def test_choices_grow_apart_and_are_claimed_again_as_they_stand(queue: Queue) -> None:
    """D3: tokens, text and end of each."""
    await submit(queue)
    job = await queue.claim_one()
    assert [one.token_ids for one in job.choices] == [[], [], []]
    assert await queue.commit(step(job, chunk(0, 0, 5), chunk(2, 0, 6, 7))) == []
    assert await queue.commit(step(job, chunk(2, 2, 8, finish_reason="stop"))) == []
    record = await queue.store.get("t", "a")
    assert (record.output_tokens, record.choice_tokens, record.total_output_tokens) == (1, {2: 3}, 4)
    assert record.state is JobState.RUNNING
    assert [one.first_index for one in await read(queue, 2, 1)] == [0, 2]
    await queue.store.hand_back("d1", "t", "a", job.record.epoch)
    again = await queue.claim_one(owner="d2")
    assert [(one.token_ids, one.text, one.finish_reason) for one in again.choices] == [
        ([5], "x", ""),
        ([], "", ""),
        ([6, 7, 8], "xxx", "stop"),
    ]


async def test_a_step_may_be_sent_again(queue: Queue) -> None:
    """R7, D3: also one that ends a choice without a token, after text that was flushed at the same place."""
    await submit(queue)
    job = await queue.claim_one()
    steps = [
        step(job, chunk(0, 0, 5), chunk(1, 0, 6)),
        step(job, Chunk(first_index=1, token_ids=[], text="!", choice=1)),
        step(job, chunk(1, 1, finish_reason="stop")),
        step(job, chunk(0, 1, 9, finish_reason="length"), chunk(2, 0, finish_reason="length")),
    ]
    for one in steps:
        for _ in range(2):
            assert await queue.commit(one) == []
    assert [(one.text, one.finish_reason) for one in await read(queue, 1)] == [
        ("x", ""),
        ("!", ""),
        ("", "stop"),
    ]
    assert [one.token_ids for one in await read(queue, 0)] == [[5], [9]]
    last = step(job, state=JobState.SUCCEEDED, finish_reason="length")
    assert await queue.commit(last) == await queue.commit(last) == []


async def test_all_chunks_of_a_step_go_in_or_none(queue: Queue) -> None:
    await submit(queue)
    job = await queue.claim_one()
    gap = step(job, chunk(0, 0, 5), chunk(1, 4, 6), state=JobState.SUCCEEDED)
    assert await queue.commit(gap) == ["gap"]
    assert await read(queue, 0) == []
    assert (await queue.store.get("t", "a")).state is JobState.CLAIMED
    assert await queue.commit(step(job, chunk(0, 0, 5, 6))) == []
    assert await queue.commit(step(job, chunk(1, 0, 5), chunk(0, 1, 6, 7))) == ["overlap"]
    assert await read(queue, 1) == []


async def test_nothing_stays_behind(queue: Queue) -> None:
    """D10: every output goes with its job, and none has a name that another job's could have."""
    keys = Keys("m")
    await submit(queue)
    job = await queue.claim_one()
    await queue.commit(step(job, *(chunk(choice, 0, 5) for choice in range(N)), state=JobState.SUCCEEDED))
    outs = [keys.out(job_ref("t", "a"), choice) for choice in range(N)]
    assert [await queue.client.pttl(out) > 0 for out in outs] == [True] * N
    assert keys.out(job_ref("t", "a"), 1) != keys.out(job_ref("t", "a#1"))
    await queue.client.zadd(keys.expiring, {"t/a": 1})
    await queue.client.hset(keys.job("t/a"), "expires_ms", 1)
    await queue.store.reap()
    assert await queue.client.exists(keys.job("t/a"), keys.spec("t/a"), *outs) == 0


async def test_a_new_job_does_not_inherit_another_ones_output(queue: Queue) -> None:
    out = queue.store.keys.out(job_ref("t", "a"), 2)
    await queue.client.xadd(out, {"c": b"old"}, id="9-2")
    await submit(queue)
    assert await queue.client.exists(out) == 0


async def test_a_record_that_does_not_fit_its_spec_is_not_run(queue: Queue) -> None:
    """D13."""
    await submit(queue, choices=2)
    assert await queue.claim() == []
    assert (await queue.store.get("t", "a")).state is JobState.DEAD


async def test_all_choices_are_read_in_one_round_trip(queue: Queue) -> None:
    await submit(queue)
    job = await queue.claim_one()
    await queue.commit(step(job, chunk(0, 0, 1, 2), chunk(1, 0, 3)))
    await queue.commit(step(job, chunk(0, 2, 4), chunk(1, 1, 5)))
    trips: list[int] = []
    pipeline = queue.client.pipeline

    def counted(**options: Any) -> Any:
        trips.append(1)
        return pipeline(**options)

    queue.client.pipeline = counted  # type: ignore[method-assign]
    for starts in ([0, 0, 0], [2, 1, 0], [1, 9, 0]):
        trips.clear()
        outputs = await queue.store.read_choices("t", "a", starts)
        assert len(trips) == 1
        assert outputs == [await read(queue, choice, start) for choice, start in enumerate(starts)]
    assert [[one.token_ids for one in output] for output in outputs] == [[[1, 2], [4]], [], []]
    with pytest.raises(InvalidRequestError):
        await queue.store.read_choices("t", "a", [0, -1])
