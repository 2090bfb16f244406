"""Spans on their way to a collector: OpenTelemetry's SDK and its OTLP exporter, bounded and out of the way.

Only what is emitted touches the event loop, for some microseconds; encoding and sending have a thread of
their own. A collector that is away, slow or broken costs spans, which are counted, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from batond.daemon.telemetry.logging import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from opentelemetry.sdk.trace import ReadableSpan
    from prometheus_client import Counter

    from batond.daemon.config_tracing import TracingConfig
    from batond.daemon.telemetry.trace_context import TraceContext
    from batond.daemon.telemetry.tracing import SpanData

#: At the end spans may still leave for so long.
END_S: Final = 3.0
#: Spans of one export: encoding them holds the interpreter, and with it the event loop, for milliseconds.
BATCH_SPANS: Final = 64
EXPORT_EVERY_MS: Final = 1000
MOST_EVENTS: Final = 128
MOST_VALUE_CHARS: Final = 256

_log = get_logger(__name__)


class Spans:
    """Sends spans to a collector.

    Args:
        config: See `TracingConfig`.
        instance: Names this run of this daemon.
        counter: Counts spans by outcome: exported, failed, dropped.
        exporter: None makes the one of OTLP over gRPC.
    """

    def __init__(
        self, config: TracingConfig, instance: str, counter: Counter, exporter: SpanExporter | None = None
    ) -> None:
        version = metadata.version("batond")
        self._most_waiting = config.most_waiting_spans
        self._counter = {kind: counter.labels(kind) for kind in ("exported", "failed", "dropped")}
        self._emitted = self._handled = 0  # Each is written by one thread alone.
        self._failing = False
        self._exporter = exporter or _otlp(config)
        self._ids = ids = _Ids()
        self._processor = BatchSpanProcessor(
            _Counted(self._exporter, self._export),
            max_queue_size=max(config.most_waiting_spans, BATCH_SPANS),
            schedule_delay_millis=EXPORT_EVERY_MS,
            max_export_batch_size=BATCH_SPANS,
        )
        provider = TracerProvider(
            sampler=ALWAYS_ON,  # Whether a job is traced was decided when it was submitted.
            resource=Resource.create(
                {
                    "service.name": config.service_name,
                    "service.version": version,
                    "service.instance.id": instance,
                }
            ),
            shutdown_on_exit=False,
            id_generator=ids,
            span_limits=SpanLimits(max_events=MOST_EVENTS, max_attribute_length=MOST_VALUE_CHARS),
        )
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("batond", version)

    def emit(self, data: SpanData) -> None:
        """Take a span; never waits, and never raises."""
        if self._emitted - self._handled >= self._most_waiting:
            self._counter["dropped"].inc()
            return
        try:
            self._send(data)
        except Exception:  # noqa: BLE001 - a span must not disturb its job
            self._counter["dropped"].inc()
            _log.exception("span_broke", name=data.name)
        else:
            self._emitted += 1

    async def close(self) -> None:
        """Let what waits leave for a moment, then stop."""
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()

        def end() -> None:
            with contextlib.suppress(Exception):
                self._processor.shutdown()  # type: ignore[no-untyped-call] # it takes and gives nothing
            with contextlib.suppress(RuntimeError):  # The loop did not wait for it.
                loop.call_soon_threadsafe(ended.set)

        # Not one of the loop's own threads: those are waited for at the end, whatever a collector does.
        threading.Thread(target=end, name="spans_end", daemon=True).start()
        try:
            async with asyncio.timeout(END_S):
                await ended.wait()
        except TimeoutError:
            _log.warning("spans_lost", spans=self._emitted - self._handled)
            threading.Thread(target=self._exporter.shutdown, name="exporter_end", daemon=True).start()

    def _send(self, data: SpanData) -> None:
        context = data.context
        self._ids.following = _Following(int(context.trace_id, 16), int(context.span_id, 16))
        span = self._tracer.start_span(
            data.name,
            context=_parent(context),
            kind=trace.SpanKind.SERVER,
            attributes=data.attributes,
            start_time=_ns(data.start_ms),
        )
        for name, at_ms, attributes in data.events:
            span.add_event(name, attributes, timestamp=_ns(at_ms))
        if data.error:
            span.set_status(trace.StatusCode.ERROR, data.error)
        span.end(_ns(max(data.start_ms, data.end_ms)))

    def _export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Runs on the exporter's thread."""
        why = "the collector did not take them"
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # noqa: BLE001 - whatever it is, it concerns spans alone
            result, why = SpanExportResult.FAILURE, f"{type(error).__name__}: {error}"
        failed = result is not SpanExportResult.SUCCESS
        self._handled += len(spans)
        self._counter["failed" if failed else "exported"].inc(len(spans))
        if failed is not self._failing:
            self._failing = failed
            if failed:
                _log.warning("spans_not_exported", spans=len(spans), why=why)
            else:
                _log.info("spans_exported_again")
        return result


@dataclass(slots=True)
class _Following:
    """Ids of the span that is begun next."""

    trace_id: int = 0
    span_id: int = 0


class _Ids(RandomIdGenerator):
    """Ids as they stand with the job: its span was named when it was submitted, perhaps by another daemon."""

    def __init__(self) -> None:
        self.following = _Following()

    def generate_span_id(self) -> int:
        return self.following.span_id

    def generate_trace_id(self) -> int:
        return self.following.trace_id


class _Counted(SpanExporter):
    """An exporter whose work is looked at."""

    def __init__(
        self, inner: SpanExporter, export: Callable[[Sequence[ReadableSpan]], SpanExportResult]
    ) -> None:
        self._inner, self._export = inner, export

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return self._export(spans)

    def shutdown(self) -> None:
        self._inner.shutdown()


def _parent(context: TraceContext) -> Context:
    """The caller's span, or no span at all."""
    if not context.parent_span_id:
        return Context()
    parent = trace.SpanContext(
        trace_id=int(context.trace_id, 16),
        span_id=int(context.parent_span_id, 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
        trace_state=trace.TraceState.from_header([context.state]) if context.state else None,
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(parent), Context())


def _otlp(config: TracingConfig) -> SpanExporter:
    # What it says of a collector that is away comes with every try; `spans_not_exported` says it once.
    for name in ("opentelemetry.exporter.otlp", "opentelemetry.sdk._shared_internal"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return OTLPSpanExporter(endpoint=config.endpoint, timeout=config.export_timeout_s)


def _ns(ms: float) -> int:
    return round(ms * 1_000_000)
