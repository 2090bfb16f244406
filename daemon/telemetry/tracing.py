"""What a traced job's span holds, and the door to what sends it. Imports nothing of OpenTelemetry."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from batond.daemon.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from prometheus_client import Counter

    from batond.daemon.config_tracing import TracingConfig
    from batond.daemon.telemetry.trace_context import TraceContext

    Value = str | bool | int | float | Sequence[str]

EXTRA: Final = "tracing.endpoint needs OpenTelemetry: pip install 'batond[tracing]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanData:
    """A span that has ended.

    Attributes:
        name: Of low cardinality.
        context: Its trace, its own id and its parent.
        start_ms: Milliseconds since 1970.
        end_ms: As `start_ms`.
        attributes: Of the span.
        events: Name, milliseconds since 1970, attributes.
        error: Why it failed, a word; empty if it did not.
    """

    name: str
    context: TraceContext
    start_ms: float
    end_ms: float
    attributes: Mapping[str, Value]
    events: Sequence[tuple[str, float, Mapping[str, Value]]] = field(default_factory=tuple)
    error: str = ""


class SpanSink(Protocol):
    """Where spans go."""

    def emit(self, data: SpanData) -> None:
        """Take a span; never waits, and never raises."""
        ...

    async def close(self) -> None:
        """Let what waits leave for a moment, then stop."""
        ...


def check_tracing(config: TracingConfig) -> None:
    """Raises ConfigError if spans are wanted and the extra is not installed."""
    if not config.endpoint:
        return
    try:
        import batond.daemon.telemetry.spans  # noqa: F401, PLC0415 - an extra, and it takes a third of a second
    except ImportError as error:
        raise ConfigError(EXTRA, field="tracing.endpoint") from error


def open_spans(config: TracingConfig, instance: str, counter: Counter) -> SpanSink | None:
    """What sends spans, as configured; None where nobody wants any.

    Args:
        config: See `TracingConfig`.
        instance: Names this run of this daemon.
        counter: Counts spans by outcome.

    Raises:
        ConfigError: The extra is not installed.
    """
    if not config.endpoint:
        return None
    check_tracing(config)
    from batond.daemon.telemetry.spans import Spans  # noqa: PLC0415 - as above

    return Spans(config, instance, counter)
