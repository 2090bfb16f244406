"""A bound on what callers send, before anything is read into memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from batond.clients.gateway.problems import ApiError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from batond.clients.gateway.settings import GatewaySettings


class BodyLimit:
    """Refuses bodies that are too large, by their announced length or as soon as they are.

    Args:
        app: What it stands before.
        settings: Say how large.
    """

    def __init__(self, app: ASGIApp, settings: GatewaySettings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._settings.max_body_bytes
        error = ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced) > limit:
            # The rest is not read: the connection can't be used again.
            headers = {**error.headers, "connection": "close"}
            await JSONResponse(error.body, error.status, headers)(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise error
            return message

        await self._app(scope, counted, send)
