"""Bytes that are no message are an INVALID_ARGUMENT; gRPC's own answer is UNKNOWN and a traceback."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from batond.daemon.errors import InvalidRequestError
from batond.daemon.front.status import to_status

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable


class _Malformed:
    """Stands where a message should."""


_MALFORMED = _Malformed()


class RefuseMalformed(grpc.aio.ServerInterceptor):
    """Wraps every handler, those of health and reflection too; whatever these raise gets a status."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        return None if handler is None else _guarded(handler)


def _guarded(handler: Any) -> Any:
    """The same handler for requests that can be read."""
    decode = _lenient(handler.request_deserializer)
    if handler.request_streaming:
        return handler._replace(request_deserializer=decode, stream_stream=_many(handler.stream_stream))
    kind = "unary_stream" if handler.response_streaming else "unary_unary"
    return handler._replace(request_deserializer=decode, **{kind: _one(getattr(handler, kind))})


def _lenient(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(raw: bytes) -> Any:
        try:
            return decode(raw)
        except DecodeError:
            return _MALFORMED

    return read


def _one(handle: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    """For a coroutine that takes one request."""

    async def guarded(request: Any, context: Any) -> Any:
        if request is _MALFORMED:
            await _refuse(context, _no_message())
        try:
            return await handle(request, context)
        except grpc.aio.AbortError:
            raise  # It has its status.
        except Exception as error:  # noqa: BLE001 - nothing may leave without a status
            await _refuse(context, error)

    return guarded


def _many(handle: Callable[[Any, Any], AsyncIterator[Any]]) -> Callable[[Any, Any], AsyncIterator[Any]]:
    """For a generator that takes a stream of requests."""

    async def readable(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            if request is _MALFORMED:
                await _refuse(context, _no_message())
            yield request

    async def guarded(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        try:
            async for response in handle(readable(requests, context), context):
                yield response
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            await _refuse(context, error)

    return guarded


def _no_message() -> InvalidRequestError:
    return InvalidRequestError(
        "the request can't be read: it is no message of this call, or was damaged on its way",
        reason="BAD_MESSAGE",
    )


async def _refuse(context: Any, error: Exception) -> NoReturn:
    if isinstance(error, grpc.aio.InternalError):
        raise asyncio.CancelledError from error  # Not even a status reaches the client: it is gone.
    await context.abort_with_status(to_status(error))
    raise RuntimeError("abort returned")
