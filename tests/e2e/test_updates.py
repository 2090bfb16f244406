"""UpdateJob of jobs that run, through every process of the daemon."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

import pytest

from batond.clients import JobState, Preempted, errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.bench.local_daemon import LocalDaemon
    from batond.clients import JobStream

    Solo = Callable[[list[int], int], list[int]]
    AfterTokens = Callable[[JobStream, int], None]

pytestmark = [pytest.mark.redis]


def test_a_lowered_running_job_makes_room_for_its_former_equals(
    daemon: LocalDaemon, solo: Solo, after_tokens: AfterTokens
) -> None:
    with daemon.client("red") as client:
        jobs = [
            client.submit(token_ids=[3, 4, place], max_tokens=400, ignore_eos=True, sla_class="standard")
            for place in range(2)
        ]
        streams = [client.watch(job.job_id) for job in jobs]
        for stream in streams:
            after_tokens(stream, 20)
        lowered = client.update(jobs[1].job_id, sla_class="batch")
        equal = client.submit(token_ids=[9], max_tokens=40, ignore_eos=True, sla_class="standard")
        assert client.result(equal.job_id).preemptions == 0
        parks = [[event for event in stream if isinstance(event, Preempted)] for stream in streams]
        done = [client.result(job.job_id) for job in jobs]
        with pytest.raises(errors.WrongStateError, match="has not ended"):
            client.update(jobs[1].job_id, sla_class="batch")
    assert (lowered.state, lowered.effective_sla_class) == (JobState.RUNNING, "batch")
    assert [len(events) for events in parks] == [0, 1]
    assert [job.effective_sla_class for job in done] == ["standard", "batch"]
    assert [list(job.output_token_ids) for job in done] == [solo([3, 4, place], 400) for place in range(2)]


def test_a_running_job_keeps_to_its_new_deadline(daemon: LocalDaemon, after_tokens: AfterTokens) -> None:
    with daemon.client("red") as client:
        job = client.submit(token_ids=[3], max_tokens=4000, ignore_eos=True, sla_class="batch")
        with client.watch(job.job_id) as stream:
            after_tokens(stream, 10)
            soon = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=1)
            assert client.update(job.job_id, deadline=soon).deadline is not None
            ended = stream.last_job()
    assert (ended.state, ended.error_reason) == (JobState.FAILED, "DEADLINE_EXCEEDED")
    assert ended.output_tokens >= 10
