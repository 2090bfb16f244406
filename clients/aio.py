"""The asyncio client: the same calls as the synchronous one, to be awaited."""

from __future__ import annotations

import asyncio
import copy
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Self, Unpack

import grpc

from batond.clients import build, convert, errors, outcome
from batond.clients.aio_admin import AsyncAdminCalls
from batond.clients.aio_stream import AsyncJobStream
from batond.clients.fleet import Fleet, open_async
from batond.clients.follow import Follow
from batond.clients.model import JobInfo, JobPage, JobState, ServerInfo
from batond.clients.retry import RetryPolicy
from batond.clients.tracing import with_trace
from batond.clients.transport import DEFAULT_TARGET, DEFAULT_TIMEOUT_S, ClientTLS
from batond.v1 import admin_pb2, admin_pb2_grpc, jobs_pb2, jobs_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
    from datetime import datetime

    from batond.clients.build import JobOptions
    from batond.clients.follow import Request
    from batond.clients.tracing import Metadata


class AsyncClient(AsyncAdminCalls):
    """Talks to a daemon, or to several that share a queue, as `Client` does; see there for the arguments.

    It belongs to the event loop it was made in; tasks may share it.

    Raises:
        ValueError: The token would cross a network in plain text, or might go to anybody.
    """

    def __init__(
        self,
        target: str | Sequence[str] = DEFAULT_TARGET,
        *,
        token: str | None = None,
        tls: ClientTLS | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry: RetryPolicy | None = None,
        allow_plaintext_token: bool = False,
        follow_routing: bool = False,
    ) -> None:
        self._fleet = Fleet(
            target,
            open_async,
            token=token,
            tls=tls,
            allow_plaintext_token=allow_plaintext_token,
            follow_routing=follow_routing,
        )
        self._metadata = self._fleet.metadata
        self._timeout_s = timeout_s
        self._retry = retry or RetryPolicy()
        self._jobs = jobs_pb2_grpc.JobServiceStub(self._fleet)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._fleet)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection and every stream on it."""
        await asyncio.gather(*(channel.close() for channel in self._fleet.closing()))

    def calling(self, token: str | None, metadata: Sequence[tuple[str, str]] = ()) -> Self:
        """Gives a client that calls over the same connections in another's name, as gateways do.

        It is cheap, and lives as long as this one, which alone is to be closed.

        Args:
            token: The other tenant's; None calls without one.
            metadata: What else every call carries, such as `traceparent`.

        Raises:
            ValueError: No header can carry the token, or it would cross a network in plain text.
        """
        other = copy.copy(self)
        other._metadata = (*self._fleet.bearer(token), *metadata)  # noqa: SLF001 - of its own class
        return other

    # -- jobs -----------------------------------------------------------------------------------------------

    async def submit(self, prompt: str | None = None, **options: Unpack[JobOptions]) -> JobInfo:
        """Submits a job and returns at once; it runs whether anybody watches or not.

        Args:
            prompt: The prompt as text; or give `messages` or `token_ids`.
            options: See `JobOptions`.

        Raises:
            InvalidRequestError: Something in the request can't be.
            AlreadyExistsError: The job id belongs to a job with another body.
            BatondClientError: See `batond.clients.errors`.
        """
        response = await self._call(self._jobs.SubmitJob, build.submit(prompt, options))
        return convert.job(response.job)

    def generate(
        self,
        prompt: str | None = None,
        *,
        detached: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[JobOptions],
    ) -> AsyncJobStream:
        """Submits a job and streams its events.

        Args:
            prompt: As in `submit`.
            detached: Let the job go on when the stream is closed early; by default that cancels it. A network
                that breaks looks like a close to the daemon, so jobs that must survive one are best detached.
            timeout_s: Longest time of the whole stream; None is no bound.
            options: See `JobOptions`.

        Returns:
            The stream; nothing is sent before its first event is asked for. Use it as a context manager.
        """
        request = build.generate(prompt, options, detached=detached)
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        trip = self._fleet.trip(self._retry, request=request)
        follow = Follow(request.job_id, self._retry, trip, generation=request, end_s=end_s)
        return AsyncJobStream(follow, partial(self._start, with_trace(self._metadata)), self.cancel)

    async def generate_text(
        self, prompt: str | None = None, *, timeout_s: float | None = None, **options: Unpack[JobOptions]
    ) -> str:
        """Submits a job, waits for it and returns its text.

        Raises:
            JobFailedError: The job can't be finished.
            JobCancelledError: Somebody cancelled it.
        """
        async with self.generate(prompt, timeout_s=timeout_s, **options) as stream:
            return outcome.succeeded(await stream.last_job()).text

    def watch(
        self,
        job_id: str,
        from_token_index: int = 0,
        *,
        choice_from_token_indexes: Mapping[int, int] | None = None,
        timeout_s: float | None = None,
    ) -> AsyncJobStream:
        """Streams the events of a job from a token on. Closing the stream changes nothing.

        Args:
            job_id: Which.
            from_token_index: First token wanted; of each choice, if there are several.
            choice_from_token_indexes: First token wanted of single choices.
            timeout_s: Longest time of the whole stream; None is no bound.
        """
        follow = Follow.watching(
            job_id,
            self._retry,
            self._fleet.trip(self._retry),
            from_token_index=from_token_index,
            choice_from_token_indexes=choice_from_token_indexes,
            timeout_s=timeout_s,
        )
        return AsyncJobStream(follow, partial(self._start, with_trace(self._metadata)), self.cancel)

    async def wait(self, job_id: str, *, timeout_s: float | None = None) -> JobInfo:
        """Waits until a job is final, whatever its end.

        Raises:
            ClientDeadlineError: `timeout_s` is over; the job goes on.
        """
        async with self.watch(job_id, timeout_s=timeout_s) as stream:
            return await stream.last_job()

    async def result(self, job_id: str, *, timeout_s: float | None = None) -> JobInfo:
        """Waits for a job that is expected to succeed.

        Raises:
            JobFailedError: The job can't be finished.
            JobCancelledError: Somebody cancelled it.
        """
        return outcome.succeeded(await self.wait(job_id, timeout_s=timeout_s))

    async def get(self, job_id: str) -> JobInfo:
        """Returns a job as it stands."""
        response = await self._call(self._jobs.GetJob, build.named(jobs_pb2.GetJobRequest, job_id=job_id))
        return convert.job(response.job)

    async def list_page(
        self, states: Iterable[JobState] = (), *, page_size: int = 0, page_token: str = ""
    ) -> JobPage:
        """Returns one page of the tenant's jobs, newest first, without their output."""
        response = await self._call(self._jobs.ListJobs, build.list_jobs(states, page_size, page_token))
        return JobPage(
            jobs=tuple(convert.job(job) for job in response.jobs), next_page_token=response.next_page_token
        )

    async def list(self, states: Iterable[JobState] = (), *, page_size: int = 0) -> AsyncIterator[JobInfo]:
        """Yields the tenant's jobs, newest first, without their output; fetches pages as they are needed."""
        states, page_token = tuple(states), ""
        while True:
            page = await self.list_page(states, page_size=page_size, page_token=page_token)
            for job in page.jobs:
                yield job
            page_token = page.next_page_token
            if not page_token:
                return

    async def update(
        self, job_id: str, *, sla_class: str | None = None, deadline: datetime | None = None
    ) -> JobInfo:
        """Gives a job a less urgent class, or another deadline; one that runs is ranked anew.

        Raises:
            PermissionDeniedError: The class is more urgent than the present one, or not the tenant's.
            WrongStateError: The job has ended.
        """
        request = build.update_job(job_id, sla_class, deadline)
        response = await self._call(self._jobs.UpdateJob, request)
        return convert.job(response.job)

    async def cancel(self, job_id: str) -> JobInfo:
        """Ends a job; one that is final already is returned as it is."""
        response = await self._call(
            self._jobs.CancelJob, build.named(jobs_pb2.CancelJobRequest, job_id=job_id)
        )
        return convert.job(response.job)

    async def token_texts(self, token_ids: Sequence[int], *, model: str = "") -> tuple[bytes, ...]:
        """Returns which bytes tokens stand for, each by itself: UTF-8, or a part of a character.

        Raises:
            InvalidRequestError: Too many, or one that the model does not have.
        """
        response = await self._call(self._jobs.GetTokenTexts, build.token_texts(token_ids, model))
        return tuple(response.texts)

    # -- the daemon -----------------------------------------------------------------------------------------

    async def server_info(self) -> ServerInfo:
        """Returns what the daemon serves, and within which limits."""
        return convert.server_info(
            await self._call(self._admin.GetServerInfo, admin_pb2.GetServerInfoRequest())
        )

    def _start(self, metadata: Metadata, place: int, request: Request, timeout_s: float | None) -> Any:
        starts = isinstance(request, jobs_pb2.GenerateStreamRequest)
        method = self._jobs.GenerateStream if starts else self._jobs.WatchJob
        return method.at(place)(request, timeout=timeout_s, metadata=metadata)

    async def _call(self, method: Any, request: object, *, attempts: int | None = None) -> Any:
        """Makes a call that answers once, again if that may help, within the client's time-out."""
        end_s = time.monotonic() + self._timeout_s
        metadata = with_trace(self._metadata)
        trip = self._fleet.trip(self._retry, attempts, request)
        while True:
            began_s = time.monotonic()
            timeout_s = trip.timeout_s(end_s - began_s)
            try:
                answer = await method.at(trip.place)(request, timeout=timeout_s, metadata=metadata)
            except grpc.RpcError as raised:
                now_s = time.monotonic()
                error = errors.from_rpc_error(raised, time_is_over=now_s >= began_s + timeout_s)
                try:
                    delay_s = trip.after(error)
                except errors.BatondClientError as final:
                    raise final from raised
                if now_s + delay_s >= end_s:
                    raise error from raised
            else:
                trip.arrived()
                return answer
            await asyncio.sleep(delay_s)
