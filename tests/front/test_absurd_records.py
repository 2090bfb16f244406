"""Records whose numbers no answer has room for: written by hand, they are shown as far as that goes (D13)."""

from __future__ import annotations

import msgspec
import pytest

from batond.daemon.front import convert
from batond.daemon.queue import Chunk, JobRecord, JobState

MOST = 1 << 53


@pytest.mark.parametrize("state", list(JobState))
def test_absurd_numbers_are_shown_as_far_as_there_is_room(state: JobState) -> None:
    record = JobRecord(
        tenant="t",
        job_id="j",
        model="m",
        sla_class="standard",
        state=state,
        body_hash="h",
        arrival_us=1,
        epoch=MOST,
        output_tokens=MOST,
        prompt_tokens=MOST,
        preemptions=MOST,
        recomputed_tokens=MOST,
        cached_prompt_tokens=MOST,
        ttl_ms=MOST,
        created_ms=MOST,
        started_ms=MOST,
        finished_ms=MOST,
        deadline_ms=MOST,
    )
    chunks = [Chunk(first_index=0, token_ids=[1], choice=5), Chunk(first_index=0, token_ids=[2], text="b")]
    shown = convert.job(record, chunks, now_ms=2.0 * MOST)
    assert shown.attempts == shown.prompt_tokens == (1 << 32) - 1
    assert shown.created_time.ToDatetime().year == 9999
    assert list(shown.output_token_ids) == [2]
    returned = msgspec.structs.replace(record, epoch=1, handed_back=MOST)
    assert convert.job(returned, chunks, now_ms=0.0).attempts == 0


def test_a_start_in_the_far_future_counts_as_no_time_waited() -> None:
    assert convert.duration(1e300).seconds < 1 << 40
    assert not list(convert.token_logprobs([1], [None, None]))
