"""The batch as operators see it: plain frozen values, free of protobuf. `batch_view.py` draws them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime


class QueryState(enum.StrEnum):
    """Where a query stands inside the engine."""

    UNKNOWN = "unknown"
    WAITING = "waiting"
    PREFILLING = "prefilling"
    READY = "ready"
    RUNNING = "running"
    PARKED = "parked"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSnapshot:
    """One row of the batch; an idle row has an empty `job_id`. `max_tokens` 0 is not known."""

    row: int
    job_id: str = ""
    tenant: str = ""
    sla_class: str = ""
    cached_tokens: int = 0
    output_tokens: int = 0
    max_tokens: int = 0
    choice: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QuerySnapshot:
    """A query of the engine that owns no row; `held` means parked by hand. `max_tokens` 0 is not known."""

    job_id: str
    tenant: str = ""
    sla_class: str = ""
    state: QueryState = QueryState.UNKNOWN
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    output_tokens: int = 0
    max_tokens: int = 0
    parks: int = 0
    parked_bytes: int = 0
    held: bool = False
    choice: int = 0


class GovernorState(enum.StrEnum):
    """What the daemon's memory governor does."""

    UNKNOWN = "unknown"
    OFF = "off"
    STEADY = "steady"
    SHRINKING = "shrinking"
    CRITICAL = "critical"
    GROWING = "growing"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySnapshot:
    """Where KV lies, and what the batch may hold.

    Attributes:
        committed_bytes: Of KV in pages of rows.
        pooled_bytes: Of pages that no row owns, kept for the next one.
        reserved_bytes: Of addresses: what the batch could ever hold.
        parked_bytes: Of parked queries' KV in host RAM.
        spilled_bytes: Of KV on disk.
        kv_budget_bytes: Of KV that the batch may hold; None is no bound.
        row_limit: Rows that may be used.
        governor: What the memory governor does.
        reason: Why, in words.
        total_bytes: Of the memory that the batch lives in; 0 without a governor.
        free_bytes: Free part of it.
        own_bytes: Part of it that the engine holds.
    """

    committed_bytes: int = 0
    pooled_bytes: int = 0
    reserved_bytes: int = 0
    parked_bytes: int = 0
    spilled_bytes: int = 0
    kv_budget_bytes: int | None = None
    row_limit: int = 0
    governor: GovernorState = GovernorState.UNKNOWN
    reason: str = ""
    total_bytes: int = 0
    free_bytes: int = 0
    own_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentTimes:
    """Times of one kind, of the last minutes; None where there are none, or no target is known."""

    samples: int = 0
    p50_s: float | None = None
    p95_s: float | None = None
    target_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassSnapshot:
    """How the jobs of a class fare.

    Attributes:
        sla_class: Its name.
        first_token: From being accepted to the first token.
        output_token: From one token to the next: the means of generations that ended, parks included.
    """

    sla_class: str
    first_token: RecentTimes = RecentTimes()
    output_token: RecentTimes = RecentTimes()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSnapshot:
    """The batch as it stands after a step.

    Attributes:
        step: Count of steps since the engine started.
        time: When it was taken (UTC).
        rows: Every row, idle ones included, in order.
        queries: Queries without a row.
        columns: Length of the time axis all rows share.
        host_pool_used_bytes: Bytes of the host pool in use.
        host_pool_bytes: Size of the host pool.
        queued_jobs: Jobs that no engine has taken yet.
        counters: Counts that only grow, by name.
        memory: Where KV lies; None from a daemon that does not say.
        classes: How each class fares, most urgent first; none from a daemon that does not say.
    """

    step: int
    time: datetime | None = None
    rows: tuple[RowSnapshot, ...] = ()
    queries: tuple[QuerySnapshot, ...] = ()
    columns: int = 0
    host_pool_used_bytes: int = 0
    host_pool_bytes: int = 0
    queued_jobs: int = 0
    counters: Mapping[str, float] = field(default_factory=dict)
    memory: MemorySnapshot | None = None
    classes: tuple[ClassSnapshot, ...] = ()
