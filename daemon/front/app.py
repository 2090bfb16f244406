"""The front process, from its first line of log to its exit."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import socket
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpc_health.v1 import health

from batond.daemon.config_base import split_address
from batond.daemon.config_load import engine_settings, redacted, resolve_model_path
from batond.daemon.front.addresses import check_addresses
from batond.daemon.front.admin import AdminServicer
from batond.daemon.front.calls import Calls, by_credentials, by_user
from batond.daemon.front.dispatcher import Dispatcher
from batond.daemon.front.engine_link import ENGINE_COMMAND, EngineLink
from batond.daemon.front.follow import Follower
from batond.daemon.front.hub import Hub
from batond.daemon.front.identity import Identities, LocalAdministrators
from batond.daemon.front.jobs import JobServicer
from batond.daemon.front.local_admin import AdminSocket, user_ids
from batond.daemon.front.neighbours import Neighbours, advertised
from batond.daemon.front.reload import Reloader
from batond.daemon.front.requests import Limits, RequestReader
from batond.daemon.front.server import build_admin_server, build_server, keep_health, open_sockets
from batond.daemon.front.serving import Serving
from batond.daemon.front.signals import on_signals
from batond.daemon.front.state import DaemonState
from batond.daemon.front.tenant_book import TenantBook
from batond.daemon.front.text import load_tokenizer
from batond.daemon.front.tls import ServerTls, read_tls
from batond.daemon.queue import (
    EmbeddedRedis,
    JobStore,
    LeaseKeeper,
    NewsFeed,
    check_target,
    open_async,
    open_sync,
)
from batond.daemon.queue.keys import TENANTS_KEY, Keys
from batond.daemon.queue.registry import Registry
from batond.daemon.queue.target import target_of
from batond.daemon.telemetry.logging import get_logger
from batond.daemon.telemetry.metrics import Metrics
from batond.daemon.telemetry.systemd import Notifier

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
    from pathlib import Path
    from typing import Any

    from batond.daemon.config import Settings
    from batond.daemon.front.text import Tokenizer
    from batond.daemon.front.tls import TlsFiles
    from batond.daemon.queue.target import RedisTarget
    from batond.daemon.wire.messages import Ready, StepEvents

EXTEND_START_S = 30.0
NOTE_EVERY_S = 10.0  # In the log, while the model loads.
WATCHDOG_EVERY_S = 0.5
CLOSE_STREAMS_S = 1.0
CANCEL_EVERY_S = 0.5

_log = get_logger(__name__)


class EngineListener:
    """Hears the engine before there is a dispatcher, and passes everything on once there is one."""

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self.dispatcher: Dispatcher | None = None
        self.first_ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._noted_s = -math.inf

    def engine_loading(self, note: str) -> None:
        """See EngineHandler. The notes come every two seconds; the log gets one now and then."""
        self._notifier.loading(note, EXTEND_START_S)
        now_s = time.monotonic()
        if now_s - self._noted_s >= NOTE_EVERY_S:
            self._noted_s = now_s
            _log.info("engine_loading", note=note)

    def engine_up(self, ready: Ready) -> None:
        """See EngineHandler."""
        _log.info("engine_up", batch=ready.batch_kind, rows=ready.rows, load_s=round(ready.load_s, 1))
        if not self.first_ready.done():
            self.first_ready.set_result(ready)
        if self.dispatcher is not None:
            self.dispatcher.engine_up(ready)

    async def engine_step(self, step: StepEvents) -> None:
        """See EngineHandler."""
        if self.dispatcher is not None:
            await self.dispatcher.engine_step(step)

    def engine_begins(self, query_ids: Sequence[str]) -> None:
        """See EngineHandler."""
        if self.dispatcher is not None:
            self.dispatcher.engine_begins(query_ids)

    def engine_down(self, why: str) -> None:
        """See EngineHandler."""
        if self.dispatcher is not None:
            self.dispatcher.engine_down(why)


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
    metrics_listen = settings.server.metrics_listen
    check_addresses([*settings.server.listen, *([metrics_listen] if metrics_listen else [])])
    notifier = Notifier()
    async with contextlib.AsyncExitStack() as stack:
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
        target = await stack.enter_async_context(_redis(settings, embedded))
        _log.info("redis", server=await check_target(target))
        tokenizer = await asyncio.to_thread(parts.load_tokenizer, resolve_model_path(settings.model.path))
        ready = await _unless(stop, engine, listener.first_ready)
        if ready is not None:
            front = _Front(
                settings,
                link=link,
                listener=listener,
                clients=_Clients(target, Keys(ready.model).base, stack, budget_s=settings.queue.lease_s / 4),
                ready=ready,
                tokenizer=tokenizer,
                tls_files=tls_files,
                reread=reread,
            )
            if embedded is not None:
                front.show_restarts(embedded)
            await front.run(stop, reload, engine, notifier)
        notifier.stopping("stopped")
    _log.info("stopped")


class _Front:
    """Everything between a loaded engine and the end of the drain."""

    def __init__(
        self,
        settings: Settings,
        *,
        link: EngineLink,
        listener: EngineListener,
        clients: _Clients,
        ready: Ready,
        tokenizer: Tokenizer,
        tls_files: TlsFiles | None,
        reread: Callable[[], Settings],
    ) -> None:
        classes, queue = settings.sla_classes, settings.queue
        identities = Identities(settings.tenants, classes, required=settings.server.require_credentials)
        self._settings = settings
        self._metrics = metrics = Metrics(
            list(identities.tenants), most_tenants=settings.server.metrics_tenants
        )
        calls = Calls(by_credentials(identities), metrics)

        def tenants_changed() -> None:
            metrics.know_tenants(list(identities.tenants))
            calls.recheck()

        self._book = TenantBook(clients.tenants, identities, classes, on_change=tenants_changed)
        self._tls = ServerTls(tls_files) if tls_files is not None else None
        self._reloader = Reloader(
            settings, reread, identities=identities, tls=self._tls, on_tenants=tenants_changed
        )
        owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:12]}"
        store = JobStore(
            clients.jobs,
            ready.model,
            classes.names,
            max_queued=queue.max_queued,
            max_attempts=queue.max_attempts,
            replicas=queue.wait_replicas,
        )
        hub, loop = Hub(), asyncio.get_running_loop()
        self._feed = hub.listener = feed = NewsFeed(clients.jobs.pubsub, store.keys, hub.poke)
        lease_ms = int(queue.lease_s * 1000)
        self._keeper = LeaseKeeper(
            clients.leases,
            store.keys,
            owner,
            lease_ms=lease_ms,
            on_lost=_into(loop, self._lost),
            on_cancel=_into(loop, self._cancel),
            on_update=_into(loop, self._update),
        )
        self._dispatcher = Dispatcher(
            store=store,
            keeper=self._keeper,
            hub=hub,
            link=link,
            classes=classes,
            metrics=self._metrics,
            owner=owner,
            lease_s=queue.lease_s,
            claim_ahead=queue.claim_ahead,
            tenants=lambda: identities.limits,
        )
        self._state = DaemonState(
            link,
            self._dispatcher,
            ready,
            frozen_after_s=settings.service.frozen_after_s,
            max_queued=queue.max_queued,
        )
        self._neighbours = Neighbours(
            Registry(clients.tenants),
            owner,
            self._state,
            address=advertised(settings.server),
            running_jobs=lambda: self._dispatcher.running_jobs,
        )
        limits = Limits(
            model=ready.model,
            max_query_tokens=ready.max_query_tokens,
            vocab_size=ready.vocab_size,
            default_max_tokens=settings.model.default_max_tokens,
            prompt_logprobs=settings.engine.prefill == "decoupled",
            max_choices=settings.model.max_choices,
            max_choice_tokens=settings.model.max_choice_tokens,
        )
        self._jobs = JobServicer(
            calls=calls,
            store=store,
            follower=Follower(
                store, hub, stopping=lambda: self._dispatcher.draining, deaf=lambda: not feed.up
            ),
            hub=hub,
            dispatcher=self._dispatcher,
            neighbours=self._neighbours,
            reader=RequestReader(tokenizer, classes, limits),
            classes=classes,
            metrics=self._metrics,
            result_ttl_s=queue.result_ttl_s,
            max_message_bytes=settings.server.max_message_bytes,
        )
        self._admin, self._local_admin = (
            AdminServicer(
                calls=callers,
                state=self._state,
                dispatcher=self._dispatcher,
                store=store,
                classes=classes,
                limits=limits,
                book=self._book,
                neighbours=self._neighbours,
                max_message_bytes=settings.server.max_message_bytes,
            )
            for callers in (calls, Calls(by_user(LocalAdministrators(classes)), self._metrics))
        )
        listener.dispatcher = self._dispatcher
        self._metrics.engine_up.set(1)

    def show_restarts(self, embedded: EmbeddedRedis) -> None:
        """Let the metrics say how often the private Redis died."""
        self._metrics.embedded_restarts.set_function(lambda: embedded.restarts)

    async def run(
        self, stop: asyncio.Event, reload: asyncio.Event, engine: asyncio.Task[None], notifier: Notifier
    ) -> None:
        """Serve until told to stop, then drain."""
        await self._book.load()  # Before anybody can call.
        gc.collect()
        gc.freeze()  # What was imported stays; a look at it, with transformers, stops all streams for 0.1 s.
        health_servicer = health.aio.HealthServicer()
        serving = Serving(
            lambda: build_server(self._settings, self._jobs, self._admin, health_servicer, self._tls),
            self._settings.server.listen,
            lambda: open_sockets(self._settings.server.listen),
        )
        self._keeper.start()
        work = [
            asyncio.create_task(task, name=name)
            for name, task in (
                ("dispatcher", self._dispatcher.run()),
                ("health", keep_health(health_servicer, self._state)),
                ("watchdog", self._watchdog(notifier)),
                ("tenants", self._book.run()),
                ("news", self._feed.run()),
                ("registry", self._neighbours.run()),
            )
        ]
        stack = contextlib.AsyncExitStack()
        try:
            await serving.start()
            await self._serve_administrators(stack)
            self._serve_metrics()
            notifier.ready(f"serving {self._state.ready.model}")
            _log.info("serving", listen=list(self._settings.server.listen))
            work.append(asyncio.create_task(serving.run(), name="serving"))
            work.append(asyncio.create_task(self._reload(reload, notifier), name="reload"))
            await _first_of(stop.wait(), self._state.stop_requested.wait(), engine, *work)
            work.pop().cancel()  # No READY=1 after STOPPING=1.
            notifier.stopping("draining")
            self._neighbours.changed()
            asked_s = self._state.drain_timeout_s
            configured_s = self._reloader.settings.service.drain_timeout_s
            await self._dispatcher.drain(configured_s if asked_s is None else asked_s)
        finally:
            await serving.stop(CLOSE_STREAMS_S)
            await stack.aclose()
            await self._jobs.finish_tidying()
            await _end(work)
            await self._neighbours.leave()
            await asyncio.to_thread(self._keeper.stop)
            self._metrics.close()

    async def _serve_administrators(self, stack: contextlib.AsyncExitStack) -> None:
        """Serve the local administrators' socket, if it is wanted, until the stack is closed."""
        server = self._settings.server
        path = server.admin_socket_path
        if path is None:
            return
        relay = AdminSocket(path, user_ids(server.admin_users))
        stack.push_async_callback(relay.stop)
        inner = build_admin_server(self._local_admin, relay.inner_address, server.max_message_bytes)
        stack.push_async_callback(inner.stop, CLOSE_STREAMS_S)
        await inner.start()
        await relay.start()
        _log.info("admin_socket", path=str(path))

    # The keeper is made before the dispatcher, so it is given these.

    def _lost(self, tenant: str, job_id: str, epoch: int) -> None:
        self._dispatcher.lost(tenant, job_id, epoch)

    def _cancel(self, tenant: str, job_id: str) -> None:
        self._dispatcher.cancel(tenant, job_id)

    def _update(self, tenant: str, job_id: str) -> None:
        self._dispatcher.update(tenant, job_id)

    async def _reload(self, asked: asyncio.Event, notifier: Notifier) -> None:
        """Reload whenever that is asked for; what was asked while the model was loaded is done at once."""
        while True:
            await asked.wait()
            asked.clear()
            notifier.reloading("reading the configuration")
            outcome = await self._reloader.reload()
            notifier.ready(f"serving {self._state.ready.model}; {outcome}")

    async def _watchdog(self, notifier: Notifier) -> None:
        """Ping systemd as long as the engine is heard."""
        while True:
            if self._state.live:
                notifier.alive()
            await asyncio.sleep(WATCHDOG_EVERY_S)

    def _serve_metrics(self) -> None:
        listen = self._settings.server.metrics_listen
        if listen:
            host, port = split_address(listen)
            _log.info("metrics", port=self._metrics.serve(host, port))


def _into(loop: asyncio.AbstractEventLoop, call: Callable[..., None]) -> Callable[..., None]:
    """The same call, made on the loop by whatever thread calls it."""

    def hand_over(*arguments: object) -> None:
        loop.call_soon_threadsafe(call, *arguments)

    return hand_over


class _Clients:
    """Connections to Redis: in a Cluster, jobs and tenants are at different nodes."""

    def __init__(
        self, target: RedisTarget | str, base: str, stack: contextlib.AsyncExitStack, *, budget_s: float
    ) -> None:
        self.jobs = open_async(target, key=base)
        self.tenants = open_async(target, key=TENANTS_KEY)
        stack.push_async_callback(self.jobs.aclose)
        stack.push_async_callback(self.tenants.aclose)
        self.leases = open_sync(target, key=base, budget_s=budget_s)


@contextlib.asynccontextmanager
async def _redis(settings: Settings, embedded: EmbeddedRedis | None) -> AsyncIterator[RedisTarget | str]:
    """The configured servers, or a private one that lives as long as the daemon."""
    if embedded is None:
        yield target_of(settings.queue)
        return
    await asyncio.to_thread(embedded.start)
    guard = asyncio.create_task(embedded.keep_running(), name="embedded Redis")
    try:
        yield embedded.url
    finally:
        await _end([guard])
        await asyncio.to_thread(embedded.stop)


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel until all have ended: the Redis client's `wait_for` can swallow one cancel on Python 3.11."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=CANCEL_EVERY_S)


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
    await _first_of(stop.wait(), engine, wanted)
    return wanted.result() if wanted.done() else None


async def _first_of(*waits: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> None:
    """Wait for whatever ends first, and raise what it raised."""
    own = [asyncio.ensure_future(wait) for wait in waits]
    done, _ = await asyncio.wait(own, return_when=asyncio.FIRST_COMPLETED)
    for wait, task in zip(waits, own, strict=True):
        if task is not wait:
            task.cancel()  # Ours; tasks that were given are the caller's.
    for task in done:
        task.result()
