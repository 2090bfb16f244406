"""The front process, from its first line of log to its exit."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batond.daemon.config_load import engine_settings, redacted, resolve_model_path
from batond.daemon.front.addresses import HeldAddresses
from batond.daemon.front.assembly import Assembly
from batond.daemon.front.engine_link import ENGINE_COMMAND, EngineLink
from batond.daemon.front.engine_listener import EXTEND_START_S, EngineListener
from batond.daemon.front.life import Life
from batond.daemon.front.redis_access import Clients, redis_server
from batond.daemon.front.signals import on_signals, tell_stop
from batond.daemon.front.tasks import first_of
from batond.daemon.front.text import load_tokenizer
from batond.daemon.front.tls import read_tls
from batond.daemon.queue import EmbeddedRedis, check_target
from batond.daemon.queue.keys import Keys
from batond.daemon.telemetry.logging import get_logger
from batond.daemon.telemetry.systemd import Notifier
from batond.daemon.telemetry.tracing import check_tracing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from batond.daemon.config import ServerSettings, Settings
    from batond.daemon.front.text import Tokenizer
    from batond.daemon.wire.messages import Ready

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What measurements and tests put others in the place of.

    Attributes:
        engine_command: Starts the engine process.
        load_tokenizer: Loads the tokenizer of a model's folder or file.
    """

    engine_command: Sequence[str] = ENGINE_COMMAND
    load_tokenizer: Callable[[Path], Tokenizer] = load_tokenizer


async def serve(settings: Settings, reread: Callable[[], Settings], parts: Parts | None = None) -> None:
    """Run the daemon until it is told to stop.

    Args:
        settings: To begin with.
        reread: Reads them again, for SIGHUP; raises ConfigError.
        parts: None takes the real ones.

    Raises:
        BatondError: It can't start as configured, or can't go on.
    """
    parts = parts or Parts()
    _log.info("configuration", **redacted(settings))
    stop, reload = on_signals()
    tls_files = read_tls(settings.tls)  # A wrong key is found before the model is loaded.
    check_tracing(settings.tracing)
    addresses = HeldAddresses(_addresses(settings.server))
    notifier = Notifier()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(addresses.close)
        loading = asyncio.create_task(tell_stop(stop), name="tell_stop")
        stack.callback(loading.cancel)
        # The engine comes first: it takes longest, and no process is started once gRPC has threads.
        listener = EngineListener(notifier)
        link = EngineLink(
            engine_settings(settings),
            backoff_s=settings.service.engine_backoff_s,
            command=parts.engine_command,
            frozen_after_s=settings.service.frozen_after_s,
        )
        engine = asyncio.create_task(link.run(listener), name="engine")
        stack.push_async_callback(_end_engine, link, engine)
        notifier.loading("starting", EXTEND_START_S)
        embedded = None if settings.queue.named else EmbeddedRedis(settings.queue.state_dir)
        target = await stack.enter_async_context(redis_server(settings, embedded))
        _log.info("redis", server=await check_target(target, replicas=settings.queue.wait_replicas))
        tokenizer = await asyncio.to_thread(parts.load_tokenizer, resolve_model_path(settings.model.path))
        ready = await _unless(stop, engine, listener.first_ready)
        loading.cancel()  # From now on it is the drain that is told.
        if ready is not None:
            clients = Clients(target, Keys(ready.model).base, stack, budget_s=settings.queue.lease_s / 4)
            front = Assembly(
                settings,
                link=link,
                clients=clients,
                ready=ready,
                tokenizer=tokenizer,
                tls_files=tls_files,
                reread=reread,
                # Redis may have been away until then. Nobody else has jobs of a private one.
                patient_s=settings.queue.lease_s if embedded is None else 0.0,
            )
            if embedded is not None:
                front.metrics.embedded_restarts.set_function(lambda: embedded.restarts)
            listener.dispatcher = front.dispatcher
            front.metrics.engine_ready(ready)
            await Life(settings, front, notifier, addresses).run(stop, reload, engine)
        notifier.stopping("stopped")
    _log.info("stopped")


def _addresses(server: ServerSettings) -> list[str]:
    """All that the daemon will listen on.

    The administrators' socket too: it is named after its folder alone, which another daemon may use as well.
    """
    admin = server.admin_socket_path
    return [
        *server.listen,
        *([server.metrics_listen] if server.metrics_listen else []),
        *([f"unix:{admin}"] if admin is not None else []),
    ]


async def _end_engine(link: EngineLink, engine: asyncio.Task[None]) -> None:
    await link.stop()
    engine.cancel()
    await asyncio.gather(engine, return_exceptions=True)


async def _unless(
    stop: asyncio.Event, engine: asyncio.Task[None], wanted: asyncio.Future[Ready]
) -> Ready | None:
    """Wait for the engine; None if the daemon is told to stop before.

    Raises:
        BatondError: What the engine said when it failed.
    """
    await first_of(stop.wait(), engine, wanted)
    return wanted.result() if wanted.done() else None
