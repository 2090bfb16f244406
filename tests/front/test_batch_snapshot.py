"""The batch as clients see it, there and back: nothing is lost on the way through the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from batond.clients import convert as clients_convert
from batond.daemon.front import convert
from batond.daemon.wire.messages import GovernorState, MemorySnapshot, Snapshot

if TYPE_CHECKING:
    from batond import clients


def shown(memory: MemorySnapshot) -> clients.MemorySnapshot | None:
    shot = Snapshot(
        step=1,
        rows=[],
        queries=[],
        columns=0,
        host_pool_used_bytes=0,
        host_pool_bytes=0,
        counters={},
        memory=memory,
    )
    return clients_convert.snapshot(convert.snapshot(shot, queued_jobs=0)).memory


@pytest.mark.parametrize("state", GovernorState)
def test_each_state_of_the_governor_has_its_word(state: GovernorState) -> None:
    memory = shown(MemorySnapshot(governor=state))
    assert memory is not None
    assert memory.governor == state.value


@pytest.mark.parametrize("kv_budget_bytes", [None, 0, 1 << 40])
def test_no_figure_of_memory_is_lost(kv_budget_bytes: int | None) -> None:
    names = [name for name in MemorySnapshot.__struct_fields__ if name.endswith("_bytes")]
    figures = {name: 1000 + place for place, name in enumerate(names)}
    figures["kv_budget_bytes"] = kv_budget_bytes  # type: ignore[assignment] - None is no bound
    memory = shown(MemorySnapshot(**figures, row_limit=3, reason="why"))
    assert memory is not None
    assert {name: getattr(memory, name) for name in names} == figures
    assert (memory.row_limit, memory.reason) == (3, "why")
