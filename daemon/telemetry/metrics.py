"""Prometheus metrics of the front. Those of the engine are in engine_metrics.py; docs/metrics.md has all.

Labels are bounded: classes, tenants and causes come from the configuration or from code, never from requests.
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    start_http_server,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from batond.daemon.telemetry.engine_metrics import EngineCollector

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from prometheus_client import Metric

    from batond.daemon.wire.messages import Ready
    from batond.policies.classes import SlaClasses

MOST_TENANTS: Final = 50
OTHER_TENANT: Final = "other"
_LATENCY_BUCKETS_S: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
    *(5.0, 10.0, 30.0, 60.0, 300.0, float("inf")),
)
_TOKEN_BUCKETS_S: Final = (
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.25,
    0.5,
    1.0,
    2.5,
    10.0,
    float("inf"),
)
#: Longer than latencies: parks and queues may last hours.
_WAIT_BUCKETS_S: Final = (
    0.01,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
    1800.0,
    float("inf"),
)


class WatchedCounter(Collector):
    """A counter that somebody else keeps.

    Args:
        name: Without `_total`.
        text: What is counted.
        registry: Where it is shown.
    """

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._name, self._text = name, text
        self._count: Callable[[], float] = lambda: 0.0
        registry.register(self)

    def set_function(self, count: Callable[[], float]) -> None:
        """Ask for the count there from now on; it must never fall."""
        self._count = count

    def collect(self) -> Iterator[Metric]:
        """Yield the counter."""
        yield CounterMetricFamily(self._name, self._text, self._count())


class Metrics:
    """All metrics of one daemon, in a registry of their own.

    Args:
        tenants: Names of the configured tenants.
        most_tenants: Tenants with a label of their own, the first that are known; the rest is "other". Nobody
            loses a label again: counters must never fall.
    """

    def __init__(self, tenants: Collection[str] = (), *, most_tenants: int = MOST_TENANTS) -> None:
        self.registry = registry = CollectorRegistry()
        self._most_tenants = most_tenants
        self._tenants: set[str] = set()
        self.know_tenants(tenants)
        self._close: Callable[[], None] | None = None
        job = ("tenant", "sla_class")
        self.jobs_submitted = Counter("batond_jobs_submitted", "Jobs accepted.", job, registry=registry)
        self.jobs_ended = Counter(
            "batond_jobs_ended", "Jobs that ended, by outcome.", (*job, "outcome"), registry=registry
        )
        self.tokens = Counter(
            "batond_tokens", "Tokens of ended jobs: prompt or output.", ("tenant", "kind"), registry=registry
        )
        self.rpcs = Counter(
            "batond_rpcs_refused", "Calls answered with an error.", ("method", "code"), registry=registry
        )
        self.queue_time = Histogram(
            "batond_queue_time_seconds",
            "Acceptance to first row.",
            job,
            registry=registry,
            buckets=_WAIT_BUCKETS_S,
        )
        self.first_token = Histogram(
            "batond_time_to_first_token_seconds",
            "Acceptance to first token.",
            job,
            registry=registry,
            buckets=_LATENCY_BUCKETS_S,
        )
        self.output_token = Histogram(
            "batond_time_per_output_token_seconds",
            "One token to the next, the mean of a generation, parks included.",
            job,
            registry=registry,
            buckets=_TOKEN_BUCKETS_S,
        )
        self.preemptions = Counter(
            "batond_preemptions", "Queries that lost their row.", (*job, "cause", "mode"), registry=registry
        )
        self.park_time = Histogram(
            "batond_park_seconds",
            "Losing a row to having one again, or to the end.",
            job,
            registry=registry,
            buckets=_WAIT_BUCKETS_S,
        )
        self.starvation_age = Gauge(
            "batond_starvation_age_seconds",
            "Longest time that a job of the class has been without a row now.",
            ("sla_class",),
            registry=registry,
        )
        self.quota_refusals = Counter(
            "batond_quota_refusals",
            "Jobs refused, and turns taken away, because a tenant was at a quota.",
            ("tenant", "quota"),
            registry=registry,
        )
        self.commit = Histogram(
            "batond_commit_seconds",
            "One commit of a step to Redis.",
            registry=registry,
            buckets=_LATENCY_BUCKETS_S,
        )
        self.commits_refused = Counter(
            "batond_commits_refused", "Jobs whose lease was lost; their work was dropped.", registry=registry
        )
        self.engine_restarts = Counter(
            "batond_engine_restarts", "Engine processes that died and were replaced.", registry=registry
        )
        self.engine_up = Gauge("batond_engine_up", "1 while the engine takes queries.", registry=registry)
        self.redis_up = Gauge("batond_redis_up", "1 while Redis answers.", registry=registry)
        self.queued_jobs = Gauge(
            "batond_queued_jobs", "Jobs waiting in Redis.", ("sla_class",), registry=registry
        )
        self.dead_jobs = Gauge("batond_dead_jobs", "Entries of the dead-letter list.", registry=registry)
        self.claimed_jobs = Gauge("batond_claimed_jobs", "Jobs this daemon holds.", registry=registry)
        self.unsaved_steps = Gauge("batond_unsaved_steps", "Steps not yet in Redis.", registry=registry)
        self.embedded_restarts = WatchedCounter(
            "batond_embedded_redis_restarts", "Times the private Redis died and was started again.", registry
        )
        self.unsaved_bytes = Gauge(
            "batond_unsaved_bytes", "About what the steps not yet in Redis take; bounded.", registry=registry
        )
        self.suspects = Gauge(
            "batond_suspects", "Jobs that may have killed an engine, to be tried alone.", registry=registry
        )
        self.engine_kills = Counter(
            "batond_engine_kills", "Engines that a job killed while it was alone in them.", registry=registry
        )
        self.open_streams = Gauge("batond_open_streams", "Streams to clients.", registry=registry)
        self.spans = Counter(
            "batond_spans", "Spans of jobs, by what became of them.", ("outcome",), registry=registry
        )
        self.queued_jobs_limit = Gauge(
            "batond_queued_jobs_limit", "Jobs that may wait; more are refused.", registry=registry
        )
        self.ttft_target = Gauge(
            "batond_ttft_target_seconds",
            "Time to the first token that is aimed at.",
            ("sla_class",),
            registry=registry,
        )
        self.tpot_target = Gauge(
            "batond_tpot_target_seconds",
            "Time per output token that is aimed at.",
            ("sla_class",),
            registry=registry,
        )
        self.info = Gauge(
            "batond_info",
            "Always 1; the labels say what is served, and how.",
            ("version", "model", "batch", "preemption"),
            registry=registry,
        )
        self.engine = EngineCollector()
        registry.register(self.engine)

    def describe(self, classes: SlaClasses, *, max_queued: int) -> None:
        """Show what the configuration aims at, for alerts and dashboards to compare with."""
        self.queued_jobs_limit.set(max_queued)
        for sla_class in classes:
            self.ttft_target.labels(sla_class.name).set(sla_class.ttft_target_s)
            self.tpot_target.labels(sla_class.name).set(sla_class.tpot_target_s)

    def engine_ready(self, ready: Ready) -> None:
        """An engine takes queries; say what it is."""
        self.engine_up.set(1)
        self.info.clear()
        self.info.labels(
            metadata.version("batond"), ready.model, ready.batch_kind, ready.preemption_mode
        ).set(1)

    def know_tenants(self, names: Collection[str]) -> None:
        """Give tenants labels of their own, first come first served, as long as there are any left."""
        for name in names:
            if len(self._tenants) < self._most_tenants:
                self._tenants.add(name)

    def tenant(self, name: str) -> str:
        """The label for a tenant."""
        return name if name in self._tenants else OTHER_TENANT

    def serve(self, host: str, port: int) -> int:
        """Answer scrapes over HTTP on a thread; returns the port, which differs if 0 was asked.

        Raises:
            OSError: The address is taken.
        """
        # A second series for each counter and histogram, that nobody asks for.
        disable_created_metrics()  # type: ignore[no-untyped-call] # it takes and gives nothing
        server, thread = start_http_server(port, host, self.registry)

        def close() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        self._close = close
        return int(server.server_port)

    def close(self) -> None:
        """Stop answering scrapes."""
        if self._close is not None:
            self._close()
            self._close = None
