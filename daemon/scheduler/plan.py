"""The frozen values between deciding and doing."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batond.policies.base import QueryView


class Gate(enum.Enum):
    """When rows are given out."""

    ITERATION = "iteration"  # Whenever one is free (continuous batching).
    BATCH = "batch"  # Only when all are free: run-to-completion, for comparison.


class ParkMode(enum.Enum):
    """What happens to the KV of a parked query."""

    OFFLOAD = "offload"  # Copied to the host pool.
    RECOMPUTE = "recompute"  # Dropped; computed again from prompt + emitted tokens.


@dataclass(frozen=True, slots=True)
class BatchView:
    """All the planner may know of the engine in this step.

    Attributes:
        now_s: Monotonic clock.
        rows: Rows the batch may use now.
        queries: Every live query, in any order; not looked at by a planner that is given a `Line`.
        chunk_tokens: Prompt tokens that may be computed in this step; None is no bound.
        ready_limit: How many prefilled queries may be kept ahead of free rows.
        kv_free_bytes: Bytes the batch and the slices ahead of it may still take; None is no bound. Below zero
            more is promised than there is.
        row_step_bytes: Bytes that each row writes in this step, for its next token.
        host_free_bytes: Bytes free in the host pool.
        gate: See Gate.
        recompute_only: The model's KV can't be carried: every park is a recompute.
        fixed_chunks: A prompt is always cut at the same places, multiples of `chunk_tokens` from its start,
            whatever else is computed: a chunk that doesn't fit whole waits for the next step.
    """

    now_s: float
    rows: int
    queries: tuple[QueryView, ...]
    chunk_tokens: int | None = 256
    ready_limit: int = 1
    kv_free_bytes: int | None = None
    row_step_bytes: int = 0
    host_free_bytes: int = 0
    gate: Gate = Gate.ITERATION
    recompute_only: bool = False
    fixed_chunks: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute the next `tokens` prompt tokens of a query; `last` if that completes it."""

    query_id: str
    tokens: int
    last: bool


@dataclass(frozen=True, slots=True)
class ParkOrder:
    """Take row and device memory of a query; only for "kv_limit" of one without a row."""

    query_id: str
    mode: ParkMode
    cause: str  # "row", "kv_bytes", "row_limit" or "kv_limit".
    for_query_id: str  # Empty for the limits.

    @property
    def preempts(self) -> bool:
        """Whether somebody else gets what is taken; only then it counts against the cap on parks."""
        return bool(self.for_query_id)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do in this step, in this order: chunks, park, resume, admit.

    Attributes:
        chunks: Prefill work, most urgent first; the sum of tokens is within the budget.
        park: Rows to take, and slices without a row to put off.
        resume: Parked queries whose KV is in the host pool and that get a row, in order.
        admit: READY queries, and those whose last chunk is in `chunks`, that get a row, in order.
        prefetch: Parked queries to bring to the device ahead of a row that is about to come free, in order. A
            hint: whoever can't copy beside the batch may leave it.
        blocked: Why a query that would be next got nothing, by query id: "row" (none is free, and nobody less
            urgent has one), "kv_bytes", "quantum" and "park_cap" (who has what it needs is protected still,
            or for good), "prefill" (no chunk tokens left), "held" (parked by hand, or
            put off for want of memory).
        reasons: Why a query of `resume`, `admit` or `prefetch` is there, by query id: "row_free", "row_taken"
            (from a victim), "batch" (all rows are free: run-to-completion), "row_soon" (prefetch).
    """

    chunks: tuple[Chunk, ...] = ()
    park: tuple[ParkOrder, ...] = ()
    resume: tuple[str, ...] = ()
    admit: tuple[str, ...] = ()
    prefetch: tuple[str, ...] = ()
    blocked: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Whether nothing is to be done besides decoding."""
        return not (self.chunks or self.park or self.resume or self.admit)

    @property
    def moves_rows(self) -> bool:
        """Whether anybody is to get a row or to lose one."""
        return bool(self.park or self.resume or self.admit)

    def without_moves(self) -> Plan:
        """The same without anybody getting or losing a row, for a step whose rows are fixed already."""
        if not self.moves_rows:
            return self
        moved = {*self.resume, *self.admit}
        reasons = {query_id: reason for query_id, reason in self.reasons.items() if query_id not in moved}
        return replace(self, park=(), resume=(), admit=(), reasons=reasons)
