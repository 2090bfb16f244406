"""The paths of the live page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from batond.clients.gateway.page import frames
from batond.clients.gateway.page.static import INDEX, SECURITY_HEADERS, Assets
from batond.clients.gateway.page.watch import Watch
from batond.clients.gateway.problems import ApiError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request
    from starlette.routing import BaseRoute
    from starlette.types import Receive, Scope, Send

    from batond.clients.gateway.page.viewer import Viewer
    from batond.clients.gateway.settings import GatewaySettings

PATH: Final = "/live"
_STREAM_HEADERS: Final = {
    **SECURITY_HEADERS,
    "cache-control": "no-store",
    "x-accel-buffering": "no",  # nginx would hold events back.
}


class Page:
    """Answers the page's requests.

    Args:
        settings: The gateway's.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._daemons = settings.daemons
        self._assets = Assets()
        self._watches = [Watch(address, settings) for address in settings.daemons]

    def routes(self) -> list[BaseRoute]:
        """The paths: the page itself, its files, its events."""
        inner = [
            Route("/", self.index),
            Route("/api/events", self.events),
            Route("/{name}", self.asset),
        ]
        return [Route("/", _to_page), Route(PATH, _to_page), Mount(PATH, routes=inner)]

    def end(self) -> None:
        """End all streams, which would go on for ever; pages try again by themselves."""
        for watch in self._watches:
            watch.end()

    async def index(self, request: Request) -> Response:
        """The page itself."""
        return await self.asset(request)

    async def asset(self, request: Request) -> Response:
        """One of its files."""
        found = self._assets.answer(request, request.path_params.get("name", INDEX))
        if found is None:
            raise HTTPException(404, "there is no such file")
        return found

    async def events(self, request: Request) -> Response:
        """The batch of one daemon, as server-sent events, for administrators.

        Raises:
            ApiError: There is no such daemon, or too many look on.
            BatondClientError: The daemon refuses the caller, or is away.
        """
        place = request.query_params.get("daemon", "0")
        if not place.isdecimal() or not place.isascii() or int(place[:9]) >= len(self._watches):
            raise ApiError(404, "there is no such daemon", param="daemon", code="not_found")
        watch = self._watches[int(place)]
        viewer = await watch.join(request.headers)
        return _Stream(self._body(viewer, int(place)), watch, viewer)

    async def _body(self, viewer: Viewer, place: int) -> AsyncIterator[bytes]:
        yield frames.hello(self._daemons, place)
        async for event in viewer.events():
            yield event


class _Stream(StreamingResponse):
    """Events until either side ends them; the viewer leaves even if nothing could be sent."""

    def __init__(self, body: AsyncIterator[bytes], watch: Watch, viewer: Viewer) -> None:
        super().__init__(body, headers=_STREAM_HEADERS, media_type="text/event-stream")
        self._watch, self._viewer = watch, viewer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._watch.leave(self._viewer)


async def _to_page(request: Request) -> Response:
    """Leads to the page; relative, so that it also does behind a proxy with a path of its own."""
    del request
    return RedirectResponse("live/", 307)
