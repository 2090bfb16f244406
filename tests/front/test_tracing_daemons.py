"""Traces of real daemons, at a receiver that speaks OTLP: over preemption, an engine's death, a daemon's."""

from __future__ import annotations

import contextlib
import json
import queue
import re
import tempfile
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from batond.bench.fake_daemon import PROGRAM
from batond.bench.fake_engine import STEP_VARIABLE, Fault
from batond.bench.local_daemon import LocalDaemon
from batond.clients import JobState, build
from batond.daemon.queue import EmbeddedRedis
from batond.v1 import jobs_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.proto.trace.v1.trace_pb2 import Span

    from batond.clients import Client

pytestmark = pytest.mark.redis
TENANT = "red"
TOKENS = {TENANT: "red-token-of-the-traces", "operator": "operator-token-of-the-traces"}
LONG = 100_000


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector."""

    def __init__(self) -> None:
        self._spans: queue.Queue[Span] = queue.Queue()
        self.came: set[str] = set()

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the contract's name
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.came.add(shown(span)["batond.job_id"])
                    self._spans.put(span)
        return trace_service_pb2.ExportTraceServiceResponse()

    def span_of(self, job_id: str) -> Span:
        """The next span of a job, once it has come; those of others before it are thrown away."""
        while True:
            span = self._spans.get(timeout=60)
            if shown(span).get("batond.job_id") == job_id:
                return span


def shown(span: Span) -> dict[str, Any]:
    """Attributes."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def names(span: Span) -> list[str]:
    """Of its events."""
    return [event.name for event in span.events]


class Scene:
    """A receiver, a Redis, and daemons of one row that send their traces there."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self.receiver = Receiver()
        server = grpc.server(futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self.receiver, server)
        self._port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        stack.callback(lambda: server.stop(0).wait())
        redis = EmbeddedRedis(folder / "redis")
        redis.start()
        stack.callback(redis.stop)
        self._url = redis.url
        self.first = self.start("first")

    def start(self, name: str) -> LocalDaemon:
        """Starts a daemon, without waiting for it."""
        folder = self._folder / name
        folder.mkdir()
        daemon = LocalDaemon(
            folder,
            [TENANT],
            model={"path": str(folder), "name": "fake"},
            engine={"rows": 1},
            sections={
                "queue": {"url": self._url, "lease_s": 1.0},
                "service": {"engine_backoff_s": 0.05, "drain_timeout_s": 0.1},
                "tracing": {"endpoint": f"http://127.0.0.1:{self._port}"},
            },
            environment={STEP_VARIABLE: "0.002"},
            tokens=TOKENS,
            program=PROGRAM,
        )
        self._stack.callback(daemon.stop)
        return daemon


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    """One for the whole module; the last test takes the first daemon away."""
    with contextlib.ExitStack() as stack:
        # Unix socket paths are short: pytest's own folders can be too deep for them.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bd-")))
        one = Scene(folder, stack)
        one.first.wait_ready()
        yield one


@pytest.fixture
def client(scene: Scene) -> Iterator[Client]:
    """A client of the first daemon."""
    with scene.first.client(TENANT) as one:
        yield one


def calling(sampled: int = 1) -> trace.SpanContext:
    """A caller's span, made current with `current`."""
    return trace.SpanContext(
        trace_id=0xA1 << 64 | 7,
        span_id=0xB2 << 32 | 9,
        is_remote=False,
        trace_flags=trace.TraceFlags(sampled),
        trace_state=trace.TraceState([("v", "1")]),
    )


def current(context: trace.SpanContext) -> Any:
    """Makes a span current."""
    return trace.use_span(trace.NonRecordingSpan(context))


def log_lines(daemon: LocalDaemon) -> list[dict[str, Any]]:
    """What a daemon has logged in JSON."""
    lines = daemon.log.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_the_client_s_trace_goes_on_over_a_preemption(scene: Scene, client: Client) -> None:
    context = calling()
    with current(context):
        slow = client.generate(token_ids=[1], sla_class="batch", max_tokens=60, seed=1, job_id="slow")
    with slow:  # The span was current when it was asked for; it need not be any more.
        while slow.next_token_index < 20:
            next(slow)
        client.generate_text(token_ids=[2], sla_class="interactive", max_tokens=2, seed=1, job_id="quick")
        assert slow.last_job().preemptions == 1
    quick, span = scene.receiver.span_of("quick"), scene.receiver.span_of("slow")
    assert span.trace_id == context.trace_id.to_bytes(16, "big")
    assert span.parent_span_id == context.span_id.to_bytes(8, "big")
    assert span.trace_state == "v=1"
    order = ["queued", "claimed", "started", "first_token", "parked", "resumed", "finished"]
    assert names(span) == order
    assert (shown(span)["batond.parks"], shown(span)["gen_ai.usage.output_tokens"]) == (1, 60)
    assert span.start_time_unix_nano < span.events[2].time_unix_nano < span.end_time_unix_nano
    assert (quick.parent_span_id, names(quick)[-1]) == (b"", "finished")
    assert quick.trace_id != span.trace_id


def test_the_caller_decides_and_malformed_headers_are_roots(scene: Scene, client: Client) -> None:
    with current(calling(sampled=0)):
        client.generate_text(token_ids=[3], max_tokens=2, job_id="unseen")
    credentials = ("authorization", f"Bearer {TOKENS[TENANT]}")
    with grpc.insecure_channel(f"unix:{scene.first.socket}") as channel:
        request = build.submit(None, {"token_ids": [3], "max_tokens": 2, "job_id": "root"})
        headers = (credentials, ("traceparent", "00-garbage"), ("tracestate", "v=1"))
        jobs_pb2_grpc.JobServiceStub(channel).SubmitJob(request, metadata=headers, timeout=60)
    span = scene.receiver.span_of("root")
    assert (span.parent_span_id, span.trace_state) == (b"", "")
    assert "unseen" not in scene.receiver.came  # It ended before, and spans come in order.


def test_a_job_cancelled_while_it_waits_has_its_span(scene: Scene, client: Client) -> None:
    with client.generate(token_ids=[4], sla_class="interactive", max_tokens=LONG, job_id="holder") as holder:
        next(holder)
        waiting = [
            client.submit(token_ids=[5], sla_class="batch", max_tokens=2, job_id=f"w{number}")
            for number in range(6)  # One row, two claimed ahead: the last ones wait in Redis.
        ]
        client.cancel(waiting[-1].job_id)
        client.cancel(waiting[-1].job_id)
        span = scene.receiver.span_of(waiting[-1].job_id)
    assert names(span) == ["queued", "finished"]
    assert shown(span)["batond.outcome"] == "cancelled"
    for job in waiting:
        client.cancel(job.job_id)
    client.wait(waiting[0].job_id)


def test_an_engine_s_death_stays_in_the_trace_and_in_the_log(scene: Scene, client: Client) -> None:
    with current(calling()):
        job = client.submit(token_ids=[Fault.DIE, 3], max_tokens=5, seed=1, job_id="killer")
    assert client.wait(job.job_id).state is JobState.FAILED
    claims = [scene.receiver.span_of("killer") for _ in range(3)]
    assert [one.name for one in claims[:2]] == ["claim", "claim"]
    assert shown(claims[0])["batond.claim.end"] == "convicted"
    assert {one.trace_id for one in claims} == {calling().trace_id.to_bytes(16, "big")}
    assert claims[0].parent_span_id == claims[2].span_id
    assert shown(claims[2])["error.type"] == "ATTEMPTS"
    lines = [line for line in log_lines(scene.first) if line.get("job_id") == "killer"]
    assert lines
    assert {line["trace_id"] for line in lines} == {f"{calling().trace_id:032x}"}


def test_a_daemon_that_takes_over_goes_on_with_the_trace(scene: Scene, client: Client) -> None:
    second = scene.start("second")
    with current(calling()):
        stream = client.generate(token_ids=[6], max_tokens=LONG, detached=True, job_id="moved")
    while stream.next_token_index < 5:
        next(stream)
    second.wait_ready()
    scene.first.process.kill()
    scene.first.process.wait()
    with second.client(TENANT) as other:
        committed = other.get("moved").output_tokens
        with other.watch("moved", committed) as watch:
            while watch.next_token_index == committed:
                next(watch)
        assert other.cancel("moved").state is JobState.CANCELLED
    span = scene.receiver.span_of("moved")
    assert span.trace_id == calling().trace_id.to_bytes(16, "big")
    assert span.parent_span_id == calling().span_id.to_bytes(8, "big")
    assert shown(span)["batond.claims"] == 2
    assert names(span)[:3] == ["queued", "started", "first_token"]
    assert names(span)[-3:] == ["claimed", "resumed", "finished"]
    assert re.search(r"jobs_reaped", second.log.read_text(encoding="utf-8"))
