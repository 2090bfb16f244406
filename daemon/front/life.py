"""The front from its first call to the end of its drain."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from grpc_health.v1 import health

from batond.daemon.config_base import split_address
from batond.daemon.front import collector
from batond.daemon.front.local_admin import AdminSocket, user_ids
from batond.daemon.front.server import build_admin_server, build_server, keep_health, open_sockets
from batond.daemon.front.serving import Serving
from batond.daemon.front.tasks import end_all, first_of
from batond.daemon.telemetry.logging import get_logger

if TYPE_CHECKING:
    from batond.daemon.config import Settings
    from batond.daemon.front.addresses import HeldAddresses
    from batond.daemon.front.assembly import Assembly
    from batond.daemon.front.signals import Stop
    from batond.daemon.telemetry.systemd import Notifier

WATCHDOG_EVERY_S: Final = 0.5
CLOSE_STREAMS_S: Final = 1.0

_log = get_logger(__name__)


class Life:
    """Serves until told to stop, then drains.

    Args:
        settings: To begin with.
        parts: What is put to work.
        notifier: Tells systemd.
        addresses: Held until the servers take them.
    """

    def __init__(
        self, settings: Settings, parts: Assembly, notifier: Notifier, addresses: HeldAddresses
    ) -> None:
        self._settings, self._parts, self._notifier = settings, parts, notifier
        self._addresses = addresses

    async def run(self, stop: Stop, reload: asyncio.Event, engine: asyncio.Task[None]) -> None:
        """Serve until told to stop, then drain."""
        parts, notifier = self._parts, self._notifier
        await parts.book.load()  # Before anybody can call.
        collector.settle()
        health_servicer = health.aio.HealthServicer()
        self._addresses.free_ports()
        serving = Serving(
            lambda: build_server(self._settings, parts.jobs, parts.admin, health_servicer, parts.tls),
            self._settings.server.listen,
            lambda: open_sockets(self._settings.server.listen),
        )
        parts.keeper.start()
        work = self._work(health_servicer)
        stack = contextlib.AsyncExitStack()
        try:
            await serving.start()
            await self._serve_administrators(stack)
            self._serve_metrics()
            notifier.ready(f"serving {parts.state.ready.model}")
            _log.info("serving", listen=list(self._settings.server.listen))
            work.append(asyncio.create_task(serving.run(), name="serving"))
            work.append(asyncio.create_task(self._reload(reload), name="reload"))
            await first_of(stop.wait(), parts.state.stop_requested.wait(), engine, *work)
            work.pop().cancel()  # No READY=1 after STOPPING=1.
            notifier.stopping("draining")
            timeout_s = self._drain_timeout_s
            jobs = parts.dispatcher.running_jobs
            _log.info("draining", why=stop.why or "Drain was called", jobs=jobs, timeout_s=timeout_s)
            parts.neighbours.changed()
            await parts.dispatcher.drain(timeout_s)
        finally:
            await serving.stop(CLOSE_STREAMS_S)
            await stack.aclose()
            await parts.jobs.finish_tidying()
            await end_all(work)
            await parts.neighbours.leave()
            if parts.traces is not None:
                await parts.traces.close()
            await asyncio.to_thread(parts.keeper.stop)
            parts.metrics.close()

    @property
    def _drain_timeout_s(self) -> float:
        """Asked for with the drain, or else as configured now."""
        asked_s = self._parts.state.drain_timeout_s
        return self._parts.reloader.settings.service.drain_timeout_s if asked_s is None else asked_s

    def _work(self, health_servicer: health.aio.HealthServicer) -> list[asyncio.Task[None]]:
        """Start what runs beside the server."""
        parts = self._parts
        return [
            asyncio.create_task(task, name=name)
            for name, task in (
                ("dispatcher", parts.dispatcher.run()),
                ("health", keep_health(health_servicer, parts.state)),
                ("watchdog", self._watchdog()),
                ("tenants", parts.book.run()),
                ("news", parts.feed.run()),
                ("registry", parts.neighbours.run()),
            )
        ]

    async def _serve_administrators(self, stack: contextlib.AsyncExitStack) -> None:
        """Serve the local administrators' socket, if it is wanted, until the stack is closed."""
        server = self._settings.server
        path = server.admin_socket_path
        if path is None:
            return
        relay = AdminSocket(path, user_ids(server.admin_users))
        stack.push_async_callback(relay.stop)
        inner = build_admin_server(self._parts.local_admin, relay.inner_address, server.max_message_bytes)
        stack.push_async_callback(inner.stop, CLOSE_STREAMS_S)
        await inner.start()
        await relay.start()
        _log.info("admin_socket", path=str(path))

    async def _reload(self, asked: asyncio.Event) -> None:
        """Reload whenever that is asked for; what was asked while the model was loaded is done at once."""
        while True:
            await asked.wait()
            asked.clear()
            self._notifier.reloading("reading the configuration")
            outcome = await self._parts.reloader.reload()
            self._notifier.ready(f"serving {self._parts.state.ready.model}; {outcome}")

    async def _watchdog(self) -> None:
        """Ping systemd as long as the engine is heard."""
        while True:
            if self._parts.state.live:
                self._notifier.alive()
            await asyncio.sleep(WATCHDOG_EVERY_S)

    def _serve_metrics(self) -> None:
        listen = self._settings.server.metrics_listen
        if listen:
            host, port = split_address(listen)
            _log.info("metrics", port=self._parts.metrics.serve(host, port))
