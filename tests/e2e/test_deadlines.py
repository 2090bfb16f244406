"""Deadlines of running jobs, on the real daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from batond.clients import JobFailedError, JobState

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.bench.local_daemon import LocalDaemon

pytestmark = [pytest.mark.redis]


def test_a_running_job_ends_at_its_deadline_with_its_tokens(
    daemon: LocalDaemon, solo: Callable[[list[int], int], list[int]]
) -> None:
    """DEADLINE_EXCEEDED in the middle of the output: what there is, is kept and the row is free."""
    with daemon.client("red") as red:
        red.result(red.submit(token_ids=[1, 2], max_tokens=1).job_id)  # It is warm.
        job = red.submit(token_ids=[5, 6, 7], max_tokens=4000, ignore_eos=True, time_limit_s=2.0)
        with pytest.raises(JobFailedError) as caught:
            red.result(job.job_id)
        assert caught.value.reason == "DEADLINE_EXCEEDED"
        ended = red.get(job.job_id)
        assert ended.state is JobState.FAILED
        assert 0 < ended.output_tokens < 4000
        assert list(ended.output_token_ids)[:20] == solo([5, 6, 7], 20)[: ended.output_tokens]
        assert len(ended.output_token_ids) == ended.output_tokens
        assert red.result(red.submit(token_ids=[1, 2], max_tokens=3).job_id).output_tokens == 3
