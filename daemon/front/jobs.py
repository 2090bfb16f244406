"""JobService: submit, follow and end jobs, each in the caller's own tenant."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from batond.daemon.errors import (
    BatondError,
    InvalidRequestError,
    NotFoundError,
    RequestTooLargeError,
    UnavailableError,
)
from batond.daemon.front import convert, ranks
from batond.daemon.front.finals import Finals
from batond.daemon.front.follow import Ended
from batond.daemon.front.hub import GotRow
from batond.daemon.front.requests import check_job_id
from batond.daemon.queue import Chunk, JobState
from batond.daemon.telemetry.logging import bind_ids
from batond.daemon.telemetry.trace_context import TraceContext
from batond.v1 import jobs_pb2, jobs_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from batond.daemon.front.calls import Calls
    from batond.daemon.front.dispatcher import Dispatcher
    from batond.daemon.front.follow import Follower, FollowEvent
    from batond.daemon.front.hub import Hub
    from batond.daemon.front.identity import Tenant
    from batond.daemon.front.neighbours import Neighbours
    from batond.daemon.front.requests import RequestReader
    from batond.daemon.front.traces import JobTraces
    from batond.daemon.queue import JobRecord, JobSpec, JobStore
    from batond.daemon.telemetry.metrics import Metrics
    from batond.policies.classes import SlaClasses
    from batond.v1 import types_pb2

DEFAULT_PAGE = 100
MOST_PAGE = 1000
#: A cancelled job of this daemon is final within two steps; its answer waits that long at most.
CANCEL_WAIT_S = 5.0
FEW_TOKENS = 256


class JobServicer(jobs_pb2_grpc.JobServiceServicer):
    """See proto/batond/v1/jobs.proto.

    Args:
        calls: What every rpc shares.
        store: The queue.
        follower: Streams.
        hub: Jobs that run here.
        dispatcher: Is told of new jobs and cancels.
        neighbours: Says who serves other models.
        reader: Checks requests.
        classes: SLA classes.
        metrics: Counts.
        result_ttl_s: How long results are kept.
        max_message_bytes: Largest job.
        traces: Spans of jobs; None where there are none.
    """

    def __init__(
        self,
        *,
        calls: Calls,
        store: JobStore,
        follower: Follower,
        hub: Hub,
        dispatcher: Dispatcher,
        neighbours: Neighbours,
        reader: RequestReader,
        classes: SlaClasses,
        metrics: Metrics,
        result_ttl_s: int,
        max_message_bytes: int,
        traces: JobTraces | None = None,
    ) -> None:
        self._calls, self._store, self._follower, self._hub = calls, store, follower, hub
        self._dispatcher, self._reader, self._metrics = dispatcher, reader, metrics
        self._classes, self._neighbours = classes, neighbours
        self._ttl_ms = result_ttl_s * 1000
        self._max_message_bytes, self._traces = max_message_bytes, traces
        self._finals = Finals(self._shown)
        self._attached: Counter[tuple[str, str]] = Counter()
        self._tidying: set[asyncio.Task[None]] = set()

    async def SubmitJob(self, request: jobs_pb2.SubmitJobRequest, context: Any) -> jobs_pb2.SubmitJobResponse:
        """Accept a job and return at once."""

        async def handle(tenant: Tenant) -> jobs_pb2.SubmitJobResponse:
            record, created, spec = await self._submit(tenant, request.job_id, request.spec, context)
            shown = await self._shown(record, output=False, spec=spec)
            return jobs_pb2.SubmitJobResponse(job=shown, attached=not created)

        return await self._calls.answer("SubmitJob", context, handle)

    async def GenerateStream(self, request: jobs_pb2.GenerateStreamRequest, context: Any) -> None:
        """Submit a job and stream it; an attached one ends with its stream."""

        async def handle(tenant: Tenant) -> None:
            # A stream's deadline is the job's, where the job lives and dies with the stream.
            left_s = None if request.detached else context.time_remaining()
            record, created, _ = await self._submit(tenant, request.job_id, request.spec, context, left_s)
            name = (record.tenant, record.job_id)
            # Only what a stream brought to life ends with its last stream; never a job that was submitted.
            attached = not request.detached and (created or self._attached[name] > 0)
            self._attached[name] += attached
            keep = False
            try:
                events = self._follower.follow(tenant.name, record.job_id, 0, announce=True)
                keep = await self._write(name, events, context, jobs_pb2.GenerateStreamResponse)
            except UnavailableError:
                keep = True  # Our fault, not the client's wish: it may come back to the job under its id.
                raise
            finally:
                self._attached[name] -= attached
                last = not self._attached[name]
                if last:
                    del self._attached[name]
                # Who is not let in any more did not ask for the end either: accepted jobs run.
                keep = keep or self._calls.expelled(context)
                if attached and last and not keep and not self._dispatcher.draining:
                    self._tidy(self._cancel(*name))

        await self._calls.stream("GenerateStream", context, handle)

    async def WatchJob(self, request: jobs_pb2.WatchJobRequest, context: Any) -> None:
        """Stream a job from a token on."""

        async def handle(tenant: Tenant) -> None:
            name = (tenant.name, _named(request.job_id))
            events = self._follower.follow(
                *name, request.from_token_index, choice_indexes=request.choice_from_token_indexes
            )
            await self._write(name, events, context, jobs_pb2.WatchJobResponse)

        await self._calls.stream("WatchJob", context, handle)

    async def GetJob(self, request: jobs_pb2.GetJobRequest, context: Any) -> jobs_pb2.GetJobResponse:
        """Return a job as it stands."""

        async def handle(tenant: Tenant) -> jobs_pb2.GetJobResponse:
            record = await self._store.get(tenant.name, _named(request.job_id))
            return jobs_pb2.GetJobResponse(job=await self._shown(record))

        return await self._calls.answer("GetJob", context, handle)

    async def ListJobs(self, request: jobs_pb2.ListJobsRequest, context: Any) -> jobs_pb2.ListJobsResponse:
        """List the tenant's jobs, newest first, without their output."""

        async def handle(tenant: Tenant) -> jobs_pb2.ListJobsResponse:
            size = min(request.page_size or DEFAULT_PAGE, MOST_PAGE)
            page = await self._store.list_jobs(tenant.name, cursor=request.page_token, limit=size)
            wanted = {stored for shown in request.states for stored in convert.STORED_STATES.get(shown, ())}
            now_ms = self._store.now_ms
            kept = [record for record in page.jobs if not wanted or record.state in wanted]
            jobs = [convert.job(record, now_ms=now_ms) for record in kept]
            return jobs_pb2.ListJobsResponse(jobs=jobs, next_page_token=page.next_cursor)

        return await self._calls.answer("ListJobs", context, handle)

    async def UpdateJob(self, request: jobs_pb2.UpdateJobRequest, context: Any) -> jobs_pb2.UpdateJobResponse:
        """Lower the class of a job, or set its deadline."""

        async def handle(tenant: Tenant) -> jobs_pb2.UpdateJobResponse:
            job_id = _named(request.job_id)
            deadline_ms = None
            if request.HasField("deadline"):
                deadline_ms = ranks.deadline_ms(request.deadline, "deadline")
            if not request.sla_class and deadline_ms is None:
                raise InvalidRequestError("nothing to change: name sla_class or deadline", field="sla_class")
            record = await self._store.get(tenant.name, job_id)
            sla_class = record.sla_class
            if request.sla_class:
                sla_class = ranks.lower_class(request.sla_class, sla_class, tenant, self._classes)
            record = await self._store.update(
                tenant.name,
                job_id,
                present_class=record.sla_class,
                sla_class=sla_class,
                deadline_ms=deadline_ms,
                longest_queue_ms=self._classes.get(sla_class).longest_queue_ms if request.sla_class else 0,
            )
            self._dispatcher.update(tenant.name, job_id)
            return jobs_pb2.UpdateJobResponse(job=await self._shown(record, output=False))

        return await self._calls.answer("UpdateJob", context, handle)

    async def CancelJob(self, request: jobs_pb2.CancelJobRequest, context: Any) -> jobs_pb2.CancelJobResponse:
        """End a job; the answer shows it final if it runs here."""

        async def handle(tenant: Tenant) -> jobs_pb2.CancelJobResponse:
            job_id = _named(request.job_id)
            record = await self._cancel(tenant.name, job_id)
            return jobs_pb2.CancelJobResponse(job=await self._shown(record))

        return await self._calls.answer("CancelJob", context, handle)

    async def GetTokenTexts(
        self, request: jobs_pb2.GetTokenTextsRequest, context: Any
    ) -> jobs_pb2.GetTokenTextsResponse:
        """Say what tokens stand for."""

        async def handle(_: Tenant) -> jobs_pb2.GetTokenTextsResponse:
            read = self._reader.token_texts
            # The largest call takes a tenth of a second.
            few = len(request.token_ids) <= FEW_TOKENS
            ids, model = request.token_ids, request.model
            texts = read(ids, model) if few else await asyncio.to_thread(read, ids, model)
            return jobs_pb2.GetTokenTextsResponse(texts=texts)

        return await self._calls.answer("GetTokenTexts", context, handle)

    async def finish_tidying(self) -> None:
        """Wait for the cancels that closed streams left behind."""
        await asyncio.gather(*self._tidying, return_exceptions=True)

    async def _submit(
        self, tenant: Tenant, job_id: str, spec: types_pb2.JobSpec, context: Any, left_s: float | None = None
    ) -> tuple[JobRecord, bool, JobSpec]:
        if self._dispatcher.draining:
            raise UnavailableError(
                "this daemon is shutting down and takes no more jobs: submit to another daemon of its"
                " queue, or again later",
                reason="DRAINING",
            )
        size = spec.ByteSize()
        if size > self._max_message_bytes:
            raise RequestTooLargeError(
                f"the request has {size} bytes; the limit is {self._max_message_bytes}",
                reason="MESSAGE_TOO_LARGE",
                field="spec",
                limit=self._max_message_bytes,
            )
        job_id = check_job_id(job_id)
        try:
            return await self._accept(tenant, job_id, spec, left_s, self._trace(context))
        except BatondError as error:
            if quota := error.details.get("quota"):
                self._metrics.quota_refusals.labels(self._metrics.tenant(tenant.name), quota).inc()
            raise

    async def _accept(
        self, tenant: Tenant, job_id: str, spec: types_pb2.JobSpec, left_s: float | None, trace: str
    ) -> tuple[JobRecord, bool, JobSpec]:
        """Give the record, whether it was made now, and the spec as this call resolved it."""
        try:
            if self._reader.is_quick(spec):
                checked = self._reader.read(spec, tenant)
            else:
                checked = await asyncio.to_thread(self._reader.read, spec, tenant)
        except NotFoundError as error:  # Another model.
            raise await self._neighbours.not_served(error) from error
        limit = checked.limit.within(left_s)
        record, created = await self._store.submit(
            tenant.name,
            job_id,
            deadline_ms=limit.deadline_ms,
            deadline_in_ms=limit.timeout_ms,
            longest_queue_ms=self._classes.get(checked.sla_class).longest_queue_ms,
            limits=tenant.limits,
            spec_json=msgspec.json.encode(checked.spec),
            body_hash=checked.body_hash,
            sla_class=checked.sla_class,
            prompt_tokens=len(checked.spec.prompt_token_ids),
            choices=checked.spec.sampling.n,
            ttl_ms=self._ttl_ms,
            trace=trace,
        )
        if self._traces is not None and (kept := TraceContext.read(record.trace)) is not None:
            bind_ids(trace_id=kept.trace_id)
        if created:
            self._metrics.jobs_submitted.labels(self._metrics.tenant(tenant.name), checked.sla_class).inc()
            self._dispatcher.wake()
        return record, created, checked.spec

    def _trace(self, context: Any) -> str:
        """A new job's place in its caller's trace, as it is kept with the job."""
        return self._traces.begin(context.invocation_metadata() or ()).kept() if self._traces else ""

    async def _write(
        self,
        name: tuple[str, str],
        events: AsyncIterator[FollowEvent],
        context: Any,
        response: Callable[..., Any],
    ) -> bool:
        """Write the events of a job, named by tenant and id; returns whether the job ended."""
        sequence = 0
        async for event in events:
            ended = await self._finals.show(event.record) if isinstance(event, Ended) else None
            prompt: Sequence[int] = ()
            if isinstance(event, Chunk) and event.prompt_logprobs is not None:
                prompt = (await self._store.get_spec(*name)).prompt_token_ids
            answer = response()
            shown = answer.event
            convert.stream_event(event, sequence, ended=ended, prompt_token_ids=prompt, shown=shown)
            if isinstance(event, GotRow):
                waited_s = convert.queue_time_s(await self._store.get(*name), self._store.now_ms)
                shown.started.queue_time.CopyFrom(convert.duration(waited_s))
            await context.write(answer)
            sequence += 1
            if ended is not None:
                return True
        return False

    async def _cancel(self, tenant: str, job_id: str) -> JobRecord:
        record = await self._store.cancel(tenant, job_id)
        live = self._hub.get(tenant, job_id)
        if record.state.final or live is None:
            return record
        self._dispatcher.cancel(tenant, job_id)
        try:
            async with asyncio.timeout(CANCEL_WAIT_S):
                while not live.closed:
                    await live.wait_beyond(len(live.events))
        except TimeoutError:
            return record
        return await self._store.get(tenant, job_id)

    async def _shown(
        self, record: JobRecord, *, output: bool = True, spec: JobSpec | None = None
    ) -> types_pb2.Job:
        """Describe a job; a spec with the same labels and class asked for saves a look at its own."""
        if spec is None:
            spec = await self._store.get_spec(record.tenant, record.job_id)
        chunks: list[Chunk] = []
        if output:
            outputs = await self._store.read_choices(record.tenant, record.job_id, [0] * record.choices)
            chunks = [chunk for output_chunks in outputs for chunk in output_chunks]
        place = None
        if record.state is JobState.QUEUED:
            place = await self._store.place(record.tenant, record.job_id)
        return convert.job(record, chunks, now_ms=self._store.now_ms, place=place, spec=spec)

    def _tidy(self, work: Awaitable[Any]) -> None:
        async def quietly() -> None:
            try:
                await work
            except BatondError:
                return  # Redis is away, or the job is gone: it ends as if nobody had asked.

        task = asyncio.get_running_loop().create_task(quietly())
        self._tidying.add(task)
        task.add_done_callback(self._tidying.discard)


def _named(job_id: str) -> str:
    if not job_id:
        raise InvalidRequestError("job_id is missing", field="job_id")
    return check_job_id(job_id)
