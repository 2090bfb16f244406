"""Keeps the gRPC server listening: at an error in its loop it ends, and the daemon would live on unheard.

One such error any stranger could cause; `unknown_calls` keeps that away. A new server takes the old one's
addresses at once; streams that are open stay with the old one, which serves them to their end.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from batond.daemon.config_base import split_address
from batond.daemon.telemetry.logging import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import grpc

#: So long nobody is let in. gRPC itself says nothing: `wait_for_termination` hangs after such an end.
LOOK_EVERY_S = 0.25

_log = get_logger(__name__)


class Serving:
    """One server after the other.

    Args:
        build: Makes a server, bound to its addresses.
        listen: Its addresses.
        on_start: Called after each start.
    """

    def __init__(
        self, build: Callable[[], grpc.aio.Server], listen: Sequence[str], on_start: Callable[[], None]
    ) -> None:
        self._build, self._listen, self._on_start = build, tuple(listen), on_start
        # The last one listens. Those before it are kept: gRPC dies if one is forgotten that has streams.
        self._servers = [build()]

    async def start(self) -> None:
        """Start the first server."""
        await self._servers[-1].start()
        self._on_start()

    async def run(self) -> None:
        """Put a new server in the place of each that listens no more; until cancelled.

        Raises:
            ConfigError: An address can't be bound again.
        """
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if not await self._listens():
                self._servers.append(self._build())
                await self.start()
                _log.warning("server_replaced", why="gRPC listened no more", servers=len(self._servers))

    async def stop(self, grace_s: float) -> None:
        """End all servers; streams may end by themselves for a while."""
        *old, last = self._servers
        await last.stop(grace_s)
        for server in old:
            with contextlib.suppress(Exception):  # It ends with the error that ended its loop.
                async with asyncio.timeout(grace_s):
                    await server.stop(grace_s)

    async def _listens(self) -> bool:
        """Whether all addresses take connections."""
        for address in self._listen:
            try:
                if address.startswith("unix:"):
                    _, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
                else:
                    _, writer = await asyncio.open_connection(*split_address(address))
            except (ConnectionRefusedError, FileNotFoundError):
                return False
            except OSError:
                continue  # Too many files are open, or the like: that says nothing of the server.
            writer.close()
        return True
