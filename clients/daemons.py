"""The daemons of a Redis, as administrators see them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from batond.clients.model import ServerState
from batond.v1 import admin_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonInfo:
    """A daemon that shares the Redis, as it told of itself some seconds ago at most.

    Attributes:
        daemon_id: Names this run of it.
        model: What it serves.
        address: Where other hosts reach it, `host:port`; empty if only its own host does.
        state: How far it can serve.
        rows: Of its batch.
        running_jobs: In its engine.
        version: batond's.
        start_time: When it was ready first (UTC).
    """

    daemon_id: str
    model: str
    address: str
    state: ServerState
    rows: int
    running_jobs: int
    version: str
    start_time: datetime


_STATES = {
    admin_pb2.SERVER_STATE_LOADING: ServerState.LOADING,
    admin_pb2.SERVER_STATE_READY: ServerState.READY,
    admin_pb2.SERVER_STATE_DRAINING: ServerState.DRAINING,
    admin_pb2.SERVER_STATE_DEGRADED: ServerState.DEGRADED,
}


def daemon(message: admin_pb2.Daemon) -> DaemonInfo:
    """Reads a message."""
    return DaemonInfo(
        daemon_id=message.daemon_id,
        model=message.model,
        address=message.address,
        state=_STATES.get(message.state, ServerState.UNKNOWN),
        rows=message.rows,
        running_jobs=message.running_jobs,
        version=message.version,
        start_time=message.start_time.ToDatetime(tzinfo=UTC),
    )
