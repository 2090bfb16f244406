"""Bad input gets a clear status with details, and nothing is lost."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest

from batond.clients import Chunk, Client, JobState
from batond.clients.errors import InvalidRequestError, NotFoundError, RequestError, UnauthenticatedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.bench.local_daemon import LocalDaemon
    from batond.clients import JobStream

pytestmark = [pytest.mark.redis]

STRUCTURED = importlib.util.find_spec("xgrammar") is not None
BAD: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": [1, 2], "max_tokens": 0}, "max_tokens"),
    ({"token_ids": [1, 2], "temperature": float("nan")}, "temperature"),
    ({"token_ids": [1, 2], "temperature": -1.0}, "temperature"),
    ({"token_ids": [1, 2], "top_p": 0.0}, "top_p"),
    ({"token_ids": [1, 2], "top_p": 1.1}, "top_p"),
    ({"token_ids": [999_999]}, "token"),
    ({"prompt": ""}, "prompt"),
    ({"token_ids": [1], "max_tokens": 4096}, "4096"),
    ({"token_ids": [1], "sla_class": "gold"}, "gold"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "role"),
    ({"token_ids": [1, 2], "stop": [""]}, "stop"),
    ({"token_ids": [1, 2], "logprobs": 21}, "logprobs"),
    ({"token_ids": [1, 2], "prompt_logprobs": -1}, "prompt_logprobs"),
    # Without the extra `structured` each is refused for that.
    ({"token_ids": [1, 2], "regex": "(a"}, "regex" if STRUCTURED else "structured output"),
    ({"token_ids": [1, 2], "grammar": "root ::= missing"}, "grammar" if STRUCTURED else "structured output"),
    (
        {"token_ids": [1, 2], "json_schema": '{"type": "nope"}'},
        "json_schema" if STRUCTURED else "structured output",
    ),
]


def test_bad_requests_between_good_jobs(daemon: LocalDaemon) -> None:
    """Q1: the same clean answer every time; all good jobs finish."""
    with daemon.client("red") as red:
        good, answers = [], {}
        for turn in range(5):
            good.append(red.submit(token_ids=[5, 6, turn], max_tokens=60, ignore_eos=True))
            for place, (fields, word) in enumerate(BAD):
                arguments = dict(fields)
                with pytest.raises(RequestError) as caught:
                    red.submit(arguments.pop("prompt", None), **{"max_tokens": 5, **arguments})
                assert isinstance(caught.value, InvalidRequestError), fields
                assert word in str(caught.value), fields
                assert answers.setdefault(place, str(caught.value)) == str(caught.value)
        assert all(red.result(job.job_id).output_tokens == 60 for job in good)


def test_an_unknown_model_is_named(daemon: LocalDaemon) -> None:
    with daemon.client("red") as red, pytest.raises(RequestError, match="tiny"):
        red.submit(token_ids=[1], model="huge")


def test_a_giant_message_gets_a_status(daemon: LocalDaemon) -> None:
    """C6: never a bare transport error."""
    with daemon.client("red") as red:
        with pytest.raises(RequestError):
            red.submit("x" * (5 << 20), max_tokens=1)
        assert red.result(red.submit(token_ids=[1], max_tokens=1).job_id).state is JobState.SUCCEEDED


def test_another_tenants_job_does_not_exist(daemon: LocalDaemon) -> None:
    """V4: NOT_FOUND, whatever is tried with it."""
    with daemon.client("red") as red, daemon.client("blue") as blue:
        job = red.submit(token_ids=[1, 2, 3], max_tokens=200, ignore_eos=True, job_id="shared-name")
        for call in (blue.get, blue.cancel, lambda name: next(iter(blue.watch(name)))):
            with pytest.raises(NotFoundError):
                call(job.job_id)
        own = blue.submit(token_ids=[9], max_tokens=3, ignore_eos=True, job_id="shared-name")
        assert blue.result(own.job_id).output_tokens == 3
        assert red.result(job.job_id).output_tokens == 200
        assert [listed.job_id for listed in blue.list()].count("shared-name") == 1


def test_credentials_are_demanded(daemon: LocalDaemon) -> None:
    for token in (None, "wrong"):
        with Client(f"unix:{daemon.socket}", token=token) as nobody, pytest.raises(UnauthenticatedError):
            nobody.submit(token_ids=[1])


def test_chat_goes_through_the_models_template(daemon: LocalDaemon) -> None:
    with daemon.client("red") as red:
        chat = [{"role": "user", "content": "héllo 😀"}]
        said = red.result(red.submit(messages=chat, max_tokens=8, ignore_eos=True).job_id)
        text = red.result(red.submit("<user>héllo 😀\n<assistant>", max_tokens=8, ignore_eos=True).job_id)
        assert said.output_token_ids == text.output_token_ids
        assert said.prompt_tokens == len("<user>héllo 😀\n<assistant>".encode())


def test_closed_streams_cancel_exactly_their_jobs(
    start_daemon: Callable[..., LocalDaemon], after_tokens: Callable[[JobStream, int], None]
) -> None:
    """C2: of 20 attached streams waiting behind one row, 10 are closed: exactly 10 are prefilled."""
    daemon = start_daemon(engine={"rows": 1, "ready_limit": 0})
    daemon.wait_ready()
    with daemon.client("red") as red, daemon.operator() as operator:
        blocker = red.generate(token_ids=[1, 2], max_tokens=4000, ignore_eos=True, sla_class="interactive")
        after_tokens(blocker, 1)
        streams = [
            red.generate(token_ids=[3, 4, 5, place], max_tokens=3, ignore_eos=True, sla_class="batch")
            for place in range(20)
        ]
        for stream in streams:
            next(stream)  # Accepted.
        for stream in streams[::2]:
            stream.close()
        for stream in streams[::2]:
            assert red.wait(stream.job_id).state is JobState.CANCELLED
        red.cancel(blocker.job_id)
        assert red.wait(blocker.job_id).state is JobState.CANCELLED
        for stream in streams[1::2]:
            assert stream.last_job().output_tokens == 3
        snapshots = operator.watch_batch()
        snapshot = next(shot for shot in snapshots if shot.counters.get("queries_finished", 0) >= 10)
    assert snapshot.counters["prefill_tokens"] == 2 + 10 * 4


def test_a_submitted_job_goes_on_without_its_watcher(
    daemon: LocalDaemon, after_tokens: Callable[[JobStream, int], None]
) -> None:
    """C2: detaching is not cancelling; reattaching at the index misses nothing."""
    with daemon.client("red") as red:
        job = red.submit(token_ids=[7, 8], max_tokens=400, ignore_eos=True)
        with red.watch(job.job_id) as stream:
            after_tokens(stream, 5)
            seen = stream.next_token_index
        rest = [event for event in red.watch(job.job_id, from_token_index=seen) if isinstance(event, Chunk)]
        whole = red.result(job.job_id)
    assert rest[0].first_token_index == seen
    assert [token for chunk in rest for token in chunk.token_ids] == list(whole.output_token_ids[seen:])
