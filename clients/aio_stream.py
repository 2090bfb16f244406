"""The events of one job for asyncio callers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, Self

import grpc

from batond.clients import errors
from batond.clients.model import Event, Finished, JobInfo

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from batond.clients.follow import Follow, Request


class AsyncJobStream:
    """The events of one job, over any number of reconnections.

    Iterate it in one task; close it from any, or use it as an async context manager, which also closes it
    when the task is cancelled. Closing a generation that isn't final cancels the job, unless it was started
    detached; closing a watch changes nothing.
    """

    def __init__(
        self,
        follow: Follow,
        start: Callable[[int, Request, float | None], Any],
        cancel: Callable[[str], Awaitable[object]],
    ) -> None:
        self._follow = follow
        self._start = start
        self._cancel = cancel
        self._call: Any = None
        self._closed = asyncio.Event()

    @property
    def job_id(self) -> str:
        """The job's id, known before the first event."""
        return self._follow.job_id

    @property
    def next_token_index(self) -> int:
        """Index of the first token not seen yet: where `watch` would go on."""
        return self._follow.cursor.next_token_index

    @property
    def next_token_indexes(self) -> dict[int, int]:
        """The same for each choice seen: `watch` takes it as `choice_from_token_indexes`."""
        return dict(self._follow.cursor.next_token_indexes)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        """Waits for the next event.

        Raises:
            StopAsyncIteration: The job is final, or this stream is closed.
            CallCancelledError: Another task closed the stream meanwhile.
            BatondClientError: See `batond.clients.errors`.
        """
        if self._closed.is_set():
            raise StopAsyncIteration
        while True:
            response, cause = await self._read()
            if response is not None:
                event = self._follow.accept(response)
                if event is not None:
                    return event
            elif self._follow.cursor.finished:
                raise StopAsyncIteration
            else:
                await self._wait_to_reconnect(cause)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the stream."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._call is not None:
            self._call.cancel()
        if self._follow.needs_cancel():
            with contextlib.suppress(errors.BatondClientError):
                await self._cancel(self.job_id)

    async def last_job(self) -> JobInfo:
        """Reads the stream to its end and returns the job in its final state.

        Raises:
            CallCancelledError: The stream was closed before.
        """
        async for event in self:
            if isinstance(event, Finished):
                return event.job
        raise errors.CallCancelledError(f"the stream of job {self.job_id} was closed before its end")

    async def _read(self) -> tuple[Any, grpc.RpcError | None]:
        """Reads one message; (None, error) if the call is over, without an error if it ended cleanly."""
        if self._call is None:
            timeout_s = self._follow.timeout_s(time.monotonic())
            self._call = self._start(self._follow.place, self._follow.next_request(), timeout_s)
        try:
            response = await self._call.read()
        except grpc.RpcError as raised:
            return None, raised
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed.is_set() and task is not None and not task.cancelling():
                # gRPC raises this for a call that was cancelled, too; here nobody cancelled the task.
                return None, None
            raise
        return (None if response is grpc.aio.EOF else response), None

    async def _wait_to_reconnect(self, cause: grpc.RpcError | None) -> None:
        """Waits as long as is right after the loss of the call; raises if another try can't help."""
        self._call = None
        if self._closed.is_set():
            raise errors.CallCancelledError("the stream was closed") from cause
        now_s = time.monotonic()
        if cause is None:
            error: errors.BatondClientError = self._follow.ended_early()
        else:
            error = errors.from_rpc_error(cause, time_is_over=self._follow.time_is_over(now_s))
        try:
            delay_s = self._follow.broken(error, now_s)
        except errors.BatondClientError as final:
            raise final from cause
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), delay_s)
            raise errors.CallCancelledError("the stream was closed while it reconnected") from cause
