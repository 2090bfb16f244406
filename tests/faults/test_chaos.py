"""The chaos soak in small, and that its tally would show what it is to find."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from batond.bench import chaos
from batond.bench.fake_engine import fake_tokens
from batond.bench.faults.crowd import Crowd, draw_jobs
from batond.bench.faults.work import Job, Watcher
from batond.clients import JobInfo, JobState
from batond.v1 import jobs_pb2, types_pb2

if TYPE_CHECKING:
    from pathlib import Path

JOB = Job("j", "red", (1, 2), 6, 3, "batch")


@pytest.mark.slow
@pytest.mark.redis
def test_nothing_is_lost_or_doubled_whatever_dies() -> None:
    """D1, D2, D3, D4, D6, D10: `python -m batond.bench chaos` for 10 s; `make soak` has 10 minutes of it."""
    options = chaos.Options(duration_s=10.0, jobs=40, daemons=2, lease_s=1.0, every_s=2.0, seed=1)
    said: list[str] = []
    tally = chaos.run(options, said.append)
    assert tally.passed, "\n".join(tally.lines())
    assert tally.figures["jobs finished"] == options.jobs
    assert sum(tally.figures.get(name, 0) for name in ("daemon killed", "engine killed", "Redis killed")) > 0


def test_the_same_seed_draws_the_same_jobs() -> None:
    one, other = (draw_jobs(random.Random(4), 50, ("red", "blue"), 30.0) for _ in range(2))
    assert one == other
    assert len({job.job_id for job in one}) == 50
    assert {job.tenant for job in one} == {"red", "blue"}


async def test_a_crowd_that_nobody_answers_gives_up(tmp_path: Path) -> None:
    nobody: Any = SimpleNamespace(socket=tmp_path / "nobody.sock", tokens={"red": "t"})
    crowd = Crowd([nobody], 0, patience_s=0.0)
    try:
        async with asyncio.timeout(60):
            with pytest.raises(
                TimeoutError, match=r"no answer to SubmitJob for j in 0 s; the last: .*UNAVAIL"
            ):
                await crowd.submit(JOB)
            with pytest.raises(TimeoutError, match="no answer to GetJob"):
                await crowd.get(JOB)
    finally:
        await crowd.close()
    assert not crowd.accepted


def event(first_index: int, *token_ids: int) -> jobs_pb2.WatchJobResponse:
    """A chunk as a daemon sends it."""
    chunk = types_pb2.TokenChunk(first_token_index=first_index, token_ids=token_ids)
    return jobs_pb2.WatchJobResponse(event=types_pb2.StreamEvent(chunk=chunk))


END = jobs_pb2.WatchJobResponse(event=types_pb2.StreamEvent(finished=types_pb2.Finished()))


@pytest.mark.parametrize(
    ("chunks", "doubled", "skipped"),
    [([(0, 3), (3, 6)], 0, 0), ([(0, 3), (2, 6)], 1, 0), ([(0, 3), (4, 6)], 0, 1)],
)
def test_a_watcher_counts_what_came_twice_and_what_was_skipped(
    chunks: list[tuple[int, int]], doubled: int, skipped: int
) -> None:
    tokens, watcher = fake_tokens(JOB.prompt, JOB.seed, JOB.max_tokens), Watcher(JOB)
    for start, stop in chunks:
        watcher.see(event(start, *tokens[start:stop]))
    watcher.see(END)
    assert (watcher.counts["doubled"], watcher.counts["skipped"]) == (doubled, skipped)
    assert bool(watcher.wrong()) == bool(doubled or skipped)


def test_a_stream_without_its_end_or_with_other_tokens_is_wrong() -> None:
    tokens = fake_tokens(JOB.prompt, JOB.seed, JOB.max_tokens)
    for seen, ended in ((tokens, False), (tokens[:-1], True), ([*tokens[:-1], 0], True)):
        watcher = Watcher(JOB)
        watcher.see(event(0, *seen))
        if ended:
            watcher.see(END)
        assert watcher.wrong()


def test_a_job_with_another_output_or_end_is_wrong() -> None:
    tokens = tuple(JOB.tokens)
    assert JOB.wrong(JobInfo(job_id="j", state=JobState.FAILED, output_token_ids=tokens))
    assert JOB.wrong(JobInfo(job_id="j", state=JobState.SUCCEEDED, output_token_ids=tokens[1:]))


def test_the_tally_fails_on_a_broken_promise_and_when_nothing_finished() -> None:
    assert chaos.Tally(figures={"jobs finished": 1.0}).passed
    assert not chaos.Tally(figures={"jobs finished": 1.0}, broken=["lost: j"]).passed
    assert not chaos.Tally().passed
    assert "BROKEN: lost: j" in chaos.Tally(broken=["lost: j"]).lines()
