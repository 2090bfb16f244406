"""What the page is sent: server-sent events with small JSON objects. Pure: values in, bytes out.

The page's `history.js` and `cards.js` read these fields by name. Names in them are words of tenants: the page
takes them for text alone.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batond.clients.batch import BatchSnapshot, QuerySnapshot, RecentTimes, RowSnapshot
    from batond.clients.model import ServerInfo

#: Queries without a row that one snapshot lists; the rest is counted. Parked ones go first: they have lanes.
MOST_QUERIES: Final = 500
_COUNTERS: Final = ("parks", "resumes", "recomputed_tokens", "decode_steps", "idle_row_steps")

#: A comment: it shows that the stream lives.
BEAT: Final = b": beat\n\n"


def event(kind: str, data: dict[str, Any]) -> bytes:
    """One server-sent event; JSON has no line breaks, so that one line holds it."""
    return f"event: {kind}\ndata: {json.dumps(data, separators=(',', ':'), allow_nan=False)}\n\n".encode()


def hello(daemons: Sequence[str], daemon: int) -> bytes:
    """The first event: which daemons there are, and which one this stream is of."""
    return event("hello", {"daemons": list(daemons), "daemon": daemon})


def lost(message: str) -> bytes:
    """The daemon is not heard; the gateway goes on trying."""
    return event("lost", {"message": message})


def refused(status: int, message: str) -> bytes:
    """The last event of a viewer who may not look any more."""
    return event("refused", {"status": status, "message": message})


def daemon(info: ServerInfo) -> bytes:
    """How the daemon stands."""
    return event(
        "daemon",
        {
            "daemon_id": info.daemon_id,
            "version": info.version,
            "state": str(info.state),
            "message": info.state_message,
            "model": info.model,
            "device": info.device,
            "batch_kind": info.batch_kind,
            "preemption_mode": info.preemption_mode,
            "policy": info.policy,
            "classes": [one.name for one in info.sla_classes],
            "uptime_s": round(info.uptime_s),
        },
    )


def batch(snapshot: BatchSnapshot) -> bytes:
    """The batch as it stands."""
    queries = sorted(snapshot.queries, key=lambda query: query.state != "parked")
    memory = None if snapshot.memory is None else asdict(snapshot.memory)
    return event(
        "batch",
        {
            "time": snapshot.time.timestamp() if snapshot.time is not None else 0.0,
            "step": snapshot.step,
            "rows": [_row(row) if row.job_id else None for row in snapshot.rows],
            "queries": [_query(query) for query in queries[:MOST_QUERIES]],
            "more": max(0, len(queries) - MOST_QUERIES),
            "queued": snapshot.queued_jobs,
            "host_pool_used": snapshot.host_pool_used_bytes,
            "host_pool": snapshot.host_pool_bytes,
            "counters": {
                name: snapshot.counters[name]
                for name in _COUNTERS
                if math.isfinite(snapshot.counters.get(name, math.nan))
            },
            "memory": memory,
            "classes": [
                {
                    "sla": one.sla_class,
                    "first_token": _times(one.first_token),
                    "output_token": _times(one.output_token),
                }
                for one in snapshot.classes
            ],
        },
    )


def _row(row: RowSnapshot) -> dict[str, Any]:
    return {
        "job": row.job_id,
        "choice": row.choice,
        "tenant": row.tenant,
        "sla": row.sla_class,
        "cached": row.cached_tokens,
        "output": row.output_tokens,
        "max": row.max_tokens,
    }


def _query(query: QuerySnapshot) -> dict[str, Any]:
    return {
        "job": query.job_id,
        "choice": query.choice,
        "tenant": query.tenant,
        "sla": query.sla_class,
        "state": str(query.state),
        "prompt": query.prompt_tokens,
        "prefilled": query.prefilled_tokens,
        "output": query.output_tokens,
        "max": query.max_tokens,
        "parks": query.parks,
        "bytes": query.parked_bytes,
        "held": query.held,
    }


def _times(times: RecentTimes) -> dict[str, Any]:
    return {
        "samples": times.samples,
        "p50_s": times.p50_s,
        "p95_s": times.p95_s,
        "target_s": times.target_s,
    }
