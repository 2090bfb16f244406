"""Memory of a card that follows the rows, by CUDA's virtual memory: addresses stay, what is behind them goes.

So a captured step stays valid, growing and shrinking copy nothing, and what a parked row held can serve
another process. Only for attention that reads each row's own columns and nothing else, as the ring's kernels
do: an address without memory faults, and memory from the pool holds what its last owner left. It is not
zeroed, which would cost a write of every byte, because no kernel ever reads what its row has not written.

Mapping a page takes longer than a step should wait, so a thread does it ahead of the cursor; it also gives
back to the driver what rows gave back and is too much to keep, once the card is done with it.
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from batond.daemon.engine.batch.arenas.card_pages import CardPages
from batond.daemon.engine.batch.arenas.driver import DriverError
from batond.daemon.engine.batch.arenas.pages import PageGrid, page_bytes_for
from batond.daemon.memory.use import ArenaUse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batond.daemon.engine.batch.arenas.arena import ArenaShape
    from batond.daemon.engine.batch.arenas.driver import Driver

_log = logging.getLogger(__name__)

#: What is kept of released memory, most of it mapped where it was: enough for a row or two, so that the next
#: query of a row finds its pages there.
POOL_BYTES: Final = 1 << 30
#: Between two pages that are given back, so that the engine's thread finds the books free.
_PAUSE_S: Final = 0.0005
_CLOSE_S: Final = 10.0


class CardArena:
    """Virtual memory of a card; see `arena.Arena` for the contract.

    Args:
        shape: Of the ring.
        driver: Of the card.
        pool_bytes: Most that stays pooled.
        background: Have a thread map ahead and unmap behind; without, both are done when they are needed.

    Raises:
        torch.OutOfMemoryError: There is no memory for one page.
        DriverError: The driver can't do it.
    """

    remark = ""

    def __init__(
        self, shape: ArenaShape, driver: Driver, *, pool_bytes: int = POOL_BYTES, background: bool = True
    ) -> None:
        self._grid = PageGrid(shape, page_bytes_for(shape.record_bytes, driver.granularity))
        self._pages = CardPages(self._grid, driver)
        self._pool_bytes = pool_bytes
        try:
            self.tensor = _whole(self._grid, self._pages, driver)
        except BaseException:
            self._pages.close()
            raise
        self._keeper: Keeper | None = None
        if background:
            self._keeper = Keeper(self._pages, driver, pool_bytes)
            self._keeper.start()
        # A ring that nobody holds any more gives its memory back like any tensor. The keeper, which may be
        # the one to find out, does so when it ends.
        end = self._pages.close if self._keeper is None else self._keeper.stop
        self._end = weakref.finalize(self, end)
        self._end.atexit = False

    @property
    def use(self) -> ArenaUse:
        """Pages that rows hold, and those kept for the next."""
        pages = self._pages
        return ArenaUse(pages.held_bytes, pages.pooled_bytes, self._grid.nbytes, elastic=True)

    def commit(self, row: int, first: int, last: int) -> int:
        """Map what is not mapped yet.

        Raises:
            torch.OutOfMemoryError: There is no memory; the row holds what it held.
            DriverError: The driver says no; likewise.
        """
        self._pages.commit(row, self._grid.pages(first, last))
        return self._grid.columns_behind(last)

    def expect(self, row: int, column: int) -> None:
        """Let the keeper map the column's pages."""
        pages = self._grid.pages(column, column + 1)
        if self._keeper is not None and not self._pages.holds(row, pages):
            self._keeper.expect(row, pages)

    def release(self, row: int, written: Sequence[tuple[int, int]]) -> None:  # noqa: ARG002 - nothing is zeroed
        """Take all pages from the row."""
        if self._pages.release(row) and self._keeper is not None:
            self._keeper.shrink()

    def holds(self, row: int, first: int, last: int) -> bool:
        """Whether these columns are mapped."""
        return self._pages.holds(row, self._grid.pages(first, last))

    def row_bytes(self, row: int) -> int:
        """Pages of the row."""
        return self._pages.row_bytes(row)

    def trim(self, keep_bytes: int = 0) -> int:
        """Give pooled pages back to the driver; waits for the step that may still read what was released."""
        return self._pages.trim(keep_bytes)

    def trim_soon(self) -> None:
        """Have the keeper trim, which is attached to the card."""
        if self._keeper is not None:
            self._keeper.trim()

    def close(self) -> None:
        """Give everything back."""
        self.tensor = self.tensor.new_zeros(0, 0, 0)
        self._end()
        if self._keeper is not None:
            self._keeper.join(_CLOSE_S)

    def check_integrity(self) -> None:
        """Raise AssertionError where the books contradict each other."""
        self._pages.check_integrity()


class Keeper(threading.Thread):
    """Maps ahead of the cursor and gives memory back behind freed rows, beside the engine's thread.

    Args:
        pages: Of the arena; closed when the keeper ends.
        driver: Of the card.
        pool_bytes: Most that stays pooled.
    """

    def __init__(self, pages: CardPages, driver: Driver, pool_bytes: int) -> None:
        super().__init__(name="batond-arena", daemon=True)
        self._pages, self._driver, self._pool_bytes = pages, driver, pool_bytes
        self._orders: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._trims = threading.Event()  # Ordered, and not begun.
        self._shrinks = False  # There may be more than is kept.

    def expect(self, row: int, pages: range) -> None:
        """Map a row's pages soon."""
        self._orders.put(partial(self._pages.commit_if_held, row, pages))

    def shrink(self) -> None:
        """Give back what is too much to keep, page by page, once the card is done with it."""
        self._orders.put(self._begin_to_shrink)

    def trim(self) -> None:
        """Give all pooled memory back soon; ordering it again before that changes nothing."""
        if not self._trims.is_set():
            self._trims.set()
            self._orders.put(self._trim)

    def stop(self) -> None:
        """Do what was ordered, close the pages and end."""
        self._orders.put(None)

    def run(self) -> None:
        """Follow orders; what can wait is done between them."""
        self._driver.attach()
        while True:
            try:
                order = self._orders.get(timeout=_PAUSE_S if self._shrinks else None)
            except queue.Empty:
                order = self._shrink_a_bit
            if order is None:
                break
            try:
                order()
            except torch.OutOfMemoryError:
                continue  # The step that needs the page will say so.
            except (DriverError, torch.AcceleratorError):
                _log.exception("the arena's keeper failed")
        self._pages.close()

    def _begin_to_shrink(self) -> None:
        self._shrinks = True

    def _shrink_a_bit(self) -> None:
        self._shrinks = False  # What the driver refuses waits for the next freed row.
        given = self._pages.shrink(self._pool_bytes)
        over = self._pages.pooled_bytes > self._pool_bytes
        self._shrinks = over and (given or self._pages.next_fence() is not None)

    def _trim(self) -> None:
        self._trims.clear()
        self._pages.trim(0)


def _whole(grid: PageGrid, pages: CardPages, driver: Driver) -> torch.Tensor:
    """The records as a tensor; a page is mapped while it is made, because torch asks whose the address is."""
    shape = grid.shape
    pages.commit(0, range(1))
    tensor = driver.tensor(pages.address, (shape.rows, shape.capacity, shape.record_bytes), grid.strides)
    pages.release(0)
    return tensor
