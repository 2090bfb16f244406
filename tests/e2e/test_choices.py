"""Several choices of one prompt: reproducible, different, durable, one job."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from batond.clients import Chunk, FinishReason, JobState
from batond.clients.errors import InvalidRequestError
from batond.daemon.requests.params import sequence_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from batond.bench.local_daemon import LocalDaemon
    from batond.clients import Choice, Client, JobStream

pytestmark = [pytest.mark.redis]
ASKED: dict[str, Any] = {
    "token_ids": [3, 10, 17, 24],
    "ignore_eos": True,
    "temperature": 0.9,
    "seed": 5,
    "n": 3,
    "logprobs": 1,
}


def joined(events: Iterable[object]) -> dict[int, tuple[tuple[int, ...], str]]:
    """Tokens and text of each choice, as the chunks bring them; each must follow the one before."""
    tokens: defaultdict[int, tuple[int, ...]] = defaultdict(tuple)
    text: defaultdict[int, str] = defaultdict(str)
    for event in events:
        if isinstance(event, Chunk):
            assert event.first_token_index == len(tokens[event.choice])
            assert len(event.logprobs) == len(event.token_ids)
            tokens[event.choice] += event.token_ids
            text[event.choice] += event.text
    return {choice: (tokens[choice], text[choice]) for choice in sorted(tokens)}


def outputs(choices: Iterable[Choice]) -> dict[int, tuple[tuple[int, ...], str]]:
    return {one.index: (one.token_ids, one.text) for one in choices}


def kill_engine(daemon: LocalDaemon) -> None:
    for child in psutil.Process(daemon.process.pid).children(recursive=True):
        if "batond.daemon.engine.process" in " ".join(child.cmdline()):
            child.kill()


def alone(red: Client, **more: Any) -> tuple[int, ...]:
    return red.result(red.submit(**ASKED | {"n": 1} | more).job_id).output_token_ids


def test_choices_are_reproducible_and_differ(daemon: LocalDaemon) -> None:
    """R5: two rows for three choices; streamed = read, and each is what its own seed gives alone."""
    with daemon.client("red") as red:
        with red.generate(max_tokens=60, **ASKED) as stream:
            events = list(stream)
        job = red.get(stream.job_id)
        again = red.result(red.submit(max_tokens=60, **ASKED).job_id)
        seeds = [sequence_seed(5, index) for index in range(3)]
        solo = [alone(red, max_tokens=60, seed=seed) for seed in seeds]
    assert [one.token_ids for one in job.choices] == solo
    assert len(set(solo)) == 3
    assert outputs(again.choices) == outputs(job.choices) == joined(events)
    assert (job.output_token_ids, job.text) == (job.choices[0].token_ids, job.choices[0].text)
    assert (job.output_tokens, job.prompt_tokens) == (180, 4)
    ends = [event for event in events if isinstance(event, Chunk) and event.finish_reason != "unknown"]
    assert {end.choice: end.finish_reason for end in ends} == dict.fromkeys(range(3), FinishReason.LENGTH)
    assert [one.finish_reason for one in job.choices] == [FinishReason.LENGTH] * 3
    assert all(len(one.logprobs) == 60 for one in job.choices)


def test_the_engines_death_changes_no_choice(
    daemon: LocalDaemon, after_tokens: Callable[[JobStream, int], None]
) -> None:
    """D3: also where one choice has ended before and another has not begun."""
    with daemon.client("red") as red:
        undisturbed = red.result(red.submit(max_tokens=150, **ASKED).job_id)
        with red.generate(max_tokens=150, detached=True, **ASKED) as stream:
            events: list[object] = []
            for event in stream:
                events.append(event)
                if isinstance(event, Chunk) and event.finish_reason is not FinishReason.UNKNOWN:
                    break
            kill_engine(daemon)
            events += list(stream)
        job = red.get(stream.job_id)
    assert job.state is JobState.SUCCEEDED
    assert outputs(job.choices) == outputs(undisturbed.choices) == joined(events)


def test_a_watcher_comes_back_to_each_choice_where_it_left(
    daemon: LocalDaemon, after_tokens: Callable[[JobStream, int], None]
) -> None:
    """C4: live and from the past; one index holds for all, one each for where they differ."""
    with daemon.client("red") as red:
        job = red.submit(max_tokens=150, **ASKED)
        with red.watch(job.job_id) as stream:
            seen = []
            for event in stream:
                seen.append(event)
                if isinstance(event, Chunk) and event.choice == 1 and event.first_token_index == 40:
                    break
            places = stream.next_token_indexes
        live = list(red.watch(job.job_id, choice_from_token_indexes=places))
        whole = red.result(job.job_id)
        past = list(red.watch(job.job_id, choice_from_token_indexes=places))
        late = [event for event in red.watch(job.job_id, 145) if isinstance(event, Chunk)]
    assert joined([*seen, *live]) == joined([*seen, *past]) == outputs(whole.choices)
    for choice in range(3):
        tail = [event for event in late if event.choice == choice]
        assert tail[0].first_token_index == 145
        assert (
            tuple(token for event in tail for token in event.token_ids)
            == whole.choices[choice].token_ids[145:]
        )


def test_a_cancel_ends_all_choices(daemon: LocalDaemon) -> None:
    """C1: what was emitted is kept, and the rows are free."""
    with daemon.client("red") as red, daemon.operator() as operator:
        job = red.submit(max_tokens=1000, **ASKED)
        with red.watch(job.job_id) as stream:
            next(event for event in stream if isinstance(event, Chunk) and event.choice == 1)
            ended = red.cancel(job.job_id)
        assert ended.state is JobState.CANCELLED
        assert 0 < ended.output_tokens < 3000
        assert len(ended.choices) == 3
        idle = next(
            shot
            for shot in operator.watch_batch()
            if not any(row.job_id for row in shot.rows) and not shot.queries
        )
        assert idle.rows


def test_a_park_by_hand_holds_every_choice_that_runs(daemon: LocalDaemon) -> None:
    with daemon.client("red") as red, daemon.operator() as operator:
        job = red.submit(max_tokens=150, **ASKED | {"n": 2})
        with red.watch(job.job_id) as stream:
            for choice in (0, 1):
                next(event for event in stream if isinstance(event, Chunk) and event.choice == choice)
            operator.park(job.job_id, tenant="red")
            held = next(shot for shot in operator.watch_batch() if sum(one.held for one in shot.queries) == 2)
            assert {one.choice for one in held.queries} == {0, 1}
            operator.resume(job.job_id, tenant="red")
            assert stream.last_job().state is JobState.SUCCEEDED
        assert [len(one.token_ids) for one in red.get(job.job_id).choices] == [150, 150]


def test_the_limit_is_told(daemon: LocalDaemon) -> None:
    """Q1."""
    with daemon.client("red") as red:
        assert red.server_info().max_choices == 16
        for fields, field in (({"n": 17}, "n"), ({"n": 0}, "n"), ({"n": 2, "session_id": "s"}, "session_id")):
            with pytest.raises(InvalidRequestError) as caught:
                red.submit(**ASKED | fields)
            assert any(field in name for name in caught.value.fields), fields


def test_a_daemon_killed_in_the_middle_loses_no_choice(daemon: LocalDaemon) -> None:
    """D3: the next daemon goes on in each choice; numbers that were committed stay bit for bit."""
    asked = ASKED | {"max_tokens": 500, "prompt_logprobs": 1}
    with daemon.client("red") as red:
        undisturbed = red.result(red.submit(**asked).job_id)
        job = red.submit(**asked)
        seen = []
        for event in red.watch(job.job_id):
            seen.append(event)
            if isinstance(event, Chunk) and event.choice == 1 and event.first_token_index == 50:
                break
    children = psutil.Process(daemon.process.pid).children(recursive=True)
    daemon.process.kill()
    daemon.process.wait()
    psutil.wait_procs(children, timeout=20)
    daemon.restart()  # All modules go on with it.
    with daemon.client("red") as red:
        done = red.result(job.job_id)
    assert done.attempts == 2
    assert outputs(done.choices) == outputs(undisturbed.choices)
    assert len(done.prompt_logprobs) == len(ASKED["token_ids"])
    for event in seen:
        if isinstance(event, Chunk):
            place = event.first_token_index
            kept = done.choices[event.choice].logprobs[place : place + len(event.token_ids)]
            assert kept == event.logprobs
            assert event.prompt_logprobs in ((), done.prompt_logprobs)
