"""What the front is made of, put together once the engine is loaded."""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from typing import TYPE_CHECKING

from batond.daemon.front.admin import AdminServicer
from batond.daemon.front.calls import Calls, by_credentials, by_user
from batond.daemon.front.dispatcher import Dispatcher
from batond.daemon.front.follow import Follower
from batond.daemon.front.hub import Hub
from batond.daemon.front.identity import Identities, LocalAdministrators
from batond.daemon.front.jobs import JobServicer
from batond.daemon.front.neighbours import Neighbours, advertised
from batond.daemon.front.reload import Reloader
from batond.daemon.front.requests import Limits, RequestReader
from batond.daemon.front.state import DaemonState
from batond.daemon.front.tasks import on_loop
from batond.daemon.front.tenant_book import TenantBook
from batond.daemon.front.tls import ServerTls
from batond.daemon.front.traces import JobTraces
from batond.daemon.queue import JobStore, LeaseKeeper, NewsFeed
from batond.daemon.queue.registry import Registry
from batond.daemon.telemetry.metrics import Metrics
from batond.daemon.telemetry.tracing import open_spans

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.config import Settings
    from batond.daemon.front.engine_link import EngineLink
    from batond.daemon.front.redis_access import Clients
    from batond.daemon.front.text import Tokenizer
    from batond.daemon.front.tls import TlsFiles
    from batond.daemon.wire.messages import Ready


class Assembly:
    """Everything between a loaded engine and the servers; nothing of it runs yet.

    Args:
        settings: To begin with.
        link: The engine.
        clients: Connections to Redis.
        ready: What the engine said of itself.
        tokenizer: Of its model.
        tls_files: Read already; None serves without.
        reread: Reads the settings again; raises ConfigError.
        patient_s: Within it all daemons that live renew their leases, once this one is at work.

    Attributes:
        metrics: Figures.
        book: Tenants that were added at run time.
        tls: Transport security, None without.
        reloader: Does what SIGHUP asks.
        traces: Spans of jobs, None without.
        feed: News of jobs that run elsewhere.
        keeper: Renews the leases.
        dispatcher: The jobs.
        state: How the daemon stands.
        neighbours: The daemons beside it.
        jobs: What tenants call.
        admin: What administrators call.
        local_admin: The same for users of this host.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        link: EngineLink,
        clients: Clients,
        ready: Ready,
        tokenizer: Tokenizer,
        tls_files: TlsFiles | None,
        reread: Callable[[], Settings],
        patient_s: float,
    ) -> None:
        self._settings, self._clients, self._ready = settings, clients, ready
        self._identities = identities = Identities(
            settings.tenants, settings.sla_classes, required=settings.server.require_credentials
        )
        self.metrics = Metrics(list(identities.tenants), most_tenants=settings.server.metrics_tenants)
        self.metrics.describe(settings.sla_classes, max_queued=settings.queue.max_queued)
        self._traced = bool(settings.tracing.endpoint)
        self._calls = Calls(by_credentials(identities), self.metrics, traced=self._traced)
        self.book = TenantBook(
            clients.tenants, identities, settings.sla_classes, on_change=self._tenants_changed
        )
        self.tls = ServerTls(tls_files) if tls_files is not None else None
        self.reloader = Reloader(
            settings, reread, identities=identities, tls=self.tls, on_tenants=self._tenants_changed
        )
        self._join_queue(link, patient_s)
        self._make_services(tokenizer)

    def _tenants_changed(self) -> None:
        self.metrics.know_tenants(list(self._identities.tenants))
        self._calls.recheck()

    def _join_queue(self, link: EngineLink, patient_s: float) -> None:
        """Make all that moves jobs, and what is said of it to other daemons."""
        settings, clients, ready = self._settings, self._clients, self._ready
        classes, queue = settings.sla_classes, settings.queue
        owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:12]}"
        self._store = store = JobStore(
            clients.jobs,
            ready.model,
            classes.names,
            max_queued=queue.max_queued,
            max_attempts=queue.max_attempts,
            replicas=queue.wait_replicas,
        )
        spans = open_spans(settings.tracing, owner, self.metrics.spans)
        self.traces = JobTraces(spans, store, settings.tracing.sample_ratio) if spans is not None else None
        if self.traces is not None:
            store.on_ended = self.traces.ended_waiting
        self._hub, loop = Hub(), asyncio.get_running_loop()
        self.feed = self._hub.listener = NewsFeed(clients.jobs.pubsub, store.keys, self._hub.poke)
        self.keeper = LeaseKeeper(
            clients.leases,
            store.keys,
            owner,
            lease_ms=int(queue.lease_s * 1000),
            on_lost=on_loop(loop, self._lost),
            on_cancel=on_loop(loop, self._cancel),
            on_update=on_loop(loop, self._update),
        )
        self.dispatcher = Dispatcher(
            store=store,
            keeper=self.keeper,
            hub=self._hub,
            link=link,
            classes=classes,
            metrics=self.metrics,
            owner=owner,
            lease_s=queue.lease_s,
            claim_ahead=queue.claim_ahead,
            tenants=lambda: self._identities.limits,
            patient_s=patient_s,
            traces=self.traces,
        )
        self.state = DaemonState(
            link,
            self.dispatcher,
            ready,
            frozen_after_s=settings.service.frozen_after_s,
            max_queued=queue.max_queued,
        )
        self.neighbours = Neighbours(
            Registry(clients.tenants),
            owner,
            self.state,
            address=advertised(settings.server),
            running_jobs=lambda: self.dispatcher.running_jobs,
        )

    # The keeper is made before the dispatcher, so it is given these.

    def _lost(self, tenant: str, job_id: str, epoch: int) -> None:
        self.dispatcher.lost(tenant, job_id, epoch)

    def _cancel(self, tenant: str, job_id: str) -> None:
        self.dispatcher.cancel(tenant, job_id)

    def _update(self, tenant: str, job_id: str) -> None:
        self.dispatcher.update(tenant, job_id)

    def _make_services(self, tokenizer: Tokenizer) -> None:
        """Make what clients call."""
        settings = self._settings
        classes, limits = settings.sla_classes, self._limits()
        self.jobs = JobServicer(
            calls=self._calls,
            store=self._store,
            follower=Follower(
                self._store,
                self._hub,
                stopping=lambda: self.dispatcher.draining,
                deaf=lambda: not self.feed.up,
            ),
            hub=self._hub,
            dispatcher=self.dispatcher,
            neighbours=self.neighbours,
            reader=RequestReader(tokenizer, classes, limits),
            classes=classes,
            metrics=self.metrics,
            result_ttl_s=settings.queue.result_ttl_s,
            max_message_bytes=settings.server.max_message_bytes,
            traces=self.traces,
        )
        self.admin, self.local_admin = (
            AdminServicer(
                calls=callers,
                state=self.state,
                dispatcher=self.dispatcher,
                store=self._store,
                classes=classes,
                limits=limits,
                book=self.book,
                neighbours=self.neighbours,
                max_message_bytes=settings.server.max_message_bytes,
            )
            for callers in (
                self._calls,
                Calls(by_user(LocalAdministrators(classes)), self.metrics, traced=self._traced),
            )
        )

    def _limits(self) -> Limits:
        model = self._settings.model
        return Limits(
            model=self._ready.model,
            max_query_tokens=self._ready.max_query_tokens,
            vocab_size=self._ready.vocab_size,
            default_max_tokens=model.default_max_tokens,
            prompt_logprobs=self._settings.engine.prefill == "decoupled",
            max_choices=model.max_choices,
            max_choice_tokens=model.max_choice_tokens,
        )
