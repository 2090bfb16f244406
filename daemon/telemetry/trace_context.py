"""Whose trace a job belongs to: W3C Trace Context (https://www.w3.org/TR/trace-context/), and how it is kept.

Pure, and without OpenTelemetry: what callers send is read, bounded and kept with the job in Redis as text.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
#: A later version of the header may be longer than 55 characters; what is longer than this is not looked at.
MOST_TRACEPARENT_CHARS: Final = 128
#: What the standard asks to be handed on at least; a longer one is dropped as a whole, as it allows.
MOST_TRACESTATE_CHARS: Final = 512
MOST_KEPT_CHARS: Final = 1024
_SAMPLED: Final = 1
_HEADER: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]*)?")
_KEPT: Final = re.compile(r"([0-9a-f]{32}) ([0-9a-f]{16}) ([01]) ([0-9a-f]{16}|-)(?: ([ -~]*))?")
_NO_TRACE: Final = "0" * 32
_NO_SPAN: Final = "0" * 16


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A job's place in a trace.

    Attributes:
        trace_id: 32 hexadecimal digits.
        span_id: The job's own span; 16 hexadecimal digits.
        sampled: Whether spans are recorded; logs carry the trace id all the same.
        parent_span_id: The caller's span; empty if it brought none.
        state: The caller's tracestate.
    """

    trace_id: str
    span_id: str
    sampled: bool
    parent_span_id: str = ""
    state: str = ""

    @classmethod
    def begin(cls, metadata: Iterable[tuple[str, str | bytes]], sample_ratio: float) -> TraceContext:
        """A new job's place: below the caller's span, or at the root of a trace of its own.

        Args:
            metadata: Of the call. What is malformed, too long or there twice counts as not there.
            sample_ratio: Part of root traces that are recorded.
        """
        headers = list(metadata)
        parent = parse_traceparent(_only(headers, TRACEPARENT))
        span_id = _random_id(8)
        if parent is None:
            trace_id = _random_id(16)
            # By the id, as OpenTelemetry's TraceIdRatioBased does.
            return cls(trace_id, span_id, int(trace_id[16:], 16) < sample_ratio * (1 << 64))
        trace_id, parent_span_id, sampled = parent
        return cls(trace_id, span_id, sampled, parent_span_id, _state(headers))

    @classmethod
    def read(cls, kept: str) -> TraceContext | None:
        """Read what `kept` wrote; None if it is something else, which a hand may have put there."""
        found = _KEPT.fullmatch(kept) if len(kept) <= MOST_KEPT_CHARS else None
        if found is None or found[1] == _NO_TRACE or found[2] == _NO_SPAN:
            return None
        return cls(found[1], found[2], found[3] == "1", found[4].removeprefix("-"), found[5] or "")

    def child(self) -> TraceContext:
        """A new span's place below this one."""
        return TraceContext(self.trace_id, _random_id(8), self.sampled, self.span_id, self.state)

    def kept(self) -> str:
        """As text, to be kept with the job."""
        parts = [self.trace_id, self.span_id, str(int(self.sampled)), self.parent_span_id or "-"]
        return " ".join([*parts, self.state] if self.state else parts)


def parse_traceparent(header: str) -> tuple[str, str, bool] | None:
    """Trace id, span id and whether it is sampled; None for what is no traceparent."""
    found = _HEADER.fullmatch(header) if len(header) <= MOST_TRACEPARENT_CHARS else None
    if found is None or found[1] == "ff" or found[2] == _NO_TRACE or found[3] == _NO_SPAN:
        return None
    if found[1] == "00" and found[5]:
        return None  # Of this version nothing follows.
    return found[2], found[3], bool(int(found[4], 16) & _SAMPLED)


def trace_id_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The trace that a call belongs to; empty if it names none."""
    parent = parse_traceparent(_only(list(metadata), TRACEPARENT))
    return parent[0] if parent is not None else ""


def _only(metadata: list[tuple[str, str | bytes]], name: str) -> str:
    """The value of a header that must be there once; empty otherwise."""
    found = [value for key, value in metadata if key == name]
    return found[0] if len(found) == 1 and isinstance(found[0], str) else ""


def _state(metadata: list[tuple[str, str | bytes]]) -> str:
    """The tracestate, which may come in several headers; empty if it is too long or no printable text."""
    found = [value for key, value in metadata if key == TRACESTATE]
    state = ",".join(value for value in found if isinstance(value, str)).strip()
    fits = len(state) <= MOST_TRACESTATE_CHARS and state.isascii() and state.isprintable()
    return state if fits else ""


def _random_id(size_bytes: int) -> str:
    """Hexadecimal digits, not all of them zero."""
    while not (number := secrets.randbits(size_bytes * 8)):
        pass
    return f"{number:0{size_bytes * 2}x}"
