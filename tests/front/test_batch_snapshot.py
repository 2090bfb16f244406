"""The batch as clients see it, there and back: nothing is lost on the way through the contract."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from batond import clients
from batond.clients import convert as clients_convert
from batond.daemon.front import convert
from batond.daemon.front.recent import Recent
from batond.daemon.wire.messages import GovernorState, MemorySnapshot, Snapshot
from batond.policies.classes import SlaClasses
from batond.v1 import admin_pb2


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


def test_how_a_class_fares_arrives_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "time", SimpleNamespace(monotonic=lambda: 100.0))
    classes = SlaClasses()
    recent = Recent(classes.names)
    for value_s in (0.2, 0.1, 3.5):
        recent.first_token("batch", value_s, 99.0)
    message = admin_pb2.BatchSnapshot(classes=[convert.class_snapshot(one, recent) for one in classes])
    seen = {one.sla_class: one for one in clients_convert.snapshot(message).classes}
    assert list(seen) == ["interactive", "standard", "batch"]
    assert seen["batch"].first_token == clients.RecentTimes(samples=3, p50_s=0.2, p95_s=3.5, target_s=60.0)
    assert seen["batch"].output_token == clients.RecentTimes(samples=0, target_s=1.0)


def test_a_daemon_that_does_not_say_how_classes_fare_is_understood() -> None:
    assert clients_convert.snapshot(admin_pb2.BatchSnapshot(step=1)).classes == ()
