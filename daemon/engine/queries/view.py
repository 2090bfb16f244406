"""The engine as others see it: the planner's view before a step, the operator's snapshot after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from batond.daemon.wire.messages import (
    MemorySnapshot,
    QuerySnapshot,
    QueryState,
    RowSnapshot,
    Snapshot,
)
from batond.policies.base import Phase, QueryView

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from batond.daemon.engine.model.layout import RecordLayout
    from batond.daemon.engine.queries.query import Query
    from batond.daemon.engine.queries.residency import Residency
    from batond.daemon.memory.governor import MemoryStatus
    from batond.daemon.scheduler.line import Line

_PHASES = {
    QueryState.WAITING: Phase.WAITING,
    QueryState.PREFILLING: Phase.PREFILLING,
    QueryState.READY: Phase.READY,
    QueryState.RUNNING: Phase.RUNNING,
    QueryState.PARKED: Phase.PARKED,
}


def query_view(query: Query, layout: RecordLayout, *, inline: bool = False) -> QueryView:
    """One query for the planner and the policies.

    Inline, a prompt is computed by the batch step itself: a new query needs nothing but a row.
    """
    phase = _PHASES[query.state]
    cached = query.prefilled_tokens
    reserved_tokens = query.sampling.max_tokens if query.reserved_tokens is None else query.reserved_tokens
    on_device = query.row is not None or query.kv is not None or query.prefill is not None
    return QueryView(
        query_id=query.query_id,
        tenant=query.tenant,
        sla_class=query.sla_class.name,
        class_order=query.sla_class.order,
        preemptible=query.sla_class.preemptible,
        arrival_s=query.arrival_s,
        seq=query.seq,
        phase=Phase.READY if inline and phase is Phase.WAITING else phase,
        prompt_tokens=len(query.prompt_token_ids),
        prefilled_tokens=cached,
        output_tokens=len(query.output_token_ids),
        max_tokens=query.sampling.max_tokens,
        parks=query.planner_parks,
        since_admission_tokens=query.since_admission_tokens,
        park_seq=query.park_seq,
        held=query.held or query.put_off,
        kv_bytes=layout.nbytes(cached) if on_device else 0,
        reserved_bytes=layout.nbytes(len(query.prompt_token_ids) + reserved_tokens),
        park_bytes=layout.nbytes(cached),
        to_prefill_tokens=0 if inline else query.to_prefill_tokens,
        ttft_target_s=query.sla_class.ttft_target_s,
        tpot_target_s=query.sla_class.tpot_target_s,
        deadline_s=query.deadline_s,
        tenant_weight=query.tenant_weight,
    )


def free_bytes(line: Line, kv_budget_bytes: int | None) -> int | None:
    """Bytes of KV that are promised to nobody; below zero after the budget was lowered under what is."""
    return None if kv_budget_bytes is None else kv_budget_bytes - line.taken_bytes


def snapshot(
    step: int,
    queries: Iterable[Query],
    residency: Residency,
    counters: Mapping[str, float],
    *,
    policy: str,
    memory: MemorySnapshot,
) -> Snapshot:
    """The batch for people: rows, and queries without a row."""
    batch, pool = residency.batch, residency.store.pool
    rows = [RowSnapshot(row=row) for row in range(batch.rows)]
    for row, query in residency.occupied:
        rows[row] = RowSnapshot(
            row=row,
            query_id=query.query_id,
            tenant=query.tenant,
            sla_class=query.sla_class.name,
            tokens=batch.lengths[row],
            output_tokens=len(query.output_token_ids),
            max_tokens=query.sampling.max_tokens,
        )
    others = [
        QuerySnapshot(
            query_id=query.query_id,
            tenant=query.tenant,
            sla_class=query.sla_class.name,
            state=query.state,
            prompt_tokens=len(query.prompt_token_ids),
            prefilled_tokens=query.prefilled_tokens,
            output_tokens=len(query.output_token_ids),
            max_tokens=query.sampling.max_tokens,
            parks=query.parks,
            parked_bytes=query.on_host_tokens * batch.layout.record_bytes,
            held=query.held,
        )
        for query in queries
        if query.row is None
    ]
    return Snapshot(
        step=step,
        rows=rows,
        queries=others,
        columns=batch.columns,
        host_pool_used_bytes=pool.used_bytes,
        host_pool_bytes=pool.capacity_bytes,
        sessions=residency.sessions.count,
        session_bytes=residency.sessions.nbytes,
        counters=dict(counters),
        policy=policy,
        memory=memory,
    )


def memory_snapshot(
    residency: Residency, status: MemoryStatus | None, kv_budget_bytes: int | None
) -> MemorySnapshot:
    """Memory for people.

    Args:
        residency: Where KV is.
        status: Of the governor; None without one.
        kv_budget_bytes: As configured; a governor may allow less.
    """
    use, store = residency.batch.memory, residency.store
    shown = MemorySnapshot(
        committed_bytes=use.committed_bytes,
        pooled_bytes=use.pooled_bytes,
        reserved_bytes=use.reserved_bytes,
        parked_bytes=store.pool.used_bytes - residency.sessions.pool_bytes,
        spilled_bytes=store.spill_use.used_bytes,
        kv_budget_bytes=kv_budget_bytes,
        row_limit=residency.batch.rows,
    )
    if status is None:
        return shown
    limits = status.limits
    budgets = [budget for budget in (kv_budget_bytes, limits.kv_budget_bytes) if budget is not None]
    return msgspec.structs.replace(
        shown,
        kv_budget_bytes=min(budgets, default=None),
        row_limit=limits.rows,
        governor=limits.state,
        reason=limits.reason,
        total_bytes=status.total_bytes,
        free_bytes=status.free_bytes,
        own_bytes=status.own.total_bytes,
    )
