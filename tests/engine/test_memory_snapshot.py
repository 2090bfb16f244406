"""What operators are shown of memory: where KV lies, and what the governor allows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from batond.daemon.engine.queries.view import memory_snapshot
from batond.daemon.memory.governor import MemoryLimits, MemoryStatus, OwnUse
from batond.daemon.requests.params import SamplingParams
from batond.daemon.wire.messages import GovernorState

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.engine.local import LocalEngine


def test_kv_is_shown_where_it_lies(make_engine: Callable[..., LocalEngine], llama: Any) -> None:
    engine = make_engine(llama, rows=2)
    record_bytes = engine.residency.batch.layout.record_bytes
    query = engine.submit([1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True))
    while not query.output_token_ids or query.row is None:
        engine.step()
    before = engine.snapshot().memory
    assert before.committed_bytes >= query.prefilled_tokens * record_bytes
    assert before.parked_bytes == 0
    assert (before.governor, before.row_limit, before.kv_budget_bytes) == (GovernorState.OFF, 2, None)
    engine.park(query)
    assert engine.snapshot().memory.parked_bytes == query.prefilled_tokens * record_bytes
    engine.run_until_idle()
    assert engine.snapshot().memory.parked_bytes == 0


@pytest.mark.parametrize(
    ("configured", "allowed", "shown"),
    [(None, None, None), (None, 5, 5), (7, None, 7), (7, 5, 5), (5, 7, 5)],
)
def test_the_tighter_bound_is_shown(
    make_engine: Callable[..., LocalEngine],
    llama: Any,
    configured: int | None,
    allowed: int | None,
    shown: int | None,
) -> None:
    residency = make_engine(llama, rows=2, batch="padded").residency
    for state in GovernorState:
        limits = MemoryLimits(rows=1, kv_budget_bytes=allowed, state=state, reason="why")
        status = MemoryStatus(limits, 100, 60, OwnUse(committed_bytes=30), other_bytes=10, readings_lost=0)
        memory = memory_snapshot(residency, status, configured)
        assert memory.kv_budget_bytes == shown
        assert (memory.row_limit, memory.governor.value, memory.reason) == (1, state.value, "why")
        assert (memory.total_bytes, memory.free_bytes, memory.own_bytes) == (100, 60, 30)
