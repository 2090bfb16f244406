"""The gateway on a socket."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import uvicorn

from batond.clients.gateway.app import create_app

if TYPE_CHECKING:
    import socket

    from batond.clients.gateway.page import Page
    from batond.clients.gateway.settings import GatewaySettings

_log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """Says where it listens, once it does; at the end, ends what would never end by itself."""

    page: Page

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            for server in self.servers:
                for one in server.sockets:
                    _log.warning("listening on %s", one.getsockname())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.page.end()
        await super().shutdown(sockets=sockets)


def make_server(settings: GatewaySettings, **options: Any) -> uvicorn.Server:
    """Make the server, to be run; `options` as in `serve`."""
    app = create_app(settings)
    server = _Server(uvicorn.Config(app, lifespan="on", server_header=False, **options))
    server.page = app.state.page
    return server


def serve(settings: GatewaySettings, **options: Any) -> int:
    """Serve until SIGTERM or SIGINT; open requests have their time to end.

    Args:
        settings: What to do.
        options: uvicorn's own: where to listen, how long to wait at the end, what to log.

    Returns:
        The exit status: 0, or 1 if it could not start.
    """
    server = make_server(settings, **options)
    server.run()
    return 0 if server.started else 1
