"""M8, M9: an engine under a governor: neighbours come and go, readings fail, and no token changes."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch

from batond.bench.neighbours import TICK_S, ScriptedNeighbour
from batond.daemon.engine import governing, process
from batond.daemon.engine.governing import Governing, make_governing, measure_own_use
from batond.daemon.errors import ConfigError
from batond.daemon.memory.governor import Governor, OwnUse
from batond.daemon.memory.readings import HostSource, MemoryReading, ReadingLost
from batond.daemon.memory.use import ArenaUse
from batond.daemon.requests.params import SamplingParams
from batond.daemon.wire.messages import GovernorState, Stop
from batond.daemon.wire.settings import MemorySettings

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from batond.daemon.engine.local import LocalEngine

    MakeEngine = Callable[..., LocalEngine]

ROWS = 6


@pytest.fixture
def around() -> ScriptedNeighbour:
    return ScriptedNeighbour()


@pytest.fixture
def governed(around: ScriptedNeighbour, make_engine: MakeEngine, llama: Any) -> Callable[..., LocalEngine]:
    def make(**options: Any) -> LocalEngine:
        governor = Governing(around, Governor(), threaded=False, own_use=around.own_use, clock=around.clock)
        return make_engine(llama, rows=ROWS, governor=governor, max_query_tokens=128, **options)

    return make


def submit(engine: LocalEngine, rng: random.Random, count: int) -> list[Any]:
    classes = ("interactive", "standard", "batch")
    return [
        engine.submit(
            [rng.randrange(3, 150) for _ in range(rng.randrange(1, 60))],
            SamplingParams(max_tokens=rng.randrange(1, 40), ignore_eos=True),
            sla_class=rng.choice(classes),
        )
        for _ in range(count)
    ]


def test_a_neighbour_takes_most_of_the_memory_and_leaves(
    around: ScriptedNeighbour, governed: Callable[..., LocalEngine], llama: Any, solo: Any, rng: random.Random
) -> None:
    """M8: in steps; the batch shrinks and grows again, and every query has the tokens of its solo run."""
    engine = governed()
    queries = submit(engine, rng, 26)
    states: set[GovernorState] = set()
    script = {8: 200, 16: 400, 24: 600, 50: 300, 60: 0}
    for step in range(4000):
        around.wanted_tokens = script.get(step, around.wanted_tokens)
        if not engine.busy:
            break
        engine.step()
        status = engine.memory_status
        assert status is not None
        states.add(status.limits.state)
        engine.check_integrity()
    assert not engine.busy
    assert around.wanted_tokens == 0
    for query in queries:
        expected = solo(llama, query.prompt_token_ids, query.sampling.max_tokens)
        assert query.output_token_ids == expected, query.query_id
    assert {GovernorState.STEADY, GovernorState.SHRINKING, GovernorState.GROWING} <= states
    pool = engine.residency.store.pool
    assert pool.used_bytes == engine.residency.sessions.nbytes == 0
    for _ in range(400):
        engine.tend()
    status = engine.memory_status
    assert status is not None
    assert status.limits.kv_budget_bytes == int(0.87 * status.total_bytes)
    assert status.limits.state is GovernorState.STEADY


def test_one_query_goes_on_when_nothing_is_left(
    around: ScriptedNeighbour, governed: Callable[..., LocalEngine], llama: Any, solo: Any, rng: random.Random
) -> None:
    """M8: neighbours hold everything that the batch does not."""
    engine = governed()
    around.wanted_tokens = around.total_tokens
    queries = submit(engine, rng, 6)
    most = 0
    while engine.busy:
        engine.step()
        most = max(most, len(engine.residency.occupied))
    assert most < ROWS
    for query in queries:
        assert query.output_token_ids == solo(llama, query.prompt_token_ids, query.sampling.max_tokens)
    status = engine.memory_status
    assert status is not None
    assert status.limits.state is GovernorState.CRITICAL


def test_lost_readings_hold_the_limits_and_jobs_finish(
    around: ScriptedNeighbour, governed: Callable[..., LocalEngine], llama: Any, solo: Any, rng: random.Random
) -> None:
    """M9: Unknown Error in mid run; a gauge tells, and nothing is raised while blind."""
    engine = governed()
    queries = submit(engine, rng, 10)
    around.wanted_tokens = 500
    for _ in range(10):
        engine.step()
    status = engine.memory_status
    assert status is not None
    assert status.readings_lost == 0
    held = status.limits.kv_budget_bytes
    around.broken, around.wanted_tokens = "Unknown Error", 0
    while engine.busy:
        around.now_s += TICK_S
        engine.step()
        status = engine.memory_status
        assert status is not None
        assert status.limits.kv_budget_bytes == held
    assert status.limits.state is GovernorState.LOST
    assert "Unknown Error" in status.limits.reason
    assert status.readings_lost == 1
    for query in queries:
        assert query.output_token_ids == solo(llama, query.prompt_token_ids, query.sampling.max_tokens)
    around.broken = ""
    for _ in range(200):
        engine.tend()
    status = engine.memory_status
    assert status is not None
    assert status.limits.state is GovernorState.STEADY
    assert status.limits.kv_budget_bytes is not None
    assert held is not None
    assert status.limits.kv_budget_bytes > held
    assert status.readings_lost == 1


def test_limits_never_loosen_what_was_configured(
    around: ScriptedNeighbour, governed: Callable[..., LocalEngine], llama: Any, rng: random.Random
) -> None:
    engine = governed(kv_budget_bytes=1 << 20)
    engine.close()
    assert around.closed
    assert engine.memory_status is None
    record = engine.residency.batch.layout.record_bytes
    engine = governed(kv_budget_bytes=130 * record)
    submit(engine, rng, 6)
    while engine.busy:
        engine.step()
        assert sum(engine.residency.batch.lengths) <= 130


class TenBytesEach:
    """A layout."""

    def nbytes(self, tokens: int) -> int:
        return 10 * tokens


@dataclass
class PooledBatch:
    """A batch that pools, and says what is trimmed."""

    pooled: int = 500
    elastic: bool = True
    trims: list[int] = field(default_factory=list)
    rows: int = 4
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    lengths: tuple[int, ...] = (6, 0)
    layout: Any = field(default_factory=TenBytesEach)

    @property
    def memory(self) -> ArenaUse:
        return ArenaUse(100, self.pooled, 10_000, elastic=self.elastic)

    def trim(self, keep_bytes: int = 0) -> int:
        self.trims.append(keep_bytes)
        back, self.pooled = self.pooled - keep_bytes, keep_bytes
        return back

    def trim_soon(self) -> None:
        self.trim()


class Memory:
    """A memory of 1000 bytes."""

    name = "a memory"

    def __init__(self, used: int = 0) -> None:
        self.used, self.now_s, self.closed = used, 50.0, False
        self.broken = False

    def clock(self) -> float:
        return self.now_s

    def read(self) -> MemoryReading:
        if self.broken:
            raise ReadingLost("no driver")
        self.now_s += TICK_S
        return MemoryReading(1000, 1000 - self.used, self.now_s)

    def close(self) -> None:
        self.closed = True


def attached(memory: Memory, batch: Any, **options: Any) -> Governing:
    made = Governing(
        memory,
        Governor(),
        threaded=False,
        own_use=lambda one: OwnUse(one.memory.committed_bytes, one.memory.pooled_bytes),
        clock=memory.clock,
        **options,
    )
    made.attach(batch, largest_bytes=50)
    return made


def test_pools_are_given_back_when_a_neighbour_wants_memory() -> None:
    """M8: also of an engine that is idle: it asks for the limits several times within 250 ms."""
    memory, batch = Memory(used=600), PooledBatch()
    governed = attached(memory, batch)
    governed.limits(0, lambda: 0)
    assert batch.trims == []
    batch.pooled = 900
    governed.limits(0, lambda: 0)
    assert batch.trims[-1] > 0, "more than the budget leaves, and nobody asks for the rest"
    memory.used = 1000
    limits = governed.limits(0, lambda: 0)
    assert limits is not None
    assert (limits.state, batch.trims[-1]) == (GovernorState.CRITICAL, 0)
    assert governed.wait_s <= 0.125


def test_a_long_step_keeps_no_pool_from_a_neighbour() -> None:
    """M8: what is pooled goes back by the readings' thread, while nobody asks for limits."""
    memory, batch, trimmed = Memory(used=600), PooledBatch(), threading.Event()
    trim = batch.trim

    def noted(keep_bytes: int = 0) -> int:
        assert threading.current_thread() is not threading.main_thread()
        try:
            return trim(keep_bytes)
        finally:
            trimmed.set()

    batch.trim = noted  # type: ignore[method-assign]
    governed = Governing(memory, Governor(), interval_s=0.001, own_use=lambda _: OwnUse(), clock=memory.clock)
    governed.attach(batch, largest_bytes=50)  # type: ignore[arg-type]
    memory.used = 990
    assert trimmed.wait(30)
    assert batch.pooled == 0
    governed.close()


def test_the_real_host_governs_a_real_engine(make_engine: MakeEngine, llama: Any, solo: Any) -> None:
    """M8: readings of this host, on their thread; whatever it is busy with, the tokens are the same."""
    governor = make_governing(MemorySettings(governor="on", sample_ms=10), "cpu")
    engine = make_engine(llama, rows=4, governor=governor, max_query_tokens=128)
    assert engine.tend_every_s == 0.01
    queries = [
        engine.submit([place + 3] * 20, SamplingParams(max_tokens=20, ignore_eos=True)) for place in range(6)
    ]
    engine.run_until_idle()
    for query in queries:
        assert query.output_token_ids == solo(llama, query.prompt_token_ids, 20)
    status = engine.memory_status
    assert status is not None
    assert status.total_bytes > status.free_bytes >= 0
    assert status.own.outside_bytes > 32 << 20, "torch alone takes as much"
    assert status.other_bytes < status.total_bytes
    engine.close()
    assert engine.memory_status is None


def test_a_new_reading_or_a_larger_query_makes_a_new_decision_and_nothing_else() -> None:
    """Cheap when nothing changed; but a query that came since the last reading has its floor at once."""
    memory, batch = Memory(used=100), PooledBatch(pooled=0)
    decisions = 0

    class Counting(Governor):
        def decide(self, *arguments: Any, **options: Any) -> Any:
            nonlocal decisions
            decisions += 1
            return super().decide(*arguments, **options)

    made = Governing(memory, Counting(), threaded=False, own_use=lambda _: OwnUse(100), clock=memory.clock)
    made.attach(batch, largest_bytes=50)
    memory.broken = True  # From here on the readings stay what they are, and fresh.
    for _ in range(2):
        made.limits(1, lambda: 7)
    decisions = 0
    for _ in range(5):
        made.limits(1, lambda: 7)
    assert decisions == 0
    memory.broken, memory.used = False, 1000
    limits = made.limits(1, lambda: 7)
    memory.broken = True
    assert limits is not None
    assert (decisions, limits.kv_budget_bytes) == (1, 7)
    for _ in range(5):
        limits = made.limits(1, lambda: 40)
    assert limits is not None
    assert (decisions, limits.kv_budget_bytes) == (2, 40)
    made.close()
    assert made.limits(1, lambda: 7) is None
    assert memory.closed


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_a_memory_that_cannot_be_read(mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    """M9: by itself it stays off; demanded, the start says why not."""
    memory, batch = Memory(), PooledBatch()
    memory.broken = True
    made = Governing(memory, Governor(), mode=mode, own_use=lambda _: OwnUse(), clock=memory.clock)
    if mode == "on":
        with pytest.raises(ConfigError, match="'on', but a memory can't be read: no driver"):
            made.attach(batch, 50)
    else:
        made.attach(batch, 50)
        assert made.why == "off: a memory can't be read: no driver"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert not made.on
    assert made.limits(0, lambda: 0) is None
    assert made.status is None
    assert memory.closed


def test_auto_leaves_a_batch_alone_that_could_give_nothing_back(caplog: pytest.LogCaptureFixture) -> None:
    made = attached(Memory(), PooledBatch(elastic=False), mode="auto")
    assert not made.on
    assert made.limits(0, lambda: 0) is None
    assert "gives back little" not in caplog.text
    assert attached(Memory(), PooledBatch(elastic=False), mode="on").on
    assert "gives back little" in caplog.text


def test_who_is_governed_where() -> None:
    assert make_governing(MemorySettings(governor="off"), "cpu") is None
    assert make_governing(MemorySettings(governor="auto"), "cpu") is None
    made = make_governing(MemorySettings(governor="on", sample_ms=80, reserve_bytes=5), "cpu")
    assert made is not None
    assert isinstance(made._source, HostSource)
    assert made.wait_s == 0.08
    assert made._governor.marks.reserve_bytes == 5


@pytest.mark.parametrize("arena", ["auto", "plain"])
def test_nvml_is_not_asked_where_nothing_could_be_given_back(
    arena: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M9: one that hangs costs a plain start nothing."""
    asked: list[Any] = []
    monkeypatch.setattr(governing, "NvmlSource", lambda *arguments: asked.append(arguments))
    assert make_governing(MemorySettings(governor="auto"), "cuda:0", arena=arena) is None
    assert asked == []


def test_a_card_is_read_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        uuid = "5f2a9c1e-0000-1111-2222-333344445555"
        total_memory = 80 << 30

    made: list[tuple[str, int]] = []

    class Source(Memory):
        def __init__(self, uuid: str, total: int) -> None:
            super().__init__()
            made.append((uuid, total))

        def read(self) -> MemoryReading:
            self.used += 300
            return super().read()

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 100)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    monkeypatch.setattr(governing, "NvmlSource", Source)
    governed = make_governing(MemorySettings(), "cuda:0", arena="elastic")
    assert governed is not None
    assert made == [(Properties.uuid, Properties.total_memory)] * 2, "to measure, and to watch"
    batch = PooledBatch(device=torch.device("cuda:0"))
    assert governed._measure(batch) == OwnUse(100, 500, 100, 200, slack_bytes=40), (
        "300 went, and 100 of them are torch's"
    )


@pytest.mark.parametrize(("elastic", "outside"), [(True, 5000), (False, 4400)])
def test_nothing_is_counted_twice_on_a_card(
    monkeypatch: pytest.MonkeyPatch, *, elastic: bool, outside: int
) -> None:
    """What is not elastic is torch's, and is counted there."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 5000)
    batch: Any = PooledBatch(elastic=elastic, device=torch.device("cuda"))
    slack = 40 if elastic else 0  # Parking a row would give no page of the other back.
    assert measure_own_use(batch, 7) == OwnUse(100, 500, outside, 7, slack_bytes=slack)


def test_cached_blocks_go_back_under_pressure_and_not_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied = 0

    def empty() -> None:
        nonlocal emptied
        emptied += 1

    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 1 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 1 << 20)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty)
    memory = Memory(used=800)
    governed = attached(memory, PooledBatch(device=torch.device("cuda")))
    assert emptied == 1, "what the start has left behind"
    governed.limits(1, lambda: 0)
    assert emptied == 1
    memory.used = 990
    for _ in range(int(2.0 / TICK_S)):
        governed.limits(1, lambda: 0)
    times = 2.0 / governing.EMPTY_CACHE_EVERY_S
    assert times / 2 < emptied - 1 <= times + 1


def test_an_idle_engine_process_tends_its_memory(
    around: ScriptedNeighbour, governed: Callable[..., LocalEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """M8: between two commands, several times within 250 ms, and not only with each heartbeat."""
    engine = governed()
    waits: list[float] = []

    class Channel:
        def poll(self, timeout_s: float) -> list[Any]:
            waits.append(timeout_s)
            if len(waits) == 3:
                around.wanted_tokens = around.total_tokens
            return [Stop()] if len(waits) > 6 else []

        def send(self, _: Any) -> None: ...

    channel: Any = Channel()
    process.EngineProcess(engine, channel).run()
    assert max(waits) <= 0.125
    status = engine.memory_status
    assert status is not None
    assert status.limits.state is GovernorState.CRITICAL
    engine.close()


def test_an_engine_without_a_governor_waits_for_commands(make_engine: MakeEngine, llama: Any) -> None:
    engine = make_engine(llama)
    assert engine.memory_status is None
    assert process.EngineProcess(engine, Any)._idle_wait_s == process.HEARTBEAT_S  # type: ignore[arg-type]
