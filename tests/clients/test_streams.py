"""Streams: every event once over any break, closing, cancelling; both clients."""

import asyncio
import threading
from typing import Any

import grpc
import pytest

from batond.clients import (
    AsyncClient,
    Chunk,
    Client,
    Finished,
    FinishReason,
    JobState,
    Preempted,
    Queued,
    Resumed,
    RetryPolicy,
    Started,
    errors,
)
from batond.v1 import types_pb2

EVENTS = 10  # queued, started, five chunks, preempted, resumed, finished


def check_whole(events: list[Any], chunks: list[tuple[list[int], str]]) -> None:
    """Checks that every event came once, in order."""
    seen = [event for event in events if isinstance(event, Chunk)]
    assert [(list(chunk.token_ids), chunk.text) for chunk in seen] == chunks
    index = 0
    for chunk in seen:
        assert chunk.first_token_index == index
        index += len(chunk.token_ids)
    (finished,) = [event for event in events if isinstance(event, Finished)]
    assert finished is events[-1]
    assert "".join(chunk.text for chunk in seen) == finished.job.text
    assert tuple(token for chunk in seen for token in chunk.token_ids) == finished.job.output_token_ids
    for kind in (Queued, Started):
        assert sum(isinstance(event, kind) for event in events) == 1


def test_a_stream_brings_everything(daemon: Any, client: Any, chunks: list[tuple[list[int], str]]) -> None:
    """R7, Q7: chunks carry their index, and their texts are the job's text, whatever the characters."""
    with client.generate("x", sla_class="standard", job_id="j") as stream:
        assert stream.job_id == "j"
        events = list(stream)
    check_whole(events, chunks)
    assert events[0] == Queued("j", 1, "standard")
    assert events[1] == Started(1.0, "row_free")
    assert Preempted("row", kept=True) in events
    assert Resumed(reason="from_the_future") in events
    assert events[-1].job.finish_reason is FinishReason.LENGTH
    assert stream.next_token_index == 7
    assert daemon.names() == ["GenerateStream"]


@pytest.mark.parametrize("first", range(EVENTS))
@pytest.mark.parametrize("second", [None, 0, 3])
def test_a_broken_generation_is_taken_up(
    daemon: Any, client: Any, chunks: list[tuple[list[int], str]], first: int, second: int | None
) -> None:
    """D3: broken after any event, each token and each text is seen once, under one job id."""
    daemon.breaks = [first, second]
    with client.generate("x") as stream:
        events = list(stream)
    check_whole(events, chunks)
    assert len(daemon.jobs) == 1
    names = daemon.names()
    # Until the first event came, nobody knows whether the job was accepted: the same request goes out again.
    assert names[0] == "GenerateStream"
    assert names[1] == ("GenerateStream" if first == 0 else "WatchJob")
    assert names[-1] == "WatchJob" or set(names) == {"GenerateStream"}
    assert {request.job_id for _, request in daemon.calls} == {stream.job_id}


@pytest.mark.parametrize("break_after", range(EVENTS))
def test_a_broken_watch_is_taken_up(
    daemon: Any, client: Any, chunks: list[tuple[list[int], str]], break_after: int
) -> None:
    client.submit("x", job_id="j")
    daemon.breaks = [break_after]
    check_whole(list(client.watch("j")), chunks)
    assert daemon.names() == ["SubmitJob", "WatchJob", "WatchJob"]


def test_a_watch_starts_where_it_is_told(daemon: Any, client: Any) -> None:
    client.submit("x", job_id="j")
    events = [event for event in client.watch("j", from_token_index=3) if isinstance(event, Chunk)]
    assert events[0].first_token_index == 3
    assert daemon.calls[-1][1].from_token_index == 3


def test_a_watch_starts_where_it_is_told_for_a_choice(daemon: Any, client: Any) -> None:
    """C4: and goes on from there when it breaks, whether or not it has seen the other choices."""
    client.submit("x", job_id="j")
    daemon.breaks = [5]
    stream = client.watch("j", 1, choice_from_token_indexes={0: 3})
    events = [event for event in stream if isinstance(event, Chunk)]
    assert events[0].first_token_index == 3
    asked = [request for name, request in daemon.calls if name == "WatchJob"]
    assert [request.from_token_index for request in asked] == [1, 1]
    assert [dict(request.choice_from_token_indexes) for request in asked] == [{0: 3}, {0: 6}]
    assert stream.next_token_indexes == {0: 7}


def test_a_generation_of_several_is_taken_up_in_each(daemon: Any, client: Any) -> None:
    daemon.breaks = [4]
    with client.generate("x", n=3) as stream:
        list(stream)
    again = daemon.calls[-1][1]
    assert again.from_token_index == 0
    assert dict(again.choice_from_token_indexes) == {0: 3, 1: 0, 2: 0}


def test_a_restarted_daemon_goes_on(daemon: Any, connect: Any, chunks: list[tuple[list[int], str]]) -> None:
    """D3: the connection itself is lost in the middle of a generation."""
    client = connect(retry=RetryPolicy(attempts=4, stream_attempts=200, base_s=0.05, cap_s=0.1))
    daemon.endless = True
    with client.generate("x", detached=True) as stream:
        events = [next(stream) for _ in range(EVENTS - 1)]
        assert daemon.waiting.wait(20)
        daemon.stop()
        daemon.endless = False
        daemon.start()
        events += list(stream)
    check_whole(events, chunks)
    assert daemon.names() == ["GenerateStream", "WatchJob"]
    assert daemon.calls[1][1].from_token_index == 7


def test_an_end_without_a_final_event_is_a_break(daemon: Any, client: Any) -> None:
    daemon.endless = True
    daemon.ended.set()  # The first stream ends cleanly before the job does.
    stream = client.generate("x")
    events = [next(stream) for _ in range(EVENTS - 1)]
    assert daemon.waiting.wait(20)
    daemon.endless = False
    events += list(stream)
    assert isinstance(events[-1], Finished)
    assert daemon.names() == ["GenerateStream", "WatchJob"]


def test_a_stream_that_never_gets_on_ends(daemon: Any, client: Any) -> None:
    daemon.breaks = [3, *[0] * 50]
    with client.generate("x", detached=True) as stream, pytest.raises(errors.UnavailableError):
        list(stream)
    assert daemon.names().count("WatchJob") == 5


def test_progress_renews_the_patience(daemon: Any, connect: Any, chunks: Any) -> None:
    daemon.breaks = [3, 3, 3, 3]
    client = connect(retry=RetryPolicy(attempts=1, stream_attempts=2, base_s=0.001))
    check_whole(list(client.generate("x")), chunks)


def test_a_gap_is_never_silent(daemon: Any, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def gap(*_: object) -> Any:
        yield {"chunk": types_pb2.TokenChunk(first_token_index=1, token_ids=[2], text="b")}

    monkeypatch.setattr(daemon, "_events", gap)
    with client.generate("x") as stream, pytest.raises(errors.ServerError, match="skipped 1 token"):
        next(stream)


def test_an_unknown_event_is_skipped(daemon: Any, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = daemon._events

    def more(*arguments: Any) -> Any:
        yield {}
        yield from whole(*arguments)

    monkeypatch.setattr(daemon, "_events", more)
    assert len(list(client.generate("x"))) == EVENTS


@pytest.mark.parametrize("detached", [False, True])
def test_closing_ends_the_call(daemon: Any, client: Any, detached: bool) -> None:  # noqa: FBT001 -- a parameter of the test
    """C2: the daemon sees the close; what it means for the job is said by `detached`."""
    daemon.endless = True
    with client.generate("x", detached=detached) as stream:
        next(stream)
        assert daemon.waiting.wait(20)
    assert daemon.ended.wait(20), "the daemon still sends to nobody"
    assert daemon.names() == ["GenerateStream"]
    assert daemon.calls[0][1].detached is detached
    with pytest.raises(StopIteration):
        next(stream)
    stream.close()
    with pytest.raises(errors.CallCancelledError):
        stream.last_job()


@pytest.mark.parametrize(("detached", "cancelled"), [(False, True), (True, False)])
def test_closing_after_a_break_cancels_by_a_call(
    daemon: Any,
    client: Any,
    detached: bool,  # noqa: FBT001 -- a parameter of the test
    cancelled: bool,  # noqa: FBT001 -- a parameter of the test
) -> None:
    """C2: taken up with WatchJob, an attached generation still ends with its stream."""
    daemon.breaks = [4]
    daemon.endless = True
    with client.generate("x", detached=detached) as stream:
        for _ in range(6):
            next(stream)
    assert ("CancelJob" in daemon.names()) is cancelled


def test_closing_a_finished_stream_or_a_watch_cancels_nothing(daemon: Any, client: Any) -> None:
    daemon.breaks = [4]
    with client.generate("x", job_id="j") as stream:
        list(stream)
    daemon.endless = True
    with client.watch("j") as stream:
        next(stream)
    assert "CancelJob" not in daemon.names()


def test_nothing_is_sent_before_the_first_event_is_asked_for(daemon: Any, client: Any) -> None:
    with client.generate("x"):
        pass
    assert daemon.calls == []


def test_another_thread_may_close(daemon: Any) -> None:
    """C5: a close from elsewhere is a cancel by this client, not by the daemon."""
    daemon.endless = True
    with Client(daemon.target) as client:
        stream = client.generate("x")
        caught: list[BaseException] = []

        def read() -> None:
            try:
                stream.last_job()
            except errors.BatondClientError as error:
                caught.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        assert daemon.waiting.wait(20)
        stream.close()
        reader.join(20)
    assert [type(error) for error in caught] == [errors.CallCancelledError]
    assert daemon.ended.wait(20)


def test_a_close_ends_the_wait_for_a_reconnection(daemon: Any) -> None:
    patient = RetryPolicy(attempts=9, stream_attempts=9, base_s=3600, cap_s=3600)
    daemon.breaks = [2]
    with Client(daemon.target, retry=patient) as client:
        stream = client.generate("x", detached=True)
        next(stream)
        next(stream)
        closer = threading.Timer(0.2, stream.close)
        closer.start()
        with pytest.raises(errors.CallCancelledError):
            next(stream)
        closer.join()


async def test_a_cancelled_task_ends_its_stream(daemon: Any) -> None:
    """C5: asyncio's cancel stays asyncio's cancel, and the daemon sees the end."""
    daemon.endless = True

    async def read(client: AsyncClient) -> None:
        async with client.generate("x") as stream:
            async for _ in stream:
                pass

    async with AsyncClient(daemon.target) as client:
        task = asyncio.create_task(read(client))
        assert await asyncio.to_thread(daemon.waiting.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(daemon.ended.wait, 20)


async def test_another_task_may_close(daemon: Any) -> None:
    """C5: a close from elsewhere is a cancel by this client, not of the reading task."""
    daemon.endless = True
    async with AsyncClient(daemon.target) as client:
        stream = client.generate("x")
        task = asyncio.create_task(stream.last_job())
        assert await asyncio.to_thread(daemon.waiting.wait, 20)
        await stream.close()
        with pytest.raises(errors.CallCancelledError):
            await task


async def test_streams_run_side_by_side(daemon: Any) -> None:
    async with AsyncClient(daemon.target) as client:
        texts = await asyncio.gather(*(client.generate_text(f"prompt {number}") for number in range(12)))
    assert len(set(texts)) == 1
    assert len(daemon.jobs) == 12


def test_the_daemon_aborts_a_stream(daemon: Any, client: Any, fault: Any) -> None:
    """C5: a cancel by the daemon is none by this client."""
    daemon.faults["GenerateStream"] = [fault(grpc.StatusCode.CANCELLED)]
    with pytest.raises(errors.ServerAbortedError):
        next(client.generate("x"))


def test_waiting_and_results(daemon: Any, client: Any) -> None:
    client.submit("x", job_id="j")
    assert client.wait("j").state is JobState.SUCCEEDED
    assert client.result("j").output_tokens == 7
    assert client.generate_text("y") == client.get("j").text


def test_a_failed_job_is_an_error_with_the_job(daemon: Any, client: Any) -> None:
    daemon.final = types_pb2.Job(
        state=types_pb2.JOB_STATE_FAILED,
        text="half",
        finish_reason=types_pb2.FINISH_REASON_ERROR,
        error=types_pb2.JobError(code=8, reason="KV_BYTES", message="too large"),
    )
    client.submit("x", job_id="j")
    job = client.wait("j")
    assert (job.state, job.error_code, job.error_reason) == (JobState.FAILED, 8, "KV_BYTES")
    with pytest.raises(errors.JobFailedError, match="too large") as caught:
        client.result("j")
    assert caught.value.job.text == "half"
    assert caught.value.reason == "KV_BYTES"
    with pytest.raises(errors.JobFailedError):
        client.generate_text("x")


def test_a_cancelled_job_is_an_error_of_its_own(daemon: Any, client: Any) -> None:
    daemon.final = types_pb2.Job(
        state=types_pb2.JOB_STATE_CANCELLED, finish_reason=types_pb2.FINISH_REASON_CANCELLED
    )
    with pytest.raises(errors.JobCancelledError):
        client.generate_text("x")
