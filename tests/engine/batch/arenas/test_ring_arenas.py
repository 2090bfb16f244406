"""A ring on each arena: the same tokens, memory that follows its rows, and books that survive a full card."""

from __future__ import annotations

import errno
import mmap
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from batond.bench import families
from batond.daemon.engine.batch.arenas import host
from batond.daemon.engine.batch.arenas.arena import ArenaShape
from batond.daemon.engine.batch.arenas.card import CardArena
from batond.daemon.engine.batch.arenas.choice import elastic_arena, plain_arena
from batond.daemon.engine.batch.arenas.host import HostArena
from batond.daemon.engine.batch.card_steps import NO_CARD, CardUse
from batond.daemon.engine.batch.ring import RingBatch

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
RING_FAMILIES = ["llama", "mistral", "gpt2", "gemma2", "gpt_oss", "deepseek_v3", "lfm2"]
ROWS, CAPACITY = 3, 24


@pytest.fixture(scope="session", params=RING_FAMILIES)
def any_bench(request: pytest.FixtureRequest, make_bench: Callable[..., Any]) -> Any:
    return make_bench(families.make_family(request.param))


@pytest.fixture(scope="session")
def bench(llama: Any, make_bench: Callable[..., Any]) -> Any:
    return make_bench(llama)


class Life:
    """One random life, with parks into other rows and many wraps, on several rings: equal bits throughout."""

    def __init__(self, bench: Any, *rings: RingBatch) -> None:
        self.bench, self.rings, self.parked = bench, rings, []
        self.rng = random.Random(11)

    def go(self, turns: int, after: Callable[[], None] = lambda: None) -> None:
        for _ in range(turns):
            for row in range(ROWS):
                self.change(row)
            self.step()
            after()
            for ring in self.rings:
                ring.check_integrity()

    def change(self, row: int) -> None:
        length, draw = self.rings[0].lengths[row], self.rng.random()
        if not length and draw < 0.5:
            kv = self.parked.pop() if self.parked and draw < 0.25 else self.prefilled()
            for ring in self.rings:
                ring.embed(row, kv)
        elif length == CAPACITY or (length and draw < 0.15):
            first, *others = (ring.extract(row) for ring in self.rings)
            assert all(torch.equal(first.tokens, other.tokens) for other in others)
            if length < CAPACITY:
                self.parked.append(first)
            for ring in self.rings:
                ring.free(row)

    def prefilled(self) -> Any:
        length = self.rng.choice([1, 2, 9, CAPACITY - 1])
        return self.bench.prefilled([self.rng.randrange(3, 120) for _ in range(length)])

    def step(self) -> None:
        rows = [row for row, length in enumerate(self.rings[0].lengths) if length]
        tokens = {row: [self.rng.randrange(3, 120)] for row in rows}
        if tokens:
            first, *others = (ring.step(tokens).clone() for ring in self.rings)
            assert all(torch.equal(first[rows], other[rows]) for other in others)


def test_host_memory_that_follows_the_rows_changes_no_bit(any_bench: Any) -> None:
    """R2: parks, resumes and wraps; seven kinds of cache."""
    rings = [
        RingBatch(any_bench.model, ROWS, any_bench.layout, CAPACITY, new_arena=make)
        for make in (plain_arena, elastic_arena)
    ]
    Life(any_bench, *rings).go(60)
    for row in range(ROWS):
        if rings[1].lengths[row]:
            rings[1].free(row)
    assert rings[1].memory.committed_bytes == 0


@pytest.mark.usefixtures("card_on_cpu")
@pytest.mark.parametrize("background", [False, True])
def test_a_cards_memory_that_follows_the_rows_changes_no_bit(
    bench: Any,
    driver: Any,
    background: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """R2: captured steps go on while pages come and go; no byte without memory is written, no NaN read."""
    use = CardUse(compiled=False)

    def card_arena(shape: ArenaShape, _device: torch.device) -> CardArena:
        return CardArena(shape, driver, background=background, pool_bytes=8192)

    rings = [
        RingBatch(bench.model, ROWS, bench.layout, CAPACITY, card=use, new_arena=make)
        for make in (plain_arena, card_arena)
    ]
    assert rings[1].graph_rows

    def check() -> None:
        if not background:
            assert driver.stray_bytes() == 0
            rings[1].trim()

    Life(bench, *rings).go(60, check)
    rings[1].close()
    assert not driver.used_bytes or background


def on(driver: Any, bench: Any, capacity: int = 60) -> RingBatch:
    def card_arena(shape: ArenaShape, _device: torch.device) -> CardArena:
        return CardArena(shape, driver, background=False)

    return RingBatch(bench.model, ROWS, bench.layout, capacity, card=NO_CARD, new_arena=card_arena)


def test_a_slice_that_does_not_fit_leaves_its_row_idle(bench: Any, fake_driver: Any) -> None:
    """M6: out of memory in an embed, also in the second of two ranges; the books stand."""
    kv = bench.prefilled(list(range(3, 43)))
    driver = fake_driver(card_bytes=8 * 4096, poison=False)
    ring = on(driver, bench)
    ring.embed(0, bench.prefilled(list(range(3, 13))))
    ring.step({0: [5]})
    for after in range(4):
        before = ring.memory.committed_bytes
        driver.cue("create", torch.OutOfMemoryError(), after=after)
        driver.cue("map", torch.OutOfMemoryError(), after=after)
        with pytest.raises(torch.OutOfMemoryError):
            ring.embed(1, kv)
        assert list(ring.lengths) == [11, 0, 0]
        assert ring.memory.committed_bytes == before
        ring.check_integrity()
        ring.trim()
        driver = ring._arena._pages._driver
        driver._cues.clear()
    ring.embed(1, kv)  # Wraps: two ranges.
    assert torch.equal(ring.extract(1).tokens, kv.tokens)
    ring.close()


def test_an_embed_into_an_empty_ring_that_fails_moves_nothing(bench: Any, fake_driver: Any) -> None:
    driver = fake_driver(poison=False)
    ring = on(driver, bench)
    ring.trim()
    driver.cue("create", torch.OutOfMemoryError())
    cursor = ring._cursor
    with pytest.raises(torch.OutOfMemoryError):
        ring.embed(2, bench.prefilled([4, 5, 6]))
    assert (ring._cursor, ring.columns) == (cursor, 0)
    ring.check_integrity()
    ring.close()


def test_a_step_without_memory_for_its_column_can_be_had_again(bench: Any, fake_driver: Any) -> None:
    """M6: lengths are as before; once a row was parked the others go on, with the same numbers."""
    driver = fake_driver(card_bytes=4 * 4096, poison=False)
    ring, plain = on(driver, bench), bench.ring(ROWS, 60)
    for row, length in enumerate((10, 9, 8)):  # A page each; the next column lies on the next page, too.
        kv = bench.prefilled(list(range(3, 3 + length)))
        ring.embed(row, kv)
        plain.embed(row, kv)
    with pytest.raises(torch.OutOfMemoryError):
        ring.step({0: [5], 1: [6], 2: [7]})
    assert list(ring.lengths) == [10, 9, 8]
    ring.check_integrity()
    parked = ring.extract(2)
    assert torch.equal(parked.tokens, plain.extract(2).tokens)
    for each in (ring, plain):
        each.free(2)
    assert torch.equal(ring.step({0: [5], 1: [6]})[:2], plain.step({0: [5], 1: [6]})[:2])
    assert list(ring.lengths) == [11, 10, 0]
    ring.close()


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_host_memory_comes_and_goes_with_the_rows() -> None:
    """M5: what the system counts, not what the books say."""
    arena = HostArena(ArenaShape(rows=4, capacity=1024, record_bytes=128 << 10))  # 512 MiB of addresses.
    idle = rss_bytes()
    assert int(arena.tensor[2, :512].sum()) == 0  # Reading takes none.
    assert rss_bytes() - idle < 8 * MIB
    arena.commit(2, 300, 900)
    arena.tensor[2, 300:900] = 1
    written = rss_bytes() - idle
    assert abs(written - 600 * 128 * 1024) < 8 * MIB
    assert arena.use.committed_bytes >= 600 * 128 * 1024
    arena.release(2, [(300, 900)])
    assert rss_bytes() - idle < 8 * MIB
    assert arena.use.committed_bytes == 0
    assert not arena.tensor[2, 300:900].any()
    arena.close()


def test_memory_that_the_system_does_not_take_back_is_zero_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Locked memory, kernels without huge pages, a limit on addresses."""

    class Locked(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(errno.EINVAL, "locked")

    monkeypatch.setattr(host.mmap, "mmap", Locked)
    arena = HostArena(ArenaShape(rows=2, capacity=30, record_bytes=1000))
    arena.commit(1, 3, 20)
    arena.tensor[1, 3:20] = 9
    arena.release(1, [(3, 20)])
    assert not arena.tensor.any()
    assert arena.row_bytes(1) == 0
    arena.close()

    def refuses(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, "no")

    monkeypatch.setattr(host.mmap, "mmap", refuses)
    with pytest.raises(torch.OutOfMemoryError, match="addresses"):
        HostArena(ArenaShape(rows=2, capacity=30, record_bytes=1000))


def test_a_thousand_rows_that_come_and_go_leave_nothing(bench: Any) -> None:
    """M5: 1000 cycles of embed and free."""
    ring = bench.ring(2, 300)
    assert ring.memory.elastic
    kv = bench.prefilled([3 + place % 100 for place in range(250)])
    used = 0
    for cycle in range(1000):
        ring.embed(cycle % 2, kv)
        used = max(used, ring.memory.committed_bytes)
        ring.free(cycle % 2)
        assert ring.memory.committed_bytes == 0
        if cycle == 100:
            before = rss_bytes()
    assert used < 250 * bench.layout.record_bytes + 3 * 4096
    assert rss_bytes() - before < 4 * MIB
