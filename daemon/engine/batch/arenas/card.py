"""Memory of a card that follows the rows, by CUDA's virtual memory: addresses stay, what is behind them goes.

So a captured step stays valid, growing and shrinking copy nothing, and what a parked row held can serve
another process. Only for attention that reads each row's own columns and nothing else, as the ring's kernels
do: an address without memory faults, and memory from the pool holds what its last owner left. It is not
zeroed, which would cost a write of every byte, because no kernel ever reads what its row has not written.

Mapping a page takes longer than a step should wait, so a thread does it ahead of the cursor; it also
unmaps what rows gave back, once the card is done with it.
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from typing import TYPE_CHECKING, Final

import torch

from batond.daemon.engine.batch.arenas.card_pages import CardPages
from batond.daemon.engine.batch.arenas.driver import DriverError
from batond.daemon.engine.batch.arenas.pages import PageGrid, page_bytes_for
from batond.daemon.memory.use import ArenaUse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batond.daemon.engine.batch.arenas.arena import ArenaShape
    from batond.daemon.engine.batch.arenas.driver import Driver, Fence

_log = logging.getLogger(__name__)

#: What is kept of released memory: enough for a row or two, so that a park and a resume cost no creation.
POOL_BYTES: Final = 256 << 20
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
        fence = self._pages.release(row)
        if fence is not None and self._keeper is not None:
            self._keeper.settle(fence)

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
    """Maps ahead of the cursor and unmaps behind freed rows, beside the engine's thread.

    Args:
        pages: Of the arena; closed when the keeper ends.
        driver: Of the card.
        pool_bytes: Most that stays pooled.
    """

    def __init__(self, pages: CardPages, driver: Driver, pool_bytes: int) -> None:
        super().__init__(name="batond-arena", daemon=True)
        self._pages, self._driver, self._pool_bytes = pages, driver, pool_bytes
        self._orders: queue.SimpleQueue[tuple[int, range] | Fence | threading.Event | None]
        self._orders = queue.SimpleQueue()
        self._trims = threading.Event()  # Ordered, and not begun.

    def expect(self, row: int, pages: range) -> None:
        """Map a row's pages soon."""
        self._orders.put((row, pages))

    def settle(self, fence: Fence) -> None:
        """Unmap what was released before a fence, once the card has passed it."""
        self._orders.put(fence)

    def trim(self) -> None:
        """Give all pooled memory back soon; ordering it again before that changes nothing."""
        if not self._trims.is_set():
            self._trims.set()
            self._orders.put(self._trims)

    def stop(self) -> None:
        """Do what was ordered, close the pages and end."""
        self._orders.put(None)

    def run(self) -> None:
        """Follow orders."""
        self._driver.attach()
        while (order := self._orders.get()) is not None:
            try:
                self._follow(order)
            except torch.OutOfMemoryError:
                continue  # The step that needs the page will say so.
            except (DriverError, torch.AcceleratorError):
                _log.exception("the arena's keeper failed")
        self._pages.close()

    def _follow(self, order: tuple[int, range] | Fence | threading.Event) -> None:
        if isinstance(order, tuple):
            self._pages.commit_if_held(*order)
            return
        if isinstance(order, threading.Event):
            order.clear()
            self._pages.trim(0)
            return
        order.wait()
        self._pages.settle()
        self._pages.shrink(self._pool_bytes)


def _whole(grid: PageGrid, pages: CardPages, driver: Driver) -> torch.Tensor:
    """The records as a tensor; a page is mapped while it is made, because torch asks whose the address is."""
    shape = grid.shape
    pages.commit(0, range(1))
    tensor = driver.tensor(pages.address, (shape.rows, shape.capacity, shape.record_bytes), grid.strides)
    pages.release(0)
    return tensor
