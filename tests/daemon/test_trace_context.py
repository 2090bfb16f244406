"""Which trace a job belongs to: what callers send is read, bounded, and kept as text."""

from __future__ import annotations

import pytest

from batond.daemon.telemetry.trace_context import (
    MOST_KEPT_CHARS,
    MOST_TRACESTATE_CHARS,
    TraceContext,
    parse_traceparent,
    trace_id_of,
)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADER = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    ("header", "sampled"),
    [
        (HEADER, True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f"cc-{TRACE}-{SPAN}-01", True),  # A later version, read as this one.
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-brings", True),
    ],
)
def test_a_traceparent_is_read(header: str, sampled: object) -> None:
    assert parse_traceparent(header) == (TRACE, SPAN, sampled)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        HEADER.upper(),
        f"ff-{TRACE}-{SPAN}-01",
        f"{HEADER}-more",  # Of version 00 nothing follows.
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f" {HEADER}",
        f"{HEADER}\n",
        f"cc-{TRACE}-{SPAN}-01-{'x' * 100_000}",
        f"cc-{TRACE}-{SPAN}-01-\x1b[31m",
        HEADER.replace("4", "\u0664"),
    ],
)
def test_what_is_malformed_counts_as_not_there(header: str) -> None:
    assert parse_traceparent(header) is None
    context = TraceContext.begin([("traceparent", header), ("tracestate", "a=b")], 1.0)
    assert (context.parent_span_id, context.state, context.sampled) == ("", "", True)
    assert trace_id_of([("traceparent", header)]) == ""


def test_a_job_is_a_child_of_its_caller_who_decides() -> None:
    for flags, sampled in (("01", True), ("00", False)):
        headers = [
            ("traceparent", f"00-{TRACE}-{SPAN}-{flags}"),
            ("tracestate", "a=1"),
            ("tracestate", "b=2"),
        ]
        context = TraceContext.begin(headers, 0.0)
        assert (context.trace_id, context.parent_span_id) == (TRACE, SPAN)
        assert (context.sampled, context.state) == (sampled, "a=1,b=2")
        assert context.span_id not in {SPAN, "0" * 16}
    assert trace_id_of(headers) == TRACE


@pytest.mark.parametrize("value", [HEADER, b"\xff"])
def test_two_parents_or_bytes_are_none(value: str | bytes) -> None:
    headers: list[tuple[str, str | bytes]] = [("traceparent", value), ("traceparent", HEADER)]
    assert TraceContext.begin(headers, 1.0).parent_span_id == ""
    assert TraceContext.begin([("traceparent", b"\xff")], 1.0).parent_span_id == ""


def test_a_long_or_unprintable_state_is_dropped_alone() -> None:
    for state in ("a=" + "x" * MOST_TRACESTATE_CHARS, "a=\x00", "a=\u00e9"):
        context = TraceContext.begin([("traceparent", HEADER), ("tracestate", state)], 1.0)
        assert (context.parent_span_id, context.state) == (SPAN, "")


def test_roots_are_sampled_by_the_ratio() -> None:
    assert not any(TraceContext.begin([], 0.0).sampled for _ in range(50))
    assert all(TraceContext.begin([], 1.0).sampled for _ in range(50))
    sampled = sum(TraceContext.begin([], 0.5).sampled for _ in range(400))
    assert 100 < sampled < 300  # Beyond ten standard deviations.


def test_what_is_kept_is_read_again() -> None:
    longest = [("traceparent", HEADER), ("tracestate", "a=" + "x" * (MOST_TRACESTATE_CHARS - 2))]
    for headers in ([], longest):
        context = TraceContext.begin(headers, 1.0)
        assert len(context.kept()) <= MOST_KEPT_CHARS
        assert TraceContext.read(context.kept()) == context
        child = context.child()
        assert (child.trace_id, child.parent_span_id) == (context.trace_id, context.span_id)


@pytest.mark.parametrize(
    "kept",
    ["", "x", HEADER, f"{TRACE} {SPAN} 2 -", f"{'0' * 32} {SPAN} 1 -", f"{TRACE} {SPAN} 1 - {'x' * 2000}"],
)
def test_what_a_hand_wrote_is_no_trace(kept: str) -> None:
    assert TraceContext.read(kept) is None
