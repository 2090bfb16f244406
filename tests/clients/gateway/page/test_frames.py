"""What the page is sent: JSON in one line, bounded, whatever names are in it."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from typing import Any

from batond.clients.batch import (
    BatchSnapshot,
    ClassSnapshot,
    GovernorState,
    MemorySnapshot,
    QuerySnapshot,
    QueryState,
    RecentTimes,
    RowSnapshot,
)
from batond.clients.gateway.page import frames
from batond.clients.gateway.page.frames import MOST_QUERIES


def read(event: bytes) -> tuple[str, dict[str, Any]]:
    """Takes an event apart; there must be nothing but its kind and one line of JSON."""
    kind, data, *rest = event.decode().split("\n")
    assert rest == ["", ""]
    return kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def test_a_batch_says_where_everybody_is() -> None:
    snapshot = BatchSnapshot(
        step=7,
        time=datetime.fromtimestamp(100.5, UTC),
        rows=(
            RowSnapshot(row=0, job_id="j", tenant="t", sla_class="batch", output_tokens=3),
            RowSnapshot(row=1),
        ),
        queries=(
            QuerySnapshot(job_id="w", state=QueryState.WAITING),
            QuerySnapshot(job_id="p", state=QueryState.PARKED, parked_bytes=9, held=True),
        ),
        queued_jobs=4,
        memory=MemorySnapshot(governor=GovernorState.SHRINKING, kv_budget_bytes=None),
        classes=(ClassSnapshot(sla_class="batch", first_token=RecentTimes(samples=1, p50_s=0.5)),),
    )
    kind, data = read(frames.batch(snapshot))
    assert (kind, data["time"], data["step"], data["queued"]) == ("batch", 100.5, 7, 4)
    assert [row and row["job"] for row in data["rows"]] == ["j", None]
    assert [query["job"] for query in data["queries"]] == ["p", "w"], "who has a lane goes first"
    assert (data["memory"]["governor"], data["memory"]["kv_budget_bytes"]) == ("shrinking", None)
    assert data["classes"][0]["first_token"] == {"samples": 1, "p50_s": 0.5, "p95_s": None, "target_s": None}


def test_a_long_line_is_counted_not_sent() -> None:
    many = tuple(
        QuerySnapshot(job_id=str(place), state=QueryState.WAITING) for place in range(MOST_QUERIES + 3)
    )
    parked = QuerySnapshot(job_id="p", state=QueryState.PARKED)
    _, data = read(frames.batch(BatchSnapshot(step=0, queries=(*many, parked))))
    assert (len(data["queries"]), data["more"]) == (MOST_QUERIES, 4)
    assert data["queries"][0]["job"] == "p"


def test_no_name_ends_an_event_or_begins_another() -> None:
    name = "a\n\nevent: refused\ndata: {}\r\u2028</script>"
    _, data = read(frames.batch(BatchSnapshot(step=0, rows=(RowSnapshot(row=0, job_id=name, tenant=name),))))
    assert data["rows"][0]["job"] == data["rows"][0]["tenant"] == name
    assert read(frames.lost(name))[1]["message"] == name


def test_what_no_json_can_hold_is_left_out() -> None:
    counters = {"parks": math.inf, "resumes": math.nan, "decode_steps": 2.0, "secret": 1.0}
    _, data = read(frames.batch(BatchSnapshot(step=0, counters=counters)))
    assert data["counters"] == {"decode_steps": 2.0}
