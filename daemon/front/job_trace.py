"""What is known of a held job for its span."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batond.daemon.telemetry.trace_context import TraceContext
    from batond.daemon.telemetry.tracing import Value

    #: Name, milliseconds by Redis's clock, attributes.
    Event = tuple[str, float, dict[str, Value]]


@dataclass(slots=True)
class JobTrace:
    """Changes as things happen to the job; traces.py makes the span of it.

    Attributes:
        context: Its place in the trace.
        events: Under this claim: name, milliseconds by Redis's clock, attributes.
        left_out: Events beyond `MOST_EVENTS`.
        started_ms: First row, under whichever claim; 0 if it had none.
        first_token_ms: First token, likewise.
        fate: How the claim ended, if its job goes on.
        closed: The job's span was sent.
    """

    context: TraceContext
    events: list[Event] = field(default_factory=list)
    left_out: int = 0
    started_ms: float = 0
    first_token_ms: float = 0
    fate: str = "lost"
    closed: bool = False
