"""Calls that answer once: retries, idempotency, errors, security, both clients."""

import threading
import time
from typing import Any

import grpc
import pytest

from batond.clients import JobState, RetryPolicy, ServerState, errors
from batond.clients.errors import BY_STATUS


def test_submit_repeats_with_one_id(daemon: Any, client: Any, fault: Any) -> None:
    """Q2: the answer is lost twice, once before and once after the job was accepted; there is one job."""
    daemon.faults["SubmitJob"] = [
        fault(grpc.StatusCode.UNAVAILABLE),
        fault(grpc.StatusCode.UNAVAILABLE, after_effect=True),
    ]
    job = client.submit("hello", max_tokens=4)
    assert daemon.names() == ["SubmitJob"] * 3
    assert len({request.job_id for _, request in daemon.calls}) == 1
    assert list(daemon.jobs) == [job.job_id]


def test_ids_are_made_anew_and_the_callers_own_is_kept(daemon: Any, client: Any) -> None:
    assert client.submit("a").job_id != client.submit("a").job_id
    assert client.submit("a", job_id="mine").job_id == "mine"
    assert client.submit("a", job_id="mine").job_id == "mine"
    with pytest.raises(errors.AlreadyExistsError):
        client.submit("b", job_id="mine")
    assert len(daemon.jobs) == 3


def test_exhausted_waits_as_long_as_the_daemon_says(daemon: Any, client: Any, fault: Any) -> None:
    daemon.faults["SubmitJob"] = [fault(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after_s=0.3)]
    begin_s = time.monotonic()
    client.submit("hello")
    assert time.monotonic() - begin_s >= 0.3
    assert daemon.names() == ["SubmitJob"] * 2


def test_exhausted_without_a_word_is_not_repeated(daemon: Any, client: Any, fault: Any) -> None:
    daemon.faults["SubmitJob"] = [fault(grpc.StatusCode.RESOURCE_EXHAUSTED)]
    with pytest.raises(errors.ExhaustedError) as caught:
        client.submit("hello")
    assert caught.value.retry_after_s is None
    assert daemon.names() == ["SubmitJob"]


def test_retries_come_to_an_end(daemon: Any, connect: Any, fault: Any) -> None:
    daemon.faults["GetJob"] = [fault(grpc.StatusCode.UNAVAILABLE)] * 9
    client = connect(retry=RetryPolicy(attempts=3, base_s=0.001, cap_s=0.001))
    with pytest.raises(errors.UnavailableError):
        client.get("x")
    assert daemon.names() == ["GetJob"] * 3


def test_a_wait_that_outlasts_the_time_out_is_not_begun(daemon: Any, connect: Any, fault: Any) -> None:
    daemon.faults["GetJob"] = [fault(grpc.StatusCode.UNAVAILABLE, retry_after_s=3600)]
    begin_s = time.monotonic()
    with pytest.raises(errors.UnavailableError):
        connect(timeout_s=5).get("x")
    assert time.monotonic() - begin_s < 5


@pytest.mark.parametrize("name", ["park", "resume"])
def test_steering_is_not_repeated(daemon: Any, client: Any, fault: Any, name: str) -> None:
    call = f"{name.capitalize()}Job"
    client.submit("hello", job_id="j")
    daemon.faults[call] = [fault(grpc.StatusCode.UNAVAILABLE, after_effect=True)]
    with pytest.raises(errors.UnavailableError):
        getattr(client, name)("j", tenant="t0")
    assert daemon.names()[1:] == [call]


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_every_status_has_its_error(daemon: Any, connect: Any, fault: Any, code: grpc.StatusCode) -> None:
    daemon.faults["GetJob"] = [
        fault(
            code,
            message="größer als erlaubt",
            reason="SOME_REASON",
            metadata={"limit": "64"},
            fields={"spec.sampling": "too many"},
            retry_after_s=1.5,
        )
    ]
    expected = dict(BY_STATUS) | {
        grpc.StatusCode.CANCELLED: errors.ServerAbortedError,
        grpc.StatusCode.DEADLINE_EXCEEDED: errors.ServerDeadlineError,
    }
    with pytest.raises(errors.BatondClientError) as caught:
        connect(retry=RetryPolicy(attempts=1)).get("x")
    error = caught.value
    assert type(error) is expected[code]
    assert error.code is code
    assert error.message == "größer als erlaubt"
    assert error.reason == "SOME_REASON"
    assert error.details == {"limit": "64"}
    assert error.fields == {"spec.sampling": "too many"}
    assert error.retry_after_s == 1.5
    assert error.hint
    assert error.hint in str(error)


def test_an_error_without_details_is_mapped_too(daemon: Any, client: Any, fault: Any) -> None:
    daemon.faults["GetJob"] = [fault(grpc.StatusCode.INTERNAL, message="id 4711")]
    with pytest.raises(errors.ServerError, match="id 4711") as caught:
        client.get("x")
    assert caught.value.reason == ""
    assert isinstance(caught.value.__cause__, grpc.RpcError)


def test_deadlines_are_told_apart(daemon: Any, connect: Any, fault: Any) -> None:
    """C5: the daemon's own limit and this client's time-out are different errors."""
    daemon.faults["GetJob"] = [fault(grpc.StatusCode.DEADLINE_EXCEEDED)]
    with pytest.raises(errors.ServerDeadlineError):
        connect().get("x")
    daemon.endless = True
    client = connect()
    with (
        client.generate("x", timeout_s=0.3) as stream,
        pytest.raises(errors.ClientDeadlineError) as caught,
    ):
        stream.last_job()
    assert isinstance(caught.value, TimeoutError)


def test_a_silent_daemon_is_a_client_deadline(connect: Any) -> None:
    """C5: nobody answers at all."""
    import socket  # noqa: PLC0415 -- the only test that needs it

    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = connect(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.3)
        with pytest.raises((errors.ClientDeadlineError, errors.UnavailableError)):
            client.get("x")


def test_nobody_there_is_unavailable(daemon: Any, client: Any) -> None:
    daemon.stop()
    with pytest.raises(errors.UnavailableError, match="check that the daemon runs"):
        client.get("x")


def test_a_daemon_that_says_why_is_not_looked_for(daemon: Any, connect: Any, fault: Any) -> None:
    """It runs and is reached: advice on addresses and TLS would mislead."""
    daemon.faults["SubmitJob"] = [
        fault(grpc.StatusCode.UNAVAILABLE, message="shutting down", reason="DRAINING")
    ]
    with pytest.raises(errors.UnavailableError) as caught:
        connect(retry=RetryPolicy(attempts=1)).submit("x")
    assert str(caught.value) == "shutting down (retry later, or at another daemon)"


def test_a_restarted_daemon_is_found_again(daemon: Any, connect: Any) -> None:
    client = connect(retry=RetryPolicy(attempts=100, base_s=0.05, cap_s=0.1))
    client.submit("hello", job_id="j")
    daemon.stop()
    restart = threading.Timer(0.5, daemon.start)
    restart.start()
    assert client.get("j").job_id == "j"
    restart.join()


def test_get_list_cancel(daemon: Any, client: Any) -> None:
    for number in range(5):
        client.submit(f"prompt {number}", job_id=f"j{number}")
    assert client.get("j3").state is JobState.QUEUED
    assert client.cancel("j3").state is JobState.CANCELLED
    assert [job.job_id for job in client.list()] == ["j4", "j3", "j2", "j1", "j0"]
    assert daemon.names().count("ListJobs") == 3
    assert [job.job_id for job in client.list([JobState.CANCELLED])] == ["j3"]
    page = client.list_page(page_size=4)
    assert len(page.jobs) == 4
    assert client.list_page(page_size=4, page_token=page.next_page_token).next_page_token == ""
    with pytest.raises(errors.NotFoundError) as caught:
        client.get("nobody's")
    assert isinstance(caught.value, LookupError)


def test_a_job_is_read_in_full(client: Any) -> None:
    job = client.submit("x", job_id="j")
    assert job.created_time is not None
    assert job.created_time.timestamp() == 1_700_000_000
    assert job.created_time.utcoffset() is not None
    assert job.started_time is None
    assert job.tenant == "t0"


def test_the_daemon_is_read_and_steered(daemon: Any, client: Any) -> None:
    info = client.server_info()
    assert info.state is ServerState.READY
    assert (info.rows, info.max_query_tokens, info.uptime_s) == (2, 64, 3.0)
    assert [(one.name, one.preemptible) for one in info.sla_classes] == [
        ("interactive", False),
        ("batch", True),
    ]
    assert info.library_versions == {"torch": "2.11"}
    client.submit("x", job_id="j")
    assert client.park("j", tenant="t9").state is JobState.PARKED
    assert daemon.calls[-1][1].tenant == "t9"
    assert client.resume("j").state is JobState.RUNNING
    assert client.drain(2.5) == 1
    assert daemon.calls[-1][1].timeout.ToMilliseconds() == 2500
    client.drain()
    assert not daemon.calls[-1][1].HasField("timeout")


def test_the_batch_is_watched(daemon: Any, client: Any, fault: Any) -> None:
    assert [snapshot.step for snapshot in client.watch_batch(0.5)] == [0, 1, 2]
    assert daemon.calls[-1][1].min_interval.ToMilliseconds() == 500
    daemon.endless = True
    watching = client.watch_batch()
    assert next(watching).step == 0
    assert daemon.waiting.wait(20)
    watching.close()
    assert daemon.ended.wait(20), "the daemon still sends to nobody"
    daemon.faults["WatchBatch"] = [fault(grpc.StatusCode.PERMISSION_DENIED)]
    with pytest.raises(errors.PermissionDeniedError):
        next(client.watch_batch())


def test_the_token_travels_with_every_call(daemon: Any, connect: Any) -> None:
    client = connect(token="s3cret")
    client.server_info()
    assert daemon.metadata["authorization"] == "Bearer s3cret"
    client.generate_text("x")
    assert daemon.metadata["authorization"] == "Bearer s3cret"
    assert "s3cret" not in repr(client)


@pytest.mark.parametrize("target", ["example.org:7431", "10.0.0.1:7431", "[2001:db8::1]:7431", "dns:///h:1"])
def test_the_token_does_not_cross_a_network_in_plain_text(connect: Any, target: str) -> None:
    with pytest.raises(ValueError, match="plain text"):
        connect(target, token="s3cret")
    connect(target, token="s3cret", allow_plaintext_token=True)
    connect(target)


@pytest.mark.parametrize(
    "target", ["localhost:1", "127.0.0.2:1", "[::1]:1", "unix:///run/x.sock", "/run/x.sock", "./x.sock"]
)
def test_the_token_goes_to_this_machine(connect: Any, target: str) -> None:
    connect(target, token="s3cret")


@pytest.mark.parametrize("token", ["", "two words", "line\n", "schlüssel"])
def test_a_token_no_header_can_carry_is_refused(connect: Any, token: str) -> None:
    with pytest.raises(ValueError, match="printable ASCII"):
        connect(token=token)
