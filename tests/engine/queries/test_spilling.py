"""Slices on disk: a small host pool costs no computation, and a broken disk costs nothing else."""

from __future__ import annotations

import errno
import os
import random
import threading
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from batond.daemon.engine import SamplingParams
from batond.daemon.engine.queries.sessions import SessionKey
from batond.daemon.errors import ConfigError
from batond.daemon.scheduler.planner import PlannerLimits
from batond.daemon.wire.messages import QueryState
from batond.offload.folder import SpillFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from batond.daemon.engine import LocalEngine
    from batond.daemon.engine.queries.query import Query

    MakeEngine = Callable[..., LocalEngine]
    Solo = Callable[..., list[int]]

TOKEN_BYTES = 384
SLICE_BYTES = 8 * TOKEN_BYTES
PROMPTS = [[5, 6, 7, 8 + number] for number in range(6)]
LONG = SamplingParams(max_tokens=12, ignore_eos=True)
SHORT = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.fixture
def make(make_engine: MakeEngine, tmp_path: Path) -> Iterator[MakeEngine]:
    """Engines with a directory for files; afterwards it is empty, and nobody has it open."""
    made: list[LocalEngine] = []
    path = tmp_path / "spill"

    def engine(model: Any, **options: Any) -> LocalEngine:
        found = {"spill_dir": path, "spill_bytes": 1 << 22, "host_pool_bytes": SLICE_BYTES, **options}
        made.append(make_engine(model, **found))
        return made[-1]

    yield engine
    for one in made:
        one.check_integrity()
        one.close()
        assert one.residency.store.pool.used_bytes == 0
    if path.exists():
        assert list(path.iterdir()) == []


def rest(engine: LocalEngine) -> None:
    """The disk has time for what was begun, and for what that leaves to be removed."""
    tier: Any = engine.residency.store.spiller.tier
    for executor in () if tier is None else (tier._in, tier._out, tier._out):
        executor.submit(int).result()
        engine.residency.settle()
    engine.check_integrity()


def step(engine: LocalEngine) -> None:
    engine.step()
    rest(engine)


def park_all(engine: LocalEngine, *, tokens: int = 4) -> list[Query]:
    """One after the other decodes some tokens and is parked by hand."""
    queries = []
    for prompt in PROMPTS:
        query = engine.submit(prompt, LONG)
        queries.append(query)
        while len(query.output_token_ids) < tokens:
            step(engine)
        engine.park(query)
        engine.check_integrity()
        step(engine)
    return queries


def finish(engine: LocalEngine, queries: list[Query], solo: Solo, model: Any) -> int:
    """Let all finish as if they had never been parked; returns how many tokens were computed again."""
    engine.run_until_idle()
    engine.check_integrity()
    for query in queries:
        assert query.output_token_ids == solo(model, query.prompt_token_ids, query.sampling.max_tokens)
    return int(engine.counters["recomputed_tokens"])


def test_many_parks_in_a_pool_of_one_slice_cost_nothing(llama: Any, make: MakeEngine, solo: Solo) -> None:
    """M1, R9: all finish with their own tokens, and none is computed again."""
    engine = make(llama, rows=2)
    queries = park_all(engine)
    assert engine.residency.store.spill_use.spills == len(queries)
    assert finish(engine, queries, solo, llama) == 0
    use = engine.residency.store.spill_use
    assert use.fetches >= len(queries) - 1
    assert use.failures == 0


def test_without_a_disk_they_are_computed_again(llama: Any, make: MakeEngine, solo: Solo) -> None:
    """M1: as before there was a second tier."""
    engine = make(llama, rows=2, spill_dir=None)
    assert finish(engine, park_all(engine), solo, llama) > 0


def test_the_planner_parks_over_a_pool_of_one_slice(llama: Any, make: MakeEngine, solo: Solo) -> None:
    """S1, R9: urgent ones come and go; whoever gave them its row goes on where it stopped."""
    limits = PlannerLimits(quantum_tokens=1, max_parks=1000)
    engine = make(llama, rows=2, host_pool_bytes=2 * SLICE_BYTES, limits=limits)
    slow = [engine.submit(prompt, LONG, sla_class="batch") for prompt in PROMPTS]
    urgent = []
    for number in range(24):
        if number % 4 == 1:
            urgent.append(engine.submit([9, 9, number], SHORT, sla_class="interactive"))
        step(engine)
    assert finish(engine, slow + urgent, solo, llama) == 0
    assert engine.counters["parks"] > 4
    assert engine.counters["parks_dropped"] == 0


class Gate:
    """Reads of files wait here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        read = SpillFolder.read

        def wait(folder: SpillFolder, fd: int, piece: memoryview, offset: int) -> int:
            assert self.open.wait(30)
            return read(folder, fd, piece, offset)

        monkeypatch.setattr(SpillFolder, "read", wait)


def on_disk_alone(engine: LocalEngine) -> Query:
    """A query that was parked by hand, and whose bytes in the pool others have."""
    query = park_all(engine)[0]
    assert engine.residency.store._entries[query.query_id].reservation is None
    return query


def test_others_decode_while_a_slice_is_read(
    llama: Any, make: MakeEngine, solo: Solo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row waits for its query, the batch does not."""
    engine = make(llama, rows=2)
    query = on_disk_alone(engine)
    gate = Gate(monkeypatch)
    other = engine.submit([9, 8, 7], LONG)
    engine.step()
    engine.resume(query)
    for _ in range(5):
        engine.step()
        engine.check_integrity()
    assert query.state is QueryState.PARKED
    assert len(other.output_token_ids) >= 5
    assert engine.counters["waits_for_disk"] == 5
    gate.open.set()
    assert finish(engine, [*engine.queries.values()], solo, llama) == 0


def test_cancelled_while_its_slice_is_read(
    llama: Any, make: MakeEngine, solo: Solo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C3, M5: nothing is left, and nobody else is hit."""
    engine = make(llama, rows=2)
    query = on_disk_alone(engine)
    gate = Gate(monkeypatch)
    engine.submit([9, 8, 7], LONG)
    engine.step()
    engine.resume(query)
    engine.step()
    engine.cancel(query)
    engine.check_integrity()
    gate.open.set()
    assert finish(engine, [*engine.queries.values()], solo, llama) == 0


@pytest.mark.parametrize(
    "cue", [(call, good) for call in ("create", "write", "open", "read") for good in (0, 2)]
)
def test_a_disk_that_breaks_costs_computation_and_no_token(
    llama: Any, make: MakeEngine, solo: Solo, monkeypatch: pytest.MonkeyPatch, cue: tuple[str, int]
) -> None:
    """R6, M1: EIO from the n-th call on."""
    engine = make(llama, rows=2)
    call, left = cue[0], [cue[1]]
    real = getattr(SpillFolder, call)

    def break_down(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EIO, "on cue")
        return real(*arguments)

    monkeypatch.setattr(SpillFolder, call, break_down)
    assert finish(engine, park_all(engine), solo, llama) > 0
    assert engine.residency.store.spill_use.failures > 0


def test_files_that_change_are_never_read_as_they_are(llama: Any, make: MakeEngine, solo: Solo) -> None:
    """R6: one bit in each file."""
    engine = make(llama, rows=2)
    queries = park_all(engine)
    for path in (engine.residency.store.spiller.tier.path).glob("*.kv"):
        content = bytearray(path.read_bytes())
        content[4096 + 100] ^= 1
        path.write_bytes(content)
    assert finish(engine, queries, solo, llama) > 0
    assert engine.snapshot().counters["corrupt_slices"] >= len(queries) - 1


def test_a_vanished_directory_costs_computation_and_no_token(
    llama: Any, make: MakeEngine, solo: Solo
) -> None:
    engine = make(llama, rows=2)
    queries = park_all(engine)
    path = engine.residency.store.spiller.tier.path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    assert finish(engine, queries, solo, llama) > 0


def test_sessions_survive_on_disk(llama: Any, make: MakeEngine, solo: Solo) -> None:
    """A chat's next turn finds what was kept, though the pool had no room for it."""
    engine = make(llama, host_pool_bytes=10 * TOKEN_BYTES, session_bytes=1 << 20)
    first = [[5, 6, 7, 8, 9, 10 + number] for number in range(5)]
    turns = []
    for number, prompt in enumerate(first):
        turns.append(engine.submit(prompt, SHORT, session_id=f"chat{number}"))
        while turns[-1].live:
            step(engine)
        step(engine)
    assert engine.residency.sessions.count == 5
    shown = engine.snapshot()
    assert shown.session_bytes == 5 * 8 * TOKEN_BYTES
    assert shown.memory.parked_bytes == 0
    assert shown.memory.spilled_bytes == engine.residency.store.spill_use.used_bytes > 0
    assert engine.residency.store.spill_use.spills >= 4
    for number, turn in enumerate(turns):
        prompt = [*first[number], *turn.output_token_ids, 4, 5]
        again = engine.submit(prompt, SHORT, session_id=f"chat{number}")
        while again.live:
            step(engine)
        assert again.cached_prompt_tokens == 8
        assert again.output_token_ids == solo(llama, prompt, 3)
    assert engine.counters["session_hits"] == 5


def test_a_session_that_is_lost_on_disk_is_computed(llama: Any, make: MakeEngine, solo: Solo) -> None:
    """R6."""
    engine = make(llama, host_pool_bytes=10 * TOKEN_BYTES, session_bytes=1 << 20)
    for name in "ab":
        query = engine.submit([5, 6, 7, 8, 9, 10], SHORT, session_id=name)
        while query.live:
            step(engine)
        step(engine)
    for path in engine.residency.store.spiller.tier.path.glob("*.kv"):
        os.truncate(path, 4096)
    prompt = [5, 6, 7, 8, 9, 10, *query.output_token_ids, 4, 5]
    again = engine.submit(prompt, SHORT, session_id="a")
    assert finish(engine, [again], solo, llama) == 0
    assert again.cached_prompt_tokens == 0


def test_sessions_on_disk_give_way_to_parked_queries(llama: Any, make: MakeEngine, solo: Solo) -> None:
    """Idle sessions go first: from the pool to the disk, and from there for good."""
    block = 4096
    engine = make(llama, host_pool_bytes=10 * TOKEN_BYTES, session_bytes=1 << 20, spill_bytes=4 * block)
    for name in "abc":
        query = engine.submit([5, 6, 7, 8, 9, 10], SHORT, session_id=name)
        while query.live:
            step(engine)
        step(engine)
    sessions = engine.residency.sessions
    assert [name for name in "abc" if sessions.get(SessionKey("default", name))] == ["b", "c"]
    queries = []
    for prompt in PROMPTS[:3]:
        queries.append(engine.submit(prompt, LONG))
        while len(queries[-1].output_token_ids) < 4:
            step(engine)
        engine.park(queries[-1])
        for _ in range(3):
            engine.residency.store.spiller.tier._out.submit(int).result()
            step(engine)
    assert sessions.count == 0
    assert engine.counters["parks_dropped"] == 0
    assert finish(engine, queries, solo, llama) == 0


def test_a_full_disk_is_a_full_tier(llama: Any, make: MakeEngine, solo: Solo) -> None:
    """M1: what fits in neither is computed again."""
    engine = make(llama, rows=2, spill_bytes=2 * 8192)
    queries = park_all(engine)
    assert engine.residency.store.spill_use.files == 2
    assert finish(engine, queries, solo, llama) > 0
    assert engine.residency.store.spill_use.failures == 0


@pytest.mark.parametrize("seed", [3, 14, 20, 29, 35])
def test_whatever_is_asked_and_whatever_breaks(
    llama: Any, make: MakeEngine, solo: Solo, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """R2, C1, M5: random parks, cancels and turns over small tiers, files at their own pace, some fail."""
    chance, faults = random.Random(seed), random.Random(seed)
    engine = make(
        llama,
        rows=chance.choice([1, 2, 3]),
        host_pool_bytes=TOKEN_BYTES * chance.choice([8, 16, 30]),
        spill_bytes=chance.choice([2, 5, 100]) * 8192,
        session_bytes=1 << 16,
        chunk_tokens=chance.choice([3, 256]),
        limits=PlannerLimits(quantum_tokens=1, max_parks=1000),
    )
    for call in ("open", "read", "publish") if chance.random() < 0.5 else ():
        monkeypatch.setattr(SpillFolder, call, _unreliable(getattr(SpillFolder, call), faults))
    queries: list[Query] = []
    for _ in range(80):
        live = [query for query in queries if query.live]
        if len(live) < 8 and chance.random() < 0.4:
            prompt = list(range(1, chance.randrange(2, 14)))
            sampling = SamplingParams(max_tokens=chance.randrange(1, 12), ignore_eos=True)
            session = chance.choice([None, "a", "b", "c"])
            sla_class = chance.choice(["batch", "interactive"])
            queries.append(engine.submit(prompt, sampling, sla_class=sla_class, session_id=session))
        elif live:
            query = chance.choice(live)
            if not query.held:
                engine.park(query) if chance.random() < 0.8 else engine.cancel(query)
            elif query.state is QueryState.PARKED:
                engine.resume(query)
        engine.step()
        engine.check_integrity()
    ended = [query for query in queries if query.state is not QueryState.CANCELLED]
    finish(engine, ended, solo, llama)


def _unreliable(call: Callable[..., Any], faults: random.Random) -> Callable[..., Any]:
    def sometimes(*arguments: Any) -> Any:
        if faults.random() < 0.1:
            raise OSError(errno.EIO, "on cue")
        return call(*arguments)

    return sometimes


def test_cycles_leave_no_file_and_no_descriptor(llama: Any, make: MakeEngine) -> None:
    """M5: parked, then finished or cancelled at whatever moment of the disk's work."""
    engine = make(llama, rows=2)
    process, path = psutil.Process(), engine.residency.store.spiller.tier.path

    def cycle(number: int) -> None:
        queries = [engine.submit(prompt, LONG) for prompt in PROMPTS[:2]]
        for _ in range(3):
            engine.step()
        for query in queries:
            engine.park(query)
            engine.step()
        if number % 3 == 0:
            rest(engine)
        if number % 2:
            engine.cancel(queries[0])
        engine.run_until_idle()

    for number in range(5):
        cycle(number)
    rest(engine)
    before = process.num_fds()
    for number in range(24):
        cycle(number)
    rest(engine)
    assert process.num_fds() == before
    assert len(list(path.iterdir())) == 1, "the lock alone"
    assert engine.residency.store.spill_use.used_bytes == 0


def test_a_start_clears_up_after_a_dead_engine(llama: Any, make: MakeEngine, tmp_path: Path) -> None:
    """M5."""
    dead = SpillFolder(tmp_path / "spill")
    name = dead.new_name("q1")
    dead.shut(dead.create(name))
    dead.publish(name)
    dead._close_fds()
    make(llama)
    assert not (tmp_path / "spill" / name).exists()


def test_what_can_t_be_used_stops_the_start(llama: Any, make: MakeEngine, tmp_path: Path) -> None:
    (tmp_path / "spill").mkdir(mode=0o700)
    (tmp_path / "spill").chmod(0o777)
    with pytest.raises(ConfigError, match="others may write"):
        make(llama)
    with pytest.raises(ConfigError, match="spill_bytes"):
        make(llama, spill_bytes=-1)
    make(llama, spill_bytes=0)  # Off.
    (tmp_path / "spill").chmod(0o700)
    assert make(llama, spill_bytes=None).residency.store.spill_use.capacity_bytes > 0
