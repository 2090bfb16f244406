"""Hands the caller's trace on to the daemon, as metadata: https://www.w3.org/TR/trace-context/.

Needs nothing: a program that has a current span has imported opentelemetry-api, and where it has not been
imported there is nothing to hand on.
"""

from __future__ import annotations

import sys
from typing import Final

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
_API: Final = "opentelemetry.trace"

Metadata = tuple[tuple[str, str], ...]


def with_trace(metadata: Metadata) -> Metadata:
    """Adds the current span to what a call carries, unless a trace is named there or there is no span."""
    current = getattr(sys.modules.get(_API), "get_current_span", None)
    if current is None or any(name == TRACEPARENT for name, _ in metadata):
        return metadata
    context = current().get_span_context()
    if not context.is_valid:
        return metadata
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    state = context.trace_state.to_header() if context.trace_state else ""
    return (*metadata, (TRACEPARENT, parent), *(((TRACESTATE, state),) if state else ()))
