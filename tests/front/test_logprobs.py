"""Log-probabilities from the engine's events to what is stored and streamed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batond.daemon.front import convert
from batond.daemon.front.follow import _Cursor
from batond.daemon.queue import Chunk
from batond.daemon.queue.records import decode_chunk, encode_chunk
from batond.daemon.wire.messages import TokenLogprobs, Tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.front.held import HeldJob

ONE = TokenLogprobs(logprob=-0.5, top=[(3, -0.5), (4, -1.25)])
TWO = TokenLogprobs(logprob=-2.0, top=[(9, -0.125), (4, -2.0)])


def tokens(held: HeldJob, first: int, *ids: int, **more: object) -> Tokens:
    return Tokens(query_id=held.query_id(), first_index=first, token_ids=list(ids), text="x", **more)  # type: ignore[arg-type]


def test_a_step_commits_them_with_their_tokens(hold: Callable[..., HeldJob]) -> None:
    held = hold(logprobs=2, prompt_logprobs=0)
    prompt = [None, TWO]
    step = held.digest(
        [
            tokens(held, 0, 3, logprobs=[ONE], prompt_logprobs=prompt),
            tokens(held, 1, 4, logprobs=[TWO]),
        ]
    )
    chunk = Chunk(first_index=0, token_ids=[3, 4], text="xx", logprobs=[ONE, TWO], prompt_logprobs=prompt)
    assert step.commit.chunks == (chunk,)
    assert step.events == [chunk], "watchers see what is committed"


def test_nothing_is_stored_for_a_job_that_did_not_ask(hold: Callable[..., HeldJob]) -> None:
    held = hold()
    (chunk,) = held.digest([tokens(held, 0, 3)]).commit.chunks
    stored = encode_chunk(chunk)
    assert b"logprobs" not in stored
    assert len(stored) < 40


def test_a_stored_chunk_is_read_as_it_was() -> None:
    """C4: every bit of a number survives, also of those that JSON would write at length."""
    prompt = [None, TokenLogprobs(logprob=-1 / 3, top=[])]
    chunk = Chunk(first_index=7, token_ids=[1], logprobs=[ONE], prompt_logprobs=prompt)
    assert decode_chunk(encode_chunk(chunk)) == chunk


def test_the_prompts_are_asked_of_the_first_engine_alone(hold: Callable[..., HeldJob]) -> None:
    """D3: they were committed with the first token; an engine that goes on must not send them again."""
    (first,) = hold(logprobs=1, prompt_logprobs=4).submits(0.0)
    assert first.sampling.prompt_logprobs == 4
    (later,) = hold(logprobs=1, prompt_logprobs=4, token_ids=(3, 4)).submits(0.0)
    assert later.sampling.prompt_logprobs is None
    assert later.sampling.logprobs == 1
    assert later.emitted_token_ids == [3, 4]


def test_a_watcher_that_begins_inside_a_chunk_gets_its_rest() -> None:
    """R7."""
    chunk = Chunk(first_index=4, token_ids=[3, 4], text="xy", logprobs=[ONE, TWO], prompt_logprobs=[None])
    assert _Cursor(4).take(chunk) == chunk
    assert _Cursor(5).take(chunk) == Chunk(first_index=5, token_ids=[4], text="xy", logprobs=[TWO])
    assert _Cursor(6).take(chunk) is None


def test_the_contract_names_each_token() -> None:
    chunk = Chunk(first_index=0, token_ids=[3], logprobs=[ONE], prompt_logprobs=[None, TWO])
    shown = convert.stream_event(chunk, 0, prompt_token_ids=[5, 6]).chunk
    (output,), (first, second) = shown.logprobs, shown.prompt_logprobs
    assert (output.token_id, output.logprob) == (3, -0.5)
    assert [(top.token_id, top.logprob) for top in output.top] == ONE.top
    assert (first.token_id, first.HasField("logprob")) == (5, False)
    assert (second.token_id, second.logprob) == (6, -2.0)


def test_the_session_goes_to_the_engine(hold: Callable[..., HeldJob]) -> None:
    assert [command.session_id for command in hold().submits(0.0)] == ["s"]
