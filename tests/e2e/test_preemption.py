"""Submit, preempt, park in host RAM, resume, finish: through every process of the daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from batond.clients import Chunk, JobState, Preempted, Resumed, Started
from batond.daemon.wire.messages import ParkCause, RowReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.bench.local_daemon import LocalDaemon
    from batond.clients import Event, JobStream

    Solo = Callable[[list[int], int], list[int]]
    AfterTokens = Callable[[JobStream, int], None]

pytestmark = [pytest.mark.redis]
LOW = {"sla_class": "batch", "ignore_eos": True}


def prompt(length: int, stride: int = 7) -> list[int]:
    return [(3 + stride * place) % 250 for place in range(length)]


def test_an_urgent_job_gets_in_and_nobody_loses_a_token(
    daemon: LocalDaemon, solo: Solo, after_tokens: AfterTokens
) -> None:
    """S1, R2: all rows hold long low jobs; exactly one is parked, all finish with their solo tokens."""
    with daemon.client("red") as red, daemon.client("blue") as blue:
        low = [
            red.submit(token_ids=prompt(9), max_tokens=300, **LOW),
            blue.submit(token_ids=prompt(14, 11), max_tokens=300, **LOW),
        ]
        for client, job in zip((red, blue), low, strict=True):
            after_tokens(client.watch(job.job_id), 40)
        urgent = red.submit(token_ids=prompt(20, 5), sla_class="interactive", max_tokens=20, ignore_eos=True)
        answered = red.result(urgent.job_id)
        still = [red.get(low[0].job_id).state, blue.get(low[1].job_id).state]
        done = [red.result(low[0].job_id), blue.result(low[1].job_id)]
    assert list(answered.output_token_ids) == solo(prompt(20, 5), 20)
    assert answered.preemptions == 0
    assert JobState.SUCCEEDED not in still, "the urgent job must not have waited for a row"
    assert sorted(job.preemptions for job in done) == [0, 1]
    assert [job.recomputed_tokens for job in done] == [0, 0]
    assert list(done[0].output_token_ids) == solo(prompt(9), 300)
    assert list(done[1].output_token_ids) == solo(prompt(14, 11), 300)


def test_a_stream_with_parks_joins_to_the_unary_result(
    daemon: LocalDaemon, solo: Solo, after_tokens: AfterTokens
) -> None:
    """R7: chunks carry their first token index; text and tokens join to what GetJob says."""
    events, park_at = [], [30, 60]  # Or soon after: a chunk may have several tokens.
    with daemon.client("red") as red, daemon.operator() as operator:
        job = red.submit(token_ids=prompt(12), max_tokens=400, **LOW)
        with red.watch(job.job_id) as stream:
            for event in stream:
                events.append(event)
                if isinstance(event, Chunk) and park_at and event.first_token_index >= park_at[0]:
                    del park_at[0]
                    operator.park(job.job_id, tenant="red")
                    operator.resume(job.job_id, tenant="red")
        whole = red.result(job.job_id)
    chunks = [event for event in events if isinstance(event, Chunk)]
    next_index = 0
    for chunk in chunks:
        assert chunk.first_token_index == next_index
        next_index += len(chunk.token_ids)
    assert [token for chunk in chunks for token in chunk.token_ids] == list(whole.output_token_ids)
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert list(whole.output_token_ids) == solo(prompt(12), 400)
    assert whole.preemptions == 2
    assert sum(isinstance(event, Preempted) for event in events) == 2
    assert sum(isinstance(event, Resumed) for event in events) == 2


def test_events_say_why(daemon: LocalDaemon, after_tokens: AfterTokens) -> None:
    """S11: who is parked for somebody, and who gets in for somebody, hears the planner's reason."""
    with daemon.client("red") as red, daemon.client("blue") as blue, daemon.operator() as operator:
        low = [red.submit(token_ids=prompt(9 + place), max_tokens=300, **LOW) for place in range(2)]
        events: list[Event] = []
        streams = [red.watch(job.job_id) for job in low]
        for stream in streams:
            while stream.next_token_index < 40:
                events.append(next(stream))
        urgent = blue.submit(token_ids=prompt(20, 5), sla_class="interactive", max_tokens=80, ignore_eos=True)
        with blue.watch(urgent.job_id) as stream:
            urgent_events = list(stream)
        for stream in streams:
            events += stream
        by_hand = red.submit(token_ids=prompt(12), max_tokens=300, **LOW)
        with red.watch(by_hand.job_id) as stream:
            after_tokens(stream, 20)
            operator.park(by_hand.job_id, tenant="red")
            operator.resume(by_hand.job_id, tenant="red")
            held = list(stream)
    taken = [event.reason for event in urgent_events if isinstance(event, Started)]
    assert taken == [RowReason.ROW_TAKEN]
    assert [event.reason for event in events if isinstance(event, Started)] == [RowReason.ROW_FREE] * 2
    assert [event.reason for event in events if isinstance(event, Preempted)] == [ParkCause.ROW]
    assert [event.reason for event in events if isinstance(event, Resumed)] == [RowReason.ROW_FREE]
    assert [event.reason for event in held if isinstance(event, Preempted)] == [ParkCause.MANUAL]
    assert [event.reason for event in held if isinstance(event, Resumed)] == [RowReason.ROW_FREE]


def test_a_job_held_by_hand_waits_for_its_resume(
    daemon: LocalDaemon, solo: Solo, after_tokens: AfterTokens
) -> None:
    with daemon.client("red") as red, daemon.operator() as operator:
        job = red.submit(token_ids=prompt(12), max_tokens=300, **LOW)
        with red.watch(job.job_id) as stream:
            after_tokens(stream, 20)
            assert operator.park(job.job_id, tenant="red").state is JobState.PARKED
            other = red.result(red.submit(token_ids=prompt(3), max_tokens=50, **LOW).job_id)
            assert other.output_tokens == 50
            assert red.get(job.job_id).state is JobState.PARKED
            assert operator.resume(job.job_id, tenant="red").state is not JobState.PARKED
            assert stream.last_job().state is JobState.SUCCEEDED
        assert list(red.get(job.job_id).output_token_ids) == solo(prompt(12), 300)
