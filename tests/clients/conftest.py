"""A daemon that fails on cue, behind a real gRPC server, and both clients behind one face."""

import asyncio
import contextlib
import io
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from batond.clients import AsyncClient, AsyncJobStream, Client, RetryPolicy, cli
from batond.v1 import admin_pb2, admin_pb2_grpc, jobs_pb2, jobs_pb2_grpc, types_pb2

IMPATIENT = RetryPolicy(attempts=4, stream_attempts=6, base_s=0.001, cap_s=0.01)
WAIT_S = 20  # A bound for what should take milliseconds.
# Characters of 1 to 4 bytes, a joined family, a combining mark; one chunk lags, one flushes.
CHUNKS = [([1, 2], "Grüße "), ([3], ""), ([4, 5, 6], "👩‍👩‍👧 e\u0301"), ([7], "漢"), ([], "字.")]
TEXT = "".join(text for _, text in CHUNKS)
TOKEN_IDS = [token_id for ids, _ in CHUNKS for token_id in ids]


@dataclass
class Fault:
    """What one call answers instead of working; with `after_effect`, only its answer is lost."""

    code: grpc.StatusCode
    message: str = "on cue"
    reason: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    fields: dict[str, str] = field(default_factory=dict)
    retry_after_s: float | None = None
    after_effect: bool = False

    def abort(self, context: grpc.ServicerContext) -> None:
        """Ends the call with this fault."""
        details = []
        if self.reason:
            details.append(
                error_details_pb2.ErrorInfo(reason=self.reason, domain="batond", metadata=self.metadata)
            )
        if self.fields:
            violations = [
                error_details_pb2.BadRequest.FieldViolation(field=name, description=what)
                for name, what in self.fields.items()
            ]
            details.append(error_details_pb2.BadRequest(field_violations=violations))
        if self.retry_after_s is not None:
            delay = duration_pb2.Duration()
            delay.FromMilliseconds(round(self.retry_after_s * 1000))
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        status = status_pb2.Status(code=code_pb2.Code.Value(self.code.name), message=self.message)
        for detail in details:
            status.details.add().Pack(detail)
        if details:
            context.abort_with_status(rpc_status.to_status(status))
        context.abort(self.code, self.message)


class FakeDaemon(jobs_pb2_grpc.JobServiceServicer, admin_pb2_grpc.AdminServiceServicer):
    """Keeps jobs by id and plays the same chunks for each.

    Attributes:
        calls: Every call, as (name, request), in order.
        metadata: What came with the last call.
        faults: Faults still to come, by name of the call.
        breaks: For each stream to come, the number of events after which it breaks; None lets it run.
        endless: Streams stay open after their chunks until the call ends.
        final: How jobs end.
        ended: Set when an endless stream's call ended.
        waiting: Set when an endless stream has sent its chunks.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.metadata: dict[str, str | bytes] = {}
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        self.breaks: list[int | None] = []
        self.endless = False
        self.final = types_pb2.Job(
            state=types_pb2.JOB_STATE_SUCCEEDED, finish_reason=types_pb2.FINISH_REASON_LENGTH
        )
        self.ended = threading.Event()
        self.waiting = threading.Event()
        self.jobs: dict[str, tuple[types_pb2.JobSpec, types_pb2.Job]] = {}
        self.snapshots = [admin_pb2.BatchSnapshot(step=step) for step in range(3)]
        self.tenants: dict[str, admin_pb2.Tenant] = {}
        self.dead = [admin_pb2.DeadJob(name=f"t0/j{number}", can_retry=True) for number in range(3)]
        self._server: grpc.Server | None = None
        self._port = 0

    # -- the server ---------------------------------------------------------------------------------------

    @property
    def target(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self._port}"

    def start(self, credentials: grpc.ServerCredentials | None = None) -> None:
        """Starts to listen, on the same port as before if there was one."""
        self._server = grpc.server(futures.ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)])
        jobs_pb2_grpc.add_JobServiceServicer_to_server(self, self._server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self, self._server)
        address = f"127.0.0.1:{self._port}"
        if credentials is None:
            self._port = self._server.add_insecure_port(address)
        else:
            self._port = self._server.add_secure_port(address, credentials)
        self._server.start()

    def stop(self) -> None:
        """Breaks every connection."""
        if self._server is not None:
            assert self._server.stop(grace=None).wait(WAIT_S)

    def names(self) -> list[str]:
        """Lists the names of the calls."""
        return [name for name, _ in self.calls]

    # -- its calls ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _call(self, name: str, request: object, context: grpc.ServicerContext) -> Iterator[None]:
        self.calls.append((name, request))
        self.metadata = dict(context.invocation_metadata())
        fault = self.faults[name].pop(0) if self.faults[name] else None
        if fault is not None and not fault.after_effect:
            fault.abort(context)
        yield
        if fault is not None:
            fault.abort(context)

    def _accept(self, job_id: str, spec: types_pb2.JobSpec, context: grpc.ServicerContext) -> bool:
        known = job_id in self.jobs
        if known and self.jobs[job_id][0] != spec:
            context.abort(grpc.StatusCode.ALREADY_EXISTS, "another body")
        if not known:
            job = types_pb2.Job(job_id=job_id, tenant="t0", state=types_pb2.JOB_STATE_QUEUED)
            job.created_time.FromSeconds(1_700_000_000 + len(self.jobs))
            self.jobs[job_id] = (spec, job)
        return known

    def _job(self, job_id: str, context: grpc.ServicerContext) -> types_pb2.Job:
        if job_id not in self.jobs:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no job {job_id}")
        return self.jobs[job_id][1]

    def _events(self, job_id: str, first: int, context: grpc.ServicerContext) -> Iterator[dict[str, Any]]:
        yield {"queued": types_pb2.Queued(job_id=job_id, position=1, effective_sla_class="standard")}
        yield {"started": types_pb2.Started(queue_time=duration_pb2.Duration(seconds=1), reason="row_free")}
        index = 0
        for token_ids, text in CHUNKS:
            # A flush at the very index may come again: only the client knows whether it saw it.
            if index >= first:
                chunk = types_pb2.TokenChunk(first_token_index=index, token_ids=token_ids, text=text)
                yield {"chunk": chunk}
            if index == 2:
                yield {"preempted": types_pb2.Preempted(reason="row", kept=True)}
                yield {"resumed": types_pb2.Resumed(reason="from_the_future")}
            index += len(token_ids)
        if self.endless:
            context.add_callback(self.ended.set)
            self.waiting.set()
            self.ended.wait(WAIT_S)
            return
        job = types_pb2.Job()
        job.CopyFrom(self.jobs[job_id][1])
        job.MergeFrom(self.final)
        if not job.text:
            job.text = TEXT
        job.output_token_ids[:] = TOKEN_IDS
        job.output_tokens = len(TOKEN_IDS)
        self.jobs[job_id][1].CopyFrom(job)
        yield {"finished": types_pb2.Finished(job=job)}

    def _stream(
        self, job_id: str, first: int, context: grpc.ServicerContext
    ) -> Iterator[types_pb2.StreamEvent]:
        end = self.breaks.pop(0) if self.breaks else None
        for sequence, event in enumerate(self._events(job_id, first, context)):
            if sequence == end:
                context.abort(grpc.StatusCode.UNAVAILABLE, "broken on cue")
            yield types_pb2.StreamEvent(sequence=sequence, **event)

    def SubmitJob(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the contract's name
        with self._call("SubmitJob", request, context):
            attached = self._accept(request.job_id, request.spec, context)
        return jobs_pb2.SubmitJobResponse(job=self.jobs[request.job_id][1], attached=attached)

    def GenerateStream(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the contract's name
        with self._call("GenerateStream", request, context):
            self._accept(request.job_id, request.spec, context)
        for event in self._stream(request.job_id, 0, context):
            yield jobs_pb2.GenerateStreamResponse(event=event)

    def WatchJob(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the contract's name
        with self._call("WatchJob", request, context):
            self._job(request.job_id, context)
        for event in self._stream(
            request.job_id,
            request.choice_from_token_indexes.get(0, request.from_token_index),
            context,
        ):
            yield jobs_pb2.WatchJobResponse(event=event)

    def GetJob(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the contract's name
        with self._call("GetJob", request, context):
            return jobs_pb2.GetJobResponse(job=self._job(request.job_id, context))

    def ListJobs(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the contract's name
        with self._call("ListJobs", request, context):
            jobs = [job for _, job in reversed(self.jobs.values())]
        if request.states:
            jobs = [job for job in jobs if job.state in request.states]
        start, size = int(request.page_token or 0), request.page_size or 2
        more = start + size < len(jobs)
        return jobs_pb2.ListJobsResponse(
            jobs=jobs[start : start + size], next_page_token=str(start + size) if more else ""
        )

    def CancelJob(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the contract's name
        with self._call("CancelJob", request, context):
            job = self._job(request.job_id, context)
        job.state = types_pb2.JOB_STATE_CANCELLED
        return jobs_pb2.CancelJobResponse(job=job)

    def GetServerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the contract's name
        with self._call("GetServerInfo", request, context):
            return admin_pb2.GetServerInfoResponse(
                version="0.1.0",
                model="tiny",
                state=admin_pb2.SERVER_STATE_READY,
                rows=2,
                max_query_tokens=64,
                eos_token_ids=[0],
                sla_classes=[
                    admin_pb2.SlaClass(name="interactive", order=0),
                    admin_pb2.SlaClass(name="batch", order=2, preemptible=True),
                ],
                uptime=duration_pb2.Duration(seconds=3),
                library_versions={"torch": "2.11"},
                daemon_id="gpu0:7:abc",
            )

    def ListDaemons(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the contract's name
        with self._call("ListDaemons", request, context):
            one = admin_pb2.Daemon(
                daemon_id="gpu0:7:abc",
                model="tiny",
                address="gpu0:7431",
                state=admin_pb2.SERVER_STATE_DRAINING,
                rows=4,
                running_jobs=3,
                version="0.1.0",
            )
        one.start_time.FromSeconds(1_700_000_000)
        other = admin_pb2.Daemon(daemon_id="gpu1:8:def", model="small", state=99)  # Of a newer release.
        return admin_pb2.ListDaemonsResponse(daemons=[one, other])

    def WatchBatch(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the contract's name
        with self._call("WatchBatch", request, context):
            pass
        for snapshot in self.snapshots:
            yield admin_pb2.WatchBatchResponse(snapshot=snapshot)
        if self.endless:
            context.add_callback(self.ended.set)
            self.waiting.set()
            self.ended.wait(WAIT_S)

    def ParkJob(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the contract's name
        with self._call("ParkJob", request, context):
            job = self._job(request.job_id, context)
        job.state = types_pb2.JOB_STATE_PARKED
        return admin_pb2.ParkJobResponse(job=job)

    def ResumeJob(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the contract's name
        with self._call("ResumeJob", request, context):
            job = self._job(request.job_id, context)
        job.state = types_pb2.JOB_STATE_RUNNING
        return admin_pb2.ResumeJobResponse(job=job)

    def UpdateJob(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the contract's name
        with self._call("UpdateJob", request, context):
            job = self._job(request.job_id, context)
        job.effective_sla_class = request.sla_class
        job.deadline.CopyFrom(request.deadline)
        return jobs_pb2.UpdateJobResponse(job=job)

    def GetPolicy(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the contract's name
        with self._call("GetPolicy", request, context):
            return admin_pb2.GetPolicyResponse(policy="fair", known_policies=["fair", "fcfs"])

    def SetPolicy(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the contract's name
        with self._call("SetPolicy", request, context):
            return admin_pb2.SetPolicyResponse(policy=request.policy, previous_policy="fair")

    def CreateTenant(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the contract's name
        with self._call("CreateTenant", request, context):
            tenant = admin_pb2.Tenant(
                name=request.name,
                limits=request.limits,
                certificate_subject=request.certificate_subject,
                token_hint="0123abcd",
            )
        tenant.created_time.FromSeconds(1_700_000_000)
        tenant.token_time.FromSeconds(1_700_000_000)
        self.tenants[request.name] = tenant
        return admin_pb2.CreateTenantResponse(tenant=tenant, token="n3w-t0ken")

    def UpdateTenant(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the contract's name
        with self._call("UpdateTenant", request, context):
            self.tenants[request.name].limits.CopyFrom(request.limits)
        return admin_pb2.UpdateTenantResponse(tenant=self.tenants[request.name])

    def RotateTenantToken(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the contract's name
        with self._call("RotateTenantToken", request, context):
            tenant = self.tenants[request.name]
        return admin_pb2.RotateTenantTokenResponse(tenant=tenant, token="r0tated")

    def DisableTenant(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the contract's name
        with self._call("DisableTenant", request, context):
            self.tenants[request.name].disabled = True
        return admin_pb2.DisableTenantResponse(tenant=self.tenants[request.name])

    def EnableTenant(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the contract's name
        with self._call("EnableTenant", request, context):
            self.tenants[request.name].disabled = False
        return admin_pb2.EnableTenantResponse(tenant=self.tenants[request.name])

    def ListTenants(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the contract's name
        with self._call("ListTenants", request, context):
            return admin_pb2.ListTenantsResponse(tenants=self.tenants.values())

    def ListDeadJobs(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the contract's name
        with self._call("ListDeadJobs", request, context):
            start = int(request.page_token or 0)
            end = start + (request.page_size or 2)
            more = str(end) if end < len(self.dead) else ""
            return admin_pb2.ListDeadJobsResponse(dead_jobs=self.dead[start:end], next_page_token=more)

    def RetryDeadJob(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the contract's name
        with self._call("RetryDeadJob", request, context):
            self._bury(request.name, context)
            tenant, _, job_id = request.name.partition("/")
            job = types_pb2.Job(tenant=tenant, job_id=job_id, state=types_pb2.JOB_STATE_QUEUED)
            return admin_pb2.RetryDeadJobResponse(job=job)

    def DropDeadJob(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the contract's name
        with self._call("DropDeadJob", request, context):
            self._bury(request.name, context)
            return admin_pb2.DropDeadJobResponse()

    def _bury(self, name: str, context: grpc.ServicerContext) -> None:
        left = [one for one in self.dead if one.name != name]
        if len(left) == len(self.dead):
            Fault(grpc.StatusCode.NOT_FOUND, reason="NOT_FOUND").abort(context)
        self.dead = left

    def Drain(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the contract's name
        with self._call("Drain", request, context):
            return admin_pb2.DrainResponse(running_jobs=len(self.jobs))


class Blocking:
    """An AsyncClient with the face of a Client: every call runs on a loop of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.runner = asyncio.Runner()
        self.client = self.runner.run(self._make(*args, **options))

    async def _make(self, *args: Any, **options: Any) -> AsyncClient:
        return AsyncClient(*args, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the client and its loop."""
        self.runner.run(self.client.close())
        self.runner.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.client, name)

        def call(*args: Any, **options: Any) -> Any:
            result = method(*args, **options)
            if isinstance(result, AsyncJobStream):
                return BlockingStream(self.runner, result)
            if hasattr(result, "__anext__"):
                return self._iterate(result)
            return self.runner.run(result)

        return call

    def _iterate(self, values: Any) -> Iterator[Any]:
        async def step() -> Any:
            return await anext(values)

        try:
            while True:
                try:
                    yield self.runner.run(step())
                except StopAsyncIteration:
                    return
        finally:
            self.runner.run(values.aclose())


class BlockingStream:
    """An AsyncJobStream with the face of a JobStream."""

    def __init__(self, runner: asyncio.Runner, stream: AsyncJobStream) -> None:
        self.runner = runner
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def __iter__(self) -> "BlockingStream":
        return self

    def __next__(self) -> Any:
        try:
            return self.runner.run(self.stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the stream."""
        self.runner.run(self.stream.close())

    def last_job(self) -> Any:
        """Reads to the end."""
        return self.runner.run(self.stream.last_job())


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    """Starts a daemon that fails on cue."""
    fake = FakeDaemon()
    fake.start()
    yield fake
    fake.ended.set()
    fake.stop()


class Result(NamedTuple):
    """What one run of batonctl left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def batonctl(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Result]:
    """Runs batonctl in this process, against the daemon that fails on cue."""
    for name in ("BATOND_TOKEN", "BATOND_TOKEN_FILE", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BATOND_SERVER", daemon.target)
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: str, stdin: str = "") -> Result:
        monkeypatch.setattr(sys, "argv", ["batonctl", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = cli.run()
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        errors = [line for line in captured.err.splitlines() if not line.startswith("-- ")]
        assert len(errors) <= 1, captured.err
        assert not captured.err or captured.err.endswith("\n")
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture(params=[Client, Blocking], ids=["sync", "async"])
def connect(request: pytest.FixtureRequest, daemon: FakeDaemon) -> Iterator[Callable[..., Any]]:
    """Makes clients of either kind, impatient unless told otherwise."""
    with contextlib.ExitStack() as stack:

        def make(target: str | None = None, **options: Any) -> Any:
            options = {"retry": IMPATIENT, "timeout_s": WAIT_S} | options
            return stack.enter_context(request.param(target or daemon.target, **options))

        yield make


@pytest.fixture
def client(connect: Callable[..., Any]) -> Any:
    """Gives a client of either kind."""
    return connect()


@pytest.fixture
def fault() -> type[Fault]:
    """Gives the class of faults, which test modules can't import from here."""
    return Fault


@pytest.fixture
def chunks() -> list[tuple[list[int], str]]:
    """Gives what every job emits."""
    return CHUNKS
