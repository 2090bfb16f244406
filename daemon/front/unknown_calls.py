"""Keeps calls whose path is no text from gRPC's loop, which they end, or the process with it (grpcio 1.85).

Newer grpcio asks for the calls of each registered method, and for all others by one question more, whose
path it decodes before anything else. All methods here are registered, so whatever answers that question is
unknown: it is refused, and its path is never looked at. Older grpcio has no such question: it is left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from typing import Any

import grpc

#: What grpc.aio itself is made of; it has no types.
_cygrpc: Any = importlib.import_module("grpc._cython.cygrpc")
_HOOK = "_make_request_call_future"


def careful_server(**options: Any) -> grpc.aio.Server:
    """The same as `grpc.aio.server`."""
    usual: Any = _cygrpc.AioServer
    if not hasattr(usual, _HOOK):
        return grpc.aio.server(**options)

    class CarefulServer(usual):  # type: ignore[misc] # its base is known at run time only
        """Answers unknown calls itself."""

        def _make_request_call_future(self, method: bytes | None) -> asyncio.Future[Any]:
            if method is not None:
                future: asyncio.Future[Any] = super()._make_request_call_future(method)
                return future
            return asyncio.get_running_loop().create_task(self._refuse_unknown())

        async def _refuse_unknown(self) -> None:
            refusals = set()
            while True:
                call = await self._request_call()
                refusal = asyncio.get_running_loop().create_task(_refuse(call))
                refusals.add(refusal)
                refusal.add_done_callback(refusals.discard)

    _cygrpc.AioServer = CarefulServer
    try:
        return grpc.aio.server(**options)
    finally:
        _cygrpc.AioServer = usual


async def _refuse(call: Any) -> None:
    context = _cygrpc._ServicerContext(call, None, None, asyncio.get_running_loop())  # noqa: SLF001 - there is no other way to answer
    with contextlib.suppress(
        grpc.aio.AbortError, grpc.aio.InternalError
    ):  # It is done; or the client is gone.
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
