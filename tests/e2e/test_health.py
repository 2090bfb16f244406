"""The three health services of the real daemon: keep it, send it work, spare it work."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from batond.clients import RetryPolicy
from batond.clients.errors import ExhaustedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batond.bench.local_daemon import LocalDaemon
    from batond.clients import Client

pytestmark = [pytest.mark.redis]

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
MOST_QUEUED = 2
FROZEN_AFTER_S = 2.0


class Health:
    """Asks and follows, without credentials."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub: Any = health_pb2_grpc.HealthStub(channel)

    def now(self, name: str) -> int:
        status: int = self._stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=60).status
        return status

    def until(self, name: str, status: int) -> None:
        """Waits until the service has the status."""
        watch = self._stub.Watch(health_pb2.HealthCheckRequest(service=name), timeout=120)
        for answer in watch:
            if answer.status == status:
                watch.cancel()
                return


@pytest.fixture(scope="module")
def small(start_daemon: Callable[..., LocalDaemon]) -> LocalDaemon:
    """A daemon with a short queue and little patience."""
    daemon = start_daemon(
        sections={"queue": {"max_queued": MOST_QUEUED}, "service": {"frozen_after_s": FROZEN_AFTER_S}}
    )
    daemon.wait_ready()
    return daemon


@pytest.fixture
def health(small: LocalDaemon) -> Iterator[Health]:
    """The daemon's health, good at first."""
    with grpc.insecure_channel(f"unix:{small.socket}") as channel:
        one = Health(channel)
        for name in ("", "liveness", "readiness", "saturation"):
            one.until(name, SERVING)
        yield one


def engine_of(daemon: LocalDaemon) -> psutil.Process:
    return next(
        child
        for child in psutil.Process(daemon.process.pid).children(recursive=True)
        if "batond.daemon.engine.process" in " ".join(child.cmdline())
    )


def fill(client: Client, jobs: list[str]) -> None:
    """Submits until the daemon refuses, and notes the ids."""
    while True:
        jobs.append(client.submit(token_ids=[5], max_tokens=4000, ignore_eos=True).job_id)


def test_other_services_are_unknown(health: Health) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        health.now("batond")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_frozen_engine_is_not_ready_and_is_replaced(small: LocalDaemon, health: Health) -> None:
    """V3, D12: the engine stands still: NOT_SERVING; the daemon kills it and starts another: SERVING."""
    engine = engine_of(small)
    with small.client("red") as red:
        job = red.submit(token_ids=[5, 6], max_tokens=3000, ignore_eos=True)
        os.kill(engine.pid, signal.SIGSTOP)
        health.until("readiness", NOT_SERVING)
        assert health.now("") == NOT_SERVING
        assert health.now("saturation") == SERVING
        health.until("readiness", SERVING)
        assert health.now("liveness") == SERVING
        assert not engine.is_running()
        assert engine_of(small).pid != engine.pid
        red.cancel(job.job_id)
    assert "it said nothing for 2 s and was killed" in small.log.read_text()


def test_a_full_queue_is_saturated_and_nothing_else(small: LocalDaemon, health: Health) -> None:
    """V3: live stays, saturated is reported, nothing restarts."""
    engine = engine_of(small)
    with small.client("red", retry=RetryPolicy(attempts=1)) as red:
        jobs: list[str] = []
        with pytest.raises(ExhaustedError):
            fill(red, jobs)
        health.until("saturation", NOT_SERVING)
        assert health.now("liveness") == SERVING
        assert health.now("readiness") == SERVING
        for job in jobs:
            red.cancel(job)
    health.until("saturation", SERVING)
    assert engine.is_running()
    assert small.process.poll() is None


def test_a_drain_is_not_ready_but_live(small: LocalDaemon, health: Health) -> None:
    with small.client("red") as red:
        stream = red.watch(red.submit(token_ids=[6], max_tokens=4000, ignore_eos=True).job_id)
        while stream.next_token_index < 1:
            next(stream)
        small.process.send_signal(signal.SIGTERM)
        health.until("readiness", NOT_SERVING)
        assert health.now("liveness") == SERVING
        small.process.send_signal(signal.SIGTERM)  # Nobody waits for the job.
        assert small.process.wait(timeout=30) == 1
