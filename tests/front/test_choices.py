"""Jobs of several choices: one query each, one job in all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from google.rpc import code_pb2

from batond.daemon.errors import ExhaustedError
from batond.daemon.front import convert
from batond.daemon.front.follow import _Cursor
from batond.daemon.front.held import ref_of
from batond.daemon.front.hub import CameBack, GotRow, LostRow
from batond.daemon.front.status import code_of_reason
from batond.daemon.front.steps import choice_of
from batond.daemon.queue import Chunk, CommittedChoice, JobState
from batond.daemon.requests.params import sequence_seed
from batond.daemon.wire.messages import (
    Finished,
    FinishReason,
    Preempted,
    QueryFailed,
    Resumed,
    Started,
    TokenLogprobs,
    Tokens,
    Usage,
)
from batond.v1 import types_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.front.held import HeldJob

    Hold = Callable[..., HeldJob]

ONE = TokenLogprobs(logprob=-0.5, top=[])


def usage(**more: Any) -> Usage:
    given = {
        "prompt_tokens": 2,
        "output_tokens": 1,
        "parks": 0,
        "recomputed_tokens": 0,
        "waited_s": 0.0,
        "parked_s": 0.0,
    }
    return Usage(**given | more)


def tokens(held: HeldJob, choice: int, first: int, *ids: int) -> Tokens:
    return Tokens(query_id=held.query_id(choice), first_index=first, token_ids=list(ids), text="x" * len(ids))


def finished(held: HeldJob, choice: int, reason: str = "length", **more: Any) -> Finished:
    return Finished(query_id=held.query_id(choice), finish_reason=FinishReason(reason), usage=usage(**more))


def test_each_choice_is_a_query_with_a_seed_of_its_own(hold: Hold) -> None:
    held = hold(n=3, temperature=1.0, logprobs=1, prompt_logprobs=0)
    commands = held.submits(2.0)
    assert [command.seed for command in commands] == [7, sequence_seed(7, 1), sequence_seed(7, 2)]
    assert [command.sampling.n for command in commands] == [1, 1, 1]
    assert [command.sampling.prompt_logprobs for command in commands] == [0, None, None]
    assert [choice_of(command.query_id) for command in commands] == [0, 1, 2]
    assert {ref_of(command.query_id) for command in commands} == {held.ref}
    assert len({command.query_id for command in commands}) == 3


def test_a_former_claims_late_tokens_do_not_count(hold: Hold) -> None:
    """D2."""
    now, before = hold(n=2, epoch=12), hold(n=2, epoch=1)
    assert [now.runs(query_id) for query_id in now.query_ids] == [True, True]
    assert not any(now.runs(query_id) for query_id in before.query_ids)
    now.ended = True
    assert not any(now.runs(query_id) for query_id in now.query_ids)


def test_the_first_choice_is_the_job_of_one(hold: Hold) -> None:
    """What n adds changes nothing of what is there without it."""
    assert hold(n=4, temperature=1.0).submits(0.0)[0] == hold(temperature=1.0).submits(0.0)[0]


def test_seeds_stay_the_same_in_all_releases() -> None:
    """The contract promises it; these numbers were written down when it was made."""
    assert [sequence_seed(7, index) for index in range(3)] == SEEDS
    assert sequence_seed((1 << 64) - 1, 0) == (1 << 64) - 1


SEEDS = [7, 3595544800446187243, 154844686297477902]


def test_the_job_ends_with_its_last_choice(hold: Hold) -> None:
    held = hold(n=2)
    first = held.digest([tokens(held, 0, 0, 1), tokens(held, 1, 0, 2), finished(held, 1, "stop")])
    assert (first.commit.state, first.usage) == (JobState.RUNNING, None)
    assert first.commit.chunks == (
        Chunk(first_index=0, token_ids=[1], text="x"),
        Chunk(first_index=0, token_ids=[2], text="x", choice=1, finish_reason="stop"),
    )
    assert held.query_ids == [held.query_id(0)]
    last = held.digest([tokens(held, 0, 1, 3), finished(held, 0, recomputed_tokens=4)])
    assert (last.commit.state, last.commit.finish_reason) == (JobState.SUCCEEDED, "length")
    assert last.usage is not None
    assert (last.usage.output_tokens, last.usage.prompt_tokens) == (3, 2)
    assert last.commit.recomputed_tokens == 4
    assert held.ended


def test_a_cancel_of_the_rest_cancels_the_job(hold: Hold) -> None:
    """C1."""
    held = hold(n=2)
    held.digest([finished(held, 0, "length")])
    step = held.digest([finished(held, 1, "cancelled")])
    assert (step.commit.state, step.commit.finish_reason) == (JobState.CANCELLED, "cancelled")


def test_one_failure_fails_the_job(hold: Hold) -> None:
    held = hold(n=3)
    failed = QueryFailed(query_id=held.query_id(1), reason="INTERNAL", message="broken", usage=usage())
    step = held.digest([failed])
    assert (step.commit.state, step.commit.error_reason) == (JobState.FAILED, "INTERNAL")
    assert held.ended
    assert held.query_ids == [held.query_id(0), held.query_id(2)], "these are to be stopped"


def test_a_job_without_memory_ends_failed_with_a_code_that_says_so(hold: Hold) -> None:
    """M6: its own end, not the engine's: nobody becomes a suspect, and it is not tried again by itself."""
    held = hold(n=1)
    message = "out of memory after 3 tokens of output: shorten the prompt"
    failed = QueryFailed(
        query_id=held.query_id(0), reason=ExhaustedError.reason, message=message, usage=usage()
    )
    commit = held.digest([failed]).commit
    assert (commit.state, commit.error_reason, commit.error_message) == (
        JobState.FAILED,
        "RESOURCE_EXHAUSTED",
        message,
    )
    assert code_of_reason(commit.error_reason) == code_pb2.RESOURCE_EXHAUSTED
    assert held.ended


def test_a_job_is_parked_when_all_its_choices_are(hold: Hold) -> None:
    held = hold(n=2)

    def lost(choice: int) -> Preempted:
        return Preempted(query_id=held.query_id(choice), cause="row", kept=True, parked_bytes=1)

    begun = held.digest(
        [
            Started(query_id=held.query_id(0), row=0, reason="row_taken"),
            Started(query_id=held.query_id(1), row=1, reason="row_free"),
        ]
    )
    assert begun.events == [GotRow("row_taken")], "the job starts once"
    assert held.digest([lost(1)]).commit.state is JobState.RUNNING
    step = held.digest([lost(0)])
    assert step.commit.state is JobState.PARKED
    assert step.events == [LostRow("row", kept=True)]
    back = held.digest([Resumed(query_id=held.query_id(1), row=0, reason="row_free")])
    assert (back.commit.state, back.events) == (JobState.RUNNING, [CameBack(1, "row_free")])
    assert held.digest([finished(held, 1)]).commit.state is None
    assert back.commit.preemptions == 2


def test_a_recovered_job_goes_on_with_what_has_not_ended(hold: Hold) -> None:
    """D3: per choice, after its own tokens."""
    held = hold(
        n=3,
        committed=[
            CommittedChoice(token_ids=[1, 2]),
            CommittedChoice(token_ids=[3], text="y", finish_reason="stop"),
        ],
    )
    commands = held.submits(0.0)
    assert [(choice_of(one.query_id), one.emitted_token_ids) for one in commands] == [(0, [1, 2]), (2, [])]
    step = held.digest([tokens(held, 0, 2, 9), finished(held, 0), finished(held, 2)])
    assert step.commit.chunks == (
        Chunk(first_index=2, token_ids=[9], text="x", finish_reason="length"),
        Chunk(first_index=0, token_ids=[], choice=2, finish_reason="length"),
    )
    assert step.commit.state is JobState.SUCCEEDED
    assert step.usage is not None
    assert step.usage.output_tokens == 4


def test_a_watcher_has_a_place_in_each_choice() -> None:
    """R7: one index for all, or one for each."""
    cursor = _Cursor(2, {1: 5})
    assert [cursor.next_index(choice) for choice in range(3)] == [2, 5, 2]
    assert cursor.misses((2, 6, 0))
    assert not cursor.misses((2, 5, 2))
    one = Chunk(first_index=0, token_ids=[1, 2, 3], text="abc", choice=2, logprobs=[ONE] * 3)
    assert cursor.take(one) == Chunk(first_index=2, token_ids=[3], text="abc", choice=2, logprobs=[ONE])
    assert cursor.take(one) is None
    flush = Chunk(first_index=3, token_ids=[], text="!", choice=2)
    end = Chunk(first_index=3, token_ids=[], choice=2, finish_reason="stop")
    assert cursor.take(flush) is flush
    assert cursor.take(end) is end
    assert cursor.take(flush) is None
    assert cursor.take(end) is None
    assert cursor.next_index(0) == 2, "the others stay where they are"


@pytest.mark.parametrize("choices", [1, 2])
def test_the_job_shows_its_choices_if_there_are_several(hold: Hold, choices: int) -> None:
    record = hold().claimed.record
    record = type(record)(
        **{name: getattr(record, name) for name in record.__struct_fields__}
        | {"choices": choices, "output_tokens": 2, "choice_tokens": {1: 1} if choices == 2 else {}}
    )
    chunks = [
        Chunk(first_index=0, token_ids=[1], text="a"),
        Chunk(first_index=1, token_ids=[2], text="b"),
        Chunk(first_index=0, token_ids=[3], text="c", choice=1, logprobs=[ONE], finish_reason="stop"),
    ][: choices + 1]
    shown = convert.job(record, chunks, now_ms=0.0)
    assert (list(shown.output_token_ids), shown.text) == ([1, 2], "ab")
    assert shown.output_tokens == 1 + choices
    if choices == 1:
        assert not shown.choices
        return
    first, second = shown.choices
    assert (first.index, list(first.token_ids), first.text, first.finish_reason) == (0, [1, 2], "ab", 0)
    assert (second.index, list(second.token_ids), second.text) == (1, [3], "c")
    assert second.finish_reason == types_pb2.FINISH_REASON_STOP
    assert second.logprobs[0].token_id == 3


def test_a_job_that_fails_keeps_what_its_choices_did(hold: Hold) -> None:
    """The engine died too often: ended choices keep their end, and nothing is counted twice."""
    held = hold(n=2)
    held.digest([tokens(held, 0, 0, 1), finished(held, 0, "stop", recomputed_tokens=5)])
    step = held.fail("the engine died")
    assert (step.commit.state, step.commit.error_message) == (JobState.FAILED, "the engine died")
    assert step.commit.recomputed_tokens == 5
    assert [choice.finish_reason for choice in held.choices] == ["stop", "error"]
    assert held.ended
