"""Host memory that follows the rows: the system commits a page when it is written, and takes it back.

The whole ring is one anonymous mapping. A page that nobody has written reads as zeroes and takes no memory;
one that was given back does so again, so that releasing a row zeroes it for nothing.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import TYPE_CHECKING, Final

import torch

from batond.daemon.engine.batch.arenas.pages import PageGrid, page_bytes_for
from batond.daemon.memory.use import ArenaUse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batond.daemon.engine.batch.arenas.arena import ArenaShape

_NORESERVE: Final = 0x4000  # MAP_NORESERVE, which `mmap` names from Python 3.13 on.


class HostArena:
    """Anonymous memory of a Linux process; see `arena.Arena` for the contract.

    A commit can't fail: the system finds out when a page is written, and then it is too late. Whoever watches
    memory must see to it that there is some.

    Args:
        shape: Of the ring.
        remark: What an operator should know.

    Raises:
        torch.OutOfMemoryError: The process may not have so many addresses.
    """

    def __init__(self, shape: ArenaShape, *, remark: str = "") -> None:
        self.remark = remark
        self._grid = PageGrid(shape, page_bytes_for(shape.record_bytes, mmap.PAGESIZE))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        try:
            self._mapping = mmap.mmap(-1, max(self._grid.nbytes, mmap.PAGESIZE), flags=flags)
        except OSError as error:
            raise torch.OutOfMemoryError(f"no {self._grid.nbytes} bytes of addresses: {error}") from error
        # A huge page would be committed whole for its first byte, and taken back in no part.
        with contextlib.suppress(OSError):  # A kernel without huge pages.
            self._mapping.madvise(mmap.MADV_NOHUGEPAGE)
        raw = torch.frombuffer(self._mapping, dtype=torch.uint8)
        size = (shape.rows, shape.capacity, shape.record_bytes)
        self.tensor = raw.as_strided(size, self._grid.strides)
        self._held: list[set[int]] = [set() for _ in range(shape.rows)]
        self._held_pages = 0

    @property
    def use(self) -> ArenaUse:
        """Pages that rows hold, written or about to be; there is no pool."""
        grid = self._grid
        return ArenaUse(self._held_pages * grid.page_bytes, 0, grid.nbytes, elastic=True)

    def commit(self, row: int, first: int, last: int) -> int:
        """Note the pages; the system commits them when they are written."""
        held = self._held[row]
        before = len(held)
        held.update(self._grid.pages(first, last))
        self._held_pages += len(held) - before
        return self._grid.columns_behind(last)

    def expect(self, row: int, column: int) -> None:
        """Nothing to be had ahead."""

    def release(self, row: int, written: Sequence[tuple[int, int]]) -> None:
        """Take the row's pages from it; they read as zeroes from now on."""
        # All of the row, not only what the books say: a step that failed may have written ahead of them, and
        # pages of zeroes that were read have entries in the page table.
        try:
            self._mapping.madvise(mmap.MADV_DONTNEED, row * self._grid.row_bytes, self._grid.row_bytes)
        except OSError:  # Memory is locked: it stays, and must be zero all the same.
            for first, last in written:
                self.tensor[row, first:last] = 0
        self._held_pages -= len(self._held[row])
        self._held[row].clear()

    def holds(self, row: int, first: int, last: int) -> bool:
        """Whether all pages of these columns are the row's."""
        return self._held[row].issuperset(self._grid.pages(first, last))

    def row_bytes(self, row: int) -> int:
        """Pages of the row."""
        return len(self._held[row]) * self._grid.page_bytes

    @staticmethod
    def trim(keep_bytes: int = 0) -> int:  # noqa: ARG004 - the protocol's
        """Nothing is pooled."""
        return 0

    @staticmethod
    def trim_soon() -> None:
        """Likewise."""

    def close(self) -> None:
        """Give the memory back; the mapping itself goes with the last view on it."""
        with contextlib.suppress(OSError):
            self._mapping.madvise(mmap.MADV_DONTNEED)
        for held in self._held:
            held.clear()
        self._held_pages = 0
        self.tensor = self.tensor.new_zeros(0, 0, 0)

    def check_integrity(self) -> None:
        """Raise AssertionError where the sum is not that of the rows, or a page lies outside."""
        found = sum(map(len, self._held))
        if found != self._held_pages:
            raise AssertionError(f"rows hold {found} pages, the books say {self._held_pages}")
        for row, held in enumerate(self._held):
            if held and not 0 <= min(held) <= max(held) < self._grid.row_pages:
                raise AssertionError(f"row {row} holds pages {min(held)} to {max(held)}")
