"""How an arena is cut into pages, and how much of them is waste with the shapes of real models."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batond.daemon.engine.batch.arenas.arena import ArenaShape
from batond.daemon.engine.batch.arenas.card import CardArena
from batond.daemon.engine.batch.arenas.pages import PageGrid, page_bytes_for

if TYPE_CHECKING:
    from typing import Any

MIB = 1 << 20
GRANULARITY = 2 * MIB
LLAMA_2_7B = 32 * 2 * 32 * 128 * 2  # Layers x (K, V) x heads x dim x bf16: 0.5 MiB a token.
LLAMA_3_8B = 32 * 2 * 8 * 128 * 2  # 8 heads of keys: 128 KiB.


@pytest.mark.parametrize(
    ("record_bytes", "page_mib"),
    [(LLAMA_2_7B, 4), (LLAMA_3_8B, 2), (80 * 2 * 8 * 128 * 2, 2), (1000, 2), (64 * MIB, 32)],
)
def test_pages_are_as_large_as_waste_allows(record_bytes: int, page_mib: int) -> None:
    assert page_bytes_for(record_bytes, GRANULARITY) == page_mib * MIB


@given(
    st.integers(1, 5000),
    st.integers(1, 300),
    st.integers(1, 6).map(lambda n: n * 4096),
    st.data(),
)
def test_pages_of_a_range_cover_it_and_no_more(
    record: int, capacity: int, page: int, data: st.DataObject
) -> None:
    grid = PageGrid(ArenaShape(2, capacity, record), page)
    first = data.draw(st.integers(0, capacity - 1))
    last = data.draw(st.integers(first + 1, capacity))
    pages = grid.pages(first, last)
    assert pages.start * page <= first * record < (pages.start + 1) * page
    assert (pages.stop - 1) * page < last * record <= pages.stop * page
    behind = grid.columns_behind(last)
    assert grid.pages(first, last + behind) == pages
    assert last + behind == capacity or grid.pages(first, last + behind + 1).stop > pages.stop
    assert grid.pages(0, capacity).stop <= grid.row_pages
    assert grid.offset(1, 0) == grid.row_bytes >= capacity * record


class Life:
    """Rows of a ring as RingBatch drives them, without tensors: lengths, a cursor, and a card's arena."""

    def __init__(self, driver: Any, record_bytes: int, rows: int, capacity: int) -> None:
        driver.granularity = GRANULARITY
        self.arena = CardArena(ArenaShape(rows, capacity, record_bytes), driver, background=False)
        self.arena.trim()
        self.record, self.capacity, self.cursor = record_bytes, capacity, -1
        self.lengths = [0] * rows

    def embed(self, row: int, length: int) -> None:
        if not any(self.lengths):
            self.cursor = length - 1
        first = self.cursor + 1 - length
        ranges = [(first, self.cursor + 1)] if first >= 0 else [(first + self.capacity, self.capacity)]
        ranges += [(0, self.cursor + 1)] if first < 0 else []
        for columns in ranges:
            self.arena.commit(row, *columns)
        self.lengths[row] = length

    def step(self) -> None:
        """As on a card: the keeper has had the page of two steps ahead."""
        self.cursor = (self.cursor + 1) % self.capacity
        for row, length in enumerate(self.lengths):
            if length:
                self.lengths[row] += 1
                for ahead in range(3):
                    column = (self.cursor + ahead) % self.capacity
                    self.arena.commit(row, column, column + 1)

    def waste(self, row: int) -> float:
        """Committed over live bytes of a row."""
        return self.arena.row_bytes(row) / (self.lengths[row] * self.record)


def _waste(driver: Any, record_bytes: int) -> tuple[float, float]:
    """Worst ratio of a row above 256 tokens, and that of all rows together, over a life with wraps."""
    rng = random.Random(3)
    life = Life(driver, record_bytes, rows=12, capacity=2048)
    worst, committed, live = 0.0, 0, 0
    for step in range(1800):
        for row, length in enumerate(life.lengths):
            if length > 1200 or (length and rng.random() < 0.002):
                life.arena.release(row, [])
                life.lengths[row] = 0
            elif not length and rng.random() < 0.05:
                life.embed(row, rng.randrange(257, 1000))
        if any(life.lengths):
            life.step()
        if step % 7 == 0:
            worst = max([worst, *(life.waste(row) for row, length in enumerate(life.lengths) if length)])
            committed += life.arena.use.committed_bytes
            live += sum(life.lengths) * record_bytes
    life.arena.close()
    return worst, committed / live


def test_rows_of_llama_2_7b_waste_less_than_a_tenth(fake_driver: Any) -> None:
    """Issue 7: committed bytes at most 1.10 x live bytes for rows above 256 tokens; pages ahead included."""
    worst, together = _waste(fake_driver(poison=False), LLAMA_2_7B)
    assert worst <= 1.10
    assert together <= 1.03


def test_rows_of_llama_3_8b_waste_little_together(fake_driver: Any) -> None:
    """A page is 16 of its tokens: a single row of 257 may hold one and a half more than it needs."""
    worst, together = _waste(fake_driver(poison=False), LLAMA_3_8B)
    assert worst <= 1.15
    assert together <= 1.04


def test_a_row_that_wraps_over_the_end_wastes_no_more(fake_driver: Any) -> None:
    life = Life(fake_driver(poison=False), LLAMA_2_7B, rows=2, capacity=4096)
    life.embed(0, 4095)
    life.embed(1, 257)
    for _ in range(300):
        if life.lengths[0] == 4096:
            life.arena.release(0, [])
            life.lengths[0] = 0
        life.step()
        assert life.waste(1) <= 1.10
    life.arena.close()
