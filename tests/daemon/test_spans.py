"""Spans leave through a thread of their own; what can't leave is counted, and holds nobody up."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
import structlog.testing
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode

from batond.daemon.config_tracing import TracingConfig
from batond.daemon.errors import ConfigError
from batond.daemon.telemetry import spans as spans_module
from batond.daemon.telemetry import tracing
from batond.daemon.telemetry.metrics import Metrics
from batond.daemon.telemetry.spans import BATCH_SPANS, MOST_EVENTS, MOST_VALUE_CHARS, Spans
from batond.daemon.telemetry.trace_context import TraceContext
from batond.daemon.telemetry.tracing import SpanData, check_tracing, open_spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.sdk.trace import ReadableSpan

CONFIG = TracingConfig(endpoint="http://127.0.0.1:1", most_waiting_spans=3, service_name="mine")
ROOT = TraceContext("1" * 32, "2" * 16, sampled=True)


class Collector(SpanExporter):
    """Takes what it is given, unless the test says otherwise."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []
        self.open = threading.Event()
        self.open.set()
        self.came = threading.Event()
        self.error: Exception | None = None
        self.shut = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.came.set()
        self.open.wait()
        if self.error is not None:
            raise self.error
        self.spans += spans
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.shut.set()
        self.open.set()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Collector:
    """Gives the collector that spans go to, at once."""
    monkeypatch.setattr(spans_module, "EXPORT_EVERY_MS", 1)
    return Collector()


def counted(metrics: Metrics) -> dict[str, float]:
    """Spans by outcome."""
    (family,) = metrics.spans.collect()
    return {one.labels["outcome"]: one.value for one in family.samples if one.name.endswith("_total")}


def data(context: TraceContext = ROOT, **more: Any) -> SpanData:
    """A span of two seconds."""
    return SpanData(
        name="s", context=context, start_ms=1000, end_ms=3000.5, **{"attributes": {"a": 1}, **more}
    )


async def test_a_span_has_the_ids_it_was_given(collector: Collector) -> None:
    spans = Spans(CONFIG, "me", (metrics := Metrics()).spans, collector)
    child = TraceContext("3" * 32, "4" * 16, sampled=True, parent_span_id="5" * 16, state="v=1")
    spans.emit(data(events=[("parked", 1500.25, {"b": "c"})]))
    spans.emit(data(child, error="BROKEN"))
    await spans.close()
    root, one = collector.spans
    assert (root.context.trace_id, root.context.span_id) == (int("1" * 32, 16), int("2" * 16, 16))
    assert (root.parent, root.kind, root.status.status_code) == (None, SpanKind.SERVER, StatusCode.UNSET)
    assert (root.start_time, root.end_time) == (1_000_000_000, 3_000_500_000)
    assert [(e.name, e.timestamp, dict(e.attributes or {})) for e in root.events] == [
        ("parked", 1_500_250_000, {"b": "c"})
    ]
    assert root.resource.attributes["service.name"] == "mine"
    assert root.resource.attributes["service.instance.id"] == "me"
    assert one.parent is not None
    assert (one.context.trace_id, one.parent.span_id) == (int("3" * 32, 16), int("5" * 16, 16))
    assert one.context.trace_state.get("v") == "1"
    assert (one.status.status_code, one.status.description) == (StatusCode.ERROR, "BROKEN")
    assert counted(metrics) == {"exported": 2, "failed": 0, "dropped": 0}
    assert collector.shut.is_set()


async def test_a_span_is_bounded(collector: Collector) -> None:
    spans = Spans(CONFIG, "me", Metrics().spans, collector)
    events = [("e", float(number), {}) for number in range(1000)]
    spans.emit(data(attributes={"a": "x" * 10_000}, events=events))
    await spans.close()
    assert len(collector.spans[0].events) == MOST_EVENTS
    assert len(str(dict(collector.spans[0].attributes or {})["a"])) == MOST_VALUE_CHARS


async def test_beyond_the_bound_spans_are_dropped_not_kept(collector: Collector) -> None:
    collector.open.clear()
    spans = Spans(CONFIG, "me", (metrics := Metrics()).spans, collector)
    for _ in range(BATCH_SPANS * 3):
        spans.emit(data())
    assert counted(metrics)["dropped"] == BATCH_SPANS * 3 - CONFIG.most_waiting_spans
    collector.open.set()
    await spans.close()
    assert len(collector.spans) == CONFIG.most_waiting_spans


async def test_an_exporter_that_raises_costs_its_spans_and_one_line(collector: Collector) -> None:
    collector.error = OSError("no route")
    spans = Spans(CONFIG, "me", (metrics := Metrics()).spans, collector)
    with structlog.testing.capture_logs() as lines:
        for count in (1, 2):
            spans.emit(data())
            async with asyncio.timeout(10):
                while counted(metrics)["failed"] < count:
                    await asyncio.to_thread(collector.came.wait, 10)
                    await asyncio.sleep(0)
        collector.error = None
        spans.emit(data())
        await spans.close()
    assert counted(metrics) == {"exported": 1, "failed": 2, "dropped": 0}
    assert [line["event"] for line in lines] == ["spans_not_exported", "spans_exported_again"]
    assert lines[0]["why"] == "OSError: no route"


async def test_a_collector_that_hangs_does_not_hold_up_the_end(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans_module, "END_S", 0.05)
    collector.open.clear()
    spans = Spans(CONFIG, "me", Metrics().spans, collector)
    spans.emit(data())
    with structlog.testing.capture_logs() as lines:
        async with asyncio.timeout(10):
            await spans.close()
    assert [line["event"] for line in lines] == ["spans_lost"]
    assert await asyncio.to_thread(collector.shut.wait, 10)


async def test_what_can_t_be_a_span_is_dropped(collector: Collector) -> None:
    spans = Spans(CONFIG, "me", (metrics := Metrics()).spans, collector)
    spans.emit(data(TraceContext("no hex", "2" * 16, sampled=True)))
    await spans.close()
    assert counted(metrics)["dropped"] == 1


def test_without_an_endpoint_nothing_is_made() -> None:
    assert open_spans(TracingConfig(), "me", Metrics().spans) is None


def test_without_the_extra_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "batond.daemon.telemetry.spans", None)
    check_tracing(TracingConfig())
    with pytest.raises(ConfigError, match="pip install"):
        check_tracing(CONFIG)
    assert tracing.EXTRA


@pytest.mark.parametrize(
    "endpoint",
    [
        "127.0.0.1:4317",
        "grpc://h:4317",
        "http://h",
        "http://h:4317/v1/traces",
        "http://a:b@h:4317",
        "http://h:x",
        "http://:4317",
        "https://h:4317?x=1",
    ],
)
def test_an_endpoint_is_checked(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"host:port|Port"):
        TracingConfig(endpoint=endpoint)


@pytest.mark.parametrize("endpoint", ["", "http://127.0.0.1:4317", "https://[::1]:4317/"])
def test_an_endpoint_is_taken(endpoint: str) -> None:
    assert TracingConfig(endpoint=endpoint).endpoint == endpoint
