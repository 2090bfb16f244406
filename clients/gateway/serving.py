"""The gateway on a socket."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import uvicorn

from batond.clients.gateway.app import create_app

if TYPE_CHECKING:
    import socket

    from batond.clients.gateway.settings import GatewaySettings

_log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """Says where it listens, once it does."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            for server in self.servers:
                for one in server.sockets:
                    _log.warning("listening on %s", one.getsockname())


def serve(settings: GatewaySettings, **options: Any) -> int:
    """Serve until SIGTERM or SIGINT; open requests have their time to end.

    Args:
        settings: What to do.
        options: uvicorn's own: where to listen, how long to wait at the end, what to log.

    Returns:
        The exit status: 0, or 1 if it could not start.
    """
    config = uvicorn.Config(create_app(settings), lifespan="on", server_header=False, **options)
    server = _Server(config)
    server.run()
    return 0 if server.started else 1
