"""What a waiting job says of itself, on the real daemon: its place, and when it will start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from batond.clients import JobState, Queued, Started

if TYPE_CHECKING:
    from batond.bench.local_daemon import LocalDaemon

pytestmark = [pytest.mark.redis]


def test_a_waiting_job_says_where_it_stands_and_when_it_starts(daemon: LocalDaemon) -> None:
    """Two rows and two claimed ahead: behind these the others wait, and hear more as rows come free."""
    with daemon.client("red") as client:
        jobs = [
            client.submit(token_ids=[3, 4, place], max_tokens=150, ignore_eos=True, sla_class="batch")
            for place in range(14)
        ]
        last = client.get(jobs[-1].job_id)
        with client.watch(jobs[-1].job_id) as stream:
            events = list(stream)
        listed = {job.job_id: job for job in client.list()}
    assert last.state is JobState.QUEUED
    assert last.queue_position > 1
    places = [event for event in events if isinstance(event, Queued)]
    assert [event.position for event in places] == sorted((event.position for event in places), reverse=True)
    assert places[-1].position < places[0].position
    known = [event.estimated_start_time for event in places if event.estimated_start_time is not None]
    assert known, "after some claims the pace is known"
    (started,) = [event for event in events if isinstance(event, Started)]
    assert started.queue_time_s > 0
    ended = listed[jobs[-1].job_id]
    assert (ended.queue_position, ended.estimated_start_time) == (0, None)
    assert ended.started_time is not None
    assert ended.created_time is not None
    assert all(start > ended.created_time for start in known)
