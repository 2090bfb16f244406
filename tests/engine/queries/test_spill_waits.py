"""How long a step may wait for the disk: a moment while nobody has a row, and never for a load."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from batond.daemon.engine import SamplingParams
from batond.daemon.engine.queries.spilling import IDLE_WAIT_S, PATIENCE_STEPS
from batond.daemon.scheduler.plan import ParkMode, ParkOrder, Plan
from batond.offload.errors import HostPoolFullError
from batond.offload.folder import SpillFolder
from batond.offload.spill import SpillJob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from batond.daemon.engine import LocalEngine
    from batond.daemon.engine.queries.query import Query

    Make = Callable[..., LocalEngine]
    Solo = Callable[..., list[int]]

SLICE_BYTES = 8 * 384
LONG = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture
def make(make_engine: Make, tmp_path: Path) -> Iterator[Make]:
    """Engines with a directory for files."""
    made: list[LocalEngine] = []

    def engine(model: Any, slices: int) -> LocalEngine:
        options = {"rows": 4, "spill_dir": tmp_path / "spill", "spill_bytes": 1 << 22}
        made.append(make_engine(model, host_pool_bytes=slices * SLICE_BYTES, **options))
        return made[-1]

    yield engine
    for one in made:
        one.check_integrity()
        one.close()


def rest(engine: LocalEngine) -> None:
    """The disk has done what was begun."""
    tier: Any = engine.residency.store.spiller.tier
    for executor in (tier._in, tier._out, tier._out):
        executor.submit(int).result()
        engine.residency.settle()


def park(engine: LocalEngine, count: int) -> list[Query]:
    """So many decode some tokens and are parked by hand."""
    queries = []
    for number in range(count):
        query = engine.submit([5, 6, 7, 8 + number], LONG)
        while len(query.output_token_ids) < 4:
            engine.step()
            rest(engine)
        engine.park(query)
        engine.step()
        rest(engine)
        queries.append(query)
    return queries


def finish(engine: LocalEngine, queries: list[Query], solo: Solo, model: Any) -> None:
    engine.run_until_idle()
    for query in queries:
        assert query.output_token_ids == solo(model, query.prompt_token_ids, 12)
    assert engine.counters["recomputed_tokens"] == 0


def test_a_step_waits_for_a_hung_disk_once_and_not_for_each_query(
    llama: Any, make: Make, solo: Solo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R6: else a daemon with many parked queries would pass for frozen."""
    engine = make(llama, 4)
    queries = park(engine, 6)
    entries = engine.residency.store._entries
    away = [query for query in queries if entries[query.query_id].reservation is None]
    assert len(away) >= 2
    for query in queries:
        engine.residency.store.spiller.begin_write(query.query_id)  # All that is in the pool is room.
    rest(engine)
    hung, now_s, waits = threading.Event(), [0.0], []
    read, wait = SpillFolder.read, SpillJob.wait

    def hang(*arguments: Any) -> int:
        assert hung.wait(30)
        return read(*arguments)

    def pass_time(_: SpillJob, timeout_s: float | None = None) -> None:
        assert timeout_s is not None
        waits.append(timeout_s)
        now_s[0] += timeout_s

    monkeypatch.setattr(engine._spilling, "_clock", lambda: now_s[0])
    with monkeypatch.context() as patched:
        patched.setattr(SpillFolder, "read", hang)
        patched.setattr(SpillJob, "wait", pass_time)
        for query in away:
            engine.resume(query)
        engine.step()
        assert all(entries[query.query_id].arriving is not None for query in away)
        assert waits == [IDLE_WAIT_S]
        engine.step()
        assert waits == pytest.approx([IDLE_WAIT_S] * 2)
        hung.set()
    assert SpillJob.wait is wait
    finish(engine, queries, solo, llama)


def test_what_is_about_to_be_loaded_keeps_its_place_in_the_pool(
    llama: Any, make: Make, solo: Solo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R6: whoever wants room in the same step doesn't send its load to the disk."""
    engine = make(llama, 2)
    (query,) = park(engine, 1)
    store = engine.residency.store
    store.spiller.begin_write(query.query_id)
    rest(engine)
    assert store.spiller.spare_bytes == store.parked_bytes(query.query_id) > 0
    place, wait = engine._relief.place, SpillJob.wait
    refused, endless = [], []

    def crowd(placed: Query, reason: str) -> None:
        try:
            store.pool.release(store.spiller.reserve(store.pool.capacity_bytes))
        except HostPoolFullError as error:
            refused.append(error)
        engine.check_integrity()
        place(placed, reason)

    def note(job: SpillJob, timeout_s: float | None = None) -> None:
        if timeout_s is None:
            endless.append(job)
        wait(job, timeout_s)

    monkeypatch.setattr(engine._relief, "place", crowd)
    monkeypatch.setattr(SpillJob, "wait", note)
    engine.resume(query)
    engine.step()
    assert query.row is not None
    assert not endless
    assert len(refused) == 1
    finish(engine, [query], solo, llama)


def test_it_keeps_its_place_only_while_it_is_loaded(llama: Any, make: Make) -> None:
    """Parks of the same step may have the room afterwards; what was cancelled holds none."""
    engine = make(llama, 4)
    queries = park(engine, 2)
    spiller = engine.residency.store.spiller
    for query in queries:
        spiller.begin_write(query.query_id)
    rest(engine)
    spare_bytes = spiller.spare_bytes
    for query in queries:
        assert engine._spilling.at_hand(query)
    assert spiller.spare_bytes == 0
    engine.check_integrity()
    engine.residency.settle()
    assert spiller.spare_bytes == 0
    engine.cancel(queries[0])
    engine.check_integrity()
    engine._spilling.let_go()
    engine.check_integrity()
    assert 0 < spiller.spare_bytes < spare_bytes


def test_who_is_expected_keeps_its_place_from_those_behind_it(
    llama: Any, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R6: of two that are resumed in one step, the second is read back only where there is room for both."""
    engine = make(llama, 4)
    first, second = park(engine, 2)
    spiller, entries = engine.residency.store.spiller, engine.residency.store._entries
    for query in (first, second):
        spiller.begin_write(query.query_id)
    rest(engine)
    engine._spilling.let_go()
    spiller._give_room(entries[second.query_id])
    others = spiller.reserve(engine.residency.store.pool.free_bytes)
    waited: list[SpillJob] = []
    monkeypatch.setattr(SpillJob, "wait", lambda job, *_: waited.append(job))
    resumed = (first.query_id, second.query_id)
    engine._rows.prepare(Plan(resume=resumed, reasons=dict.fromkeys(resumed, "row_taken")))
    assert not waited
    assert first.query_id in engine.residency._arriving
    assert entries[second.query_id].arriving is None
    spiller.check_integrity()
    monkeypatch.undo()
    spiller._pool.release(others)


def test_who_has_landed_behind_it_does_not_keep_it_waiting_for_room(llama: Any, make: Make) -> None:
    """R6: both tiers are full, and those behind can't make room: patience ends all the same."""
    engine = make(llama, 4)
    first, second = park(engine, 2)
    victim = engine.submit([5, 6, 7, 30], SamplingParams(max_tokens=40, ignore_eos=True))
    while victim.row is None:
        engine.step()
        rest(engine)
    store = engine.residency.store
    for query in (first, second):
        store.spiller.begin_write(query.query_id)
    rest(engine)
    tier: Any = store.spiller.tier
    tier._rested_s = float("inf")  # Nothing can be written.
    store.spiller._give_room(store._entries[first.query_id])
    others = store.spiller._pool.reserve(store.pool.free_bytes)
    order = ParkOrder(victim.query_id, ParkMode.OFFLOAD, "kv_bytes", first.query_id)
    resumed = (first.query_id, second.query_id)
    plan = Plan(park=(order,), resume=resumed, reasons=dict.fromkeys(resumed, "row_taken"))
    for query in (first, second):
        engine.resume(query)
    engine.residency.bring([second])
    assert engine.residency.landed(second)
    for _ in range(2 * PATIENCE_STEPS):
        engine._roster.refresh()
        engine._spilling.write_ahead()
        engine._rows.prepare(plan)
        engine._rows.run(plan)
        if victim.row is None:
            break
    assert victim.row is None, "its order is carried out"
    store.spiller._pool.release(others)
