"""The books of a card's arena: where each piece of memory is, and every move between these places.

    driver --create--> pool --map, set_access--> held by a row --release--> leaving --unmap--> pool
    driver <-destroy-- pool                                    <-take back--

A page that a row gave back stays mapped (`leaving`) at least until the card has done all work that may read
it, and then as long as its memory is not wanted elsewhere: access costs by the page, and the next query of a
row needs most of the pages that the last one had. It takes them back as they are: work on one stream takes
its turn.
"""

from __future__ import annotations

import itertools
import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from batond.daemon.engine.batch.arenas.driver import DriverError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from batond.daemon.engine.batch.arenas.driver import Driver, Fence
    from batond.daemon.engine.batch.arenas.pages import PageGrid

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A page that no row holds, still mapped where it was.

    Attributes:
        handle: Its memory.
        fence: Behind the last work that may touch it.
        accessible: The card may read and write it.
    """

    handle: int
    fence: Fence
    accessible: bool = True


class _Unused:
    """The fence of what no work has touched."""

    @staticmethod
    def done() -> bool:
        """There is none to be done."""
        return True

    @staticmethod
    def wait() -> None:
        """Likewise."""


class CardPages:
    """Memory behind the pages of a grid; all methods may be called by several threads.

    Args:
        grid: The arena, cut into pages.
        driver: Of the card.

    Attributes:
        address: Of the first row.

    Raises:
        DriverError: There is no address space.
    """

    def __init__(self, grid: PageGrid, driver: Driver) -> None:
        self.grid, self._driver = grid, driver
        self._lock = threading.Lock()
        self._held: list[dict[int, int]] = [{} for _ in range(grid.shape.rows)]  # Handles by page.
        self._leaving: dict[tuple[int, int], _Leaving] = {}  # By row and page, oldest first.
        self._pool: list[int] = []
        self._busy: Fence | None = None  # What kept a page from being unmapped last.
        self._held_pages = 0
        self._closed = False
        self.address = driver.reserve(grid.nbytes)

    @property
    def held_bytes(self) -> int:
        """Memory that rows hold."""
        return self._held_pages * self.grid.page_bytes

    @property
    def pooled_bytes(self) -> int:
        """Memory that no row holds, that on its way to the pool included."""
        return (len(self._pool) + len(self._leaving)) * self.grid.page_bytes

    def row_bytes(self, row: int) -> int:
        """Memory that a row holds."""
        return len(self._held[row]) * self.grid.page_bytes

    def holds(self, row: int, pages: range) -> bool:
        """Whether a row holds all these pages."""
        return all(map(self._held[row].__contains__, pages))

    def commit(self, row: int, pages: range) -> None:
        """Have memory behind a row's pages.

        Raises:
            torch.OutOfMemoryError: There is none; the row holds what it held.
            DriverError: The driver says no; likewise.
        """
        if self.holds(row, pages):  # Without the lock: only the caller takes pages from a row.
            return
        while True:
            with self._lock:
                try:
                    self._commit(row, pages)
                except torch.OutOfMemoryError:
                    # What was busy then may be done by now: that is memory, too.
                    fence = self._busy or self._next_fence()
                    if fence is None:
                        raise
                else:
                    return
            fence.wait()  # For memory that is leaving; the keeper goes on meanwhile.

    def commit_if_held(self, row: int, pages: range) -> None:
        """As `commit`, for a row that holds something by now; one that holds nothing was freed meanwhile."""
        with self._lock:
            if self._held[row] and not self._closed:
                self._commit(row, pages)

    def release(self, row: int) -> bool:
        """Take all pages from a row; returns whether it had any."""
        with self._lock:
            return self._leave(row, list(self._held[row]))

    def trim(self, keep_bytes: int) -> int:
        """Give all memory back that no row holds now, but some; waits for the card to be done with it.

        Other threads go on meanwhile.

        Args:
            keep_bytes: Of it.

        Returns:
            Bytes given back.
        """
        if self.pooled_bytes > keep_bytes:
            with self._lock:
                fences = dict.fromkeys(leaving.fence for leaving in self._leaving.values())
            for fence in fences:
                fence.wait()
        given = 0
        while self.shrink(keep_bytes):
            given += self.grid.page_bytes
        return given

    def shrink(self, keep_bytes: int) -> bool:
        """Give one page of memory back to the driver that no row holds, if there is more than is kept.

        Returns:
            Whether it was given back. Not so long as the card may still read all that there is.
        """
        with self._lock:
            if self.pooled_bytes <= keep_bytes or not (self._pool or self._unmap_oldest()):
                return False
            try:
                self._driver.destroy(self._pool[-1])
            except DriverError:
                _log.exception("the driver does not take memory back")
                return False
            self._pool.pop()
        return True

    def next_fence(self) -> Fence | None:
        """What to wait for until the card is done with more that rows gave back; None if it is with all."""
        with self._lock:
            return self._next_fence()

    def close(self) -> None:
        """Give everything back; what the driver refuses is logged and lost."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            with self._lock:
                for row, held in enumerate(self._held):
                    self._leave(row, list(held))
            self.trim(0)
            with self._lock:
                if not self.pooled_bytes:  # Else the driver would refuse.
                    self._driver.unreserve(self.address, self.grid.nbytes)
                    return
        except (DriverError, torch.AcceleratorError):
            _log.exception("an arena could not be given back whole")
        else:
            _log.error("an arena could not be given back whole: %d bytes are left", self.pooled_bytes)

    def check_integrity(self) -> None:
        """Raise AssertionError where a handle is in two places, a page outside, or the sum wrong."""
        with self._lock:
            handles = [handle for held in self._held for handle in held.values()]
            if len(handles) != self._held_pages:
                raise AssertionError(f"rows hold {len(handles)} pages, the books say {self._held_pages}")
            handles += self._pool
            handles += [leaving.handle for leaving in self._leaving.values()]
            if len(handles) != len(set(handles)):
                raise AssertionError("a piece of memory is in two places")
            for row, held in enumerate(self._held):
                if both := [page for page in held if (row, page) in self._leaving]:
                    raise AssertionError(f"row {row} holds pages {both}, which are leaving")
                if held and not 0 <= min(held) <= max(held) < self.grid.row_pages:
                    raise AssertionError(f"row {row} holds pages {min(held)} to {max(held)}")

    # -- under the lock -------------------------------------------------------------------------------

    def _next_fence(self) -> Fence | None:
        fences = dict.fromkeys(leaving.fence for leaving in self._leaving.values())
        return next((fence for fence in fences if not fence.done()), None)

    def _commit(self, row: int, pages: range) -> None:
        """Place all missing pages, then have access to each run of them in one call: that costs most."""
        self._busy, held = None, self._held[row]
        missing = [page for page in pages if page not in held]
        back = {page: self._leaving.pop((row, page)) for page in missing if (row, page) in self._leaving}
        new: dict[int, int] = {}
        try:
            for page in missing:
                if page not in back:
                    new[page] = self._placed(row, page)
            closed = [page for page in missing if page in new or not back[page].accessible]
            for first, count in _runs(closed):
                address = self.address + self.grid.offset(row, first)
                self._driver.set_access(address, count * self.grid.page_bytes)
        except (torch.OutOfMemoryError, DriverError):
            self._rollback(row, new, back)
            raise
        held.update(new)
        held.update({page: leaving.handle for page, leaving in back.items()})
        self._held_pages += len(missing)

    def _rollback(self, row: int, new: Mapping[int, int], back: Mapping[int, _Leaving]) -> None:
        """Undo a commit that ended half-way: new pages are pooled, those that were leaving leave again."""
        for page, leaving in back.items():
            self._leaving[row, page] = leaving
        for page, handle in new.items():
            self._leaving[row, page] = _Leaving(handle, _Unused(), accessible=False)
            self._unmap(row, page)

    def _leave(self, row: int, pages: Sequence[int]) -> bool:
        """Take pages from a row; they stay mapped for now. Returns whether there were any."""
        if not pages:
            return False
        fence = self._driver.fence()
        for page in pages:
            self._leaving[row, page] = _Leaving(self._held[row].pop(page), fence)
        self._held_pages -= len(pages)
        return True

    def _placed(self, row: int, page: int) -> int:
        """Map memory behind a page, without access to it yet; returns its handle."""
        handle = self._memory()
        try:
            address = self.address + self.grid.offset(row, page)
            self._driver.map(address, self.grid.page_bytes, handle)
        except (torch.OutOfMemoryError, DriverError):
            self._pool.append(handle)
            raise
        return handle

    def _memory(self) -> int:
        """A page of memory: pooled; else new, which costs less than unmapping; else what is leaving."""
        if self._pool:
            return self._pool.pop()
        try:
            return self._driver.create(self.grid.page_bytes)
        except torch.OutOfMemoryError:
            if not self._unmap_oldest():
                raise
            return self._pool.pop()

    def _unmap_oldest(self) -> bool:
        """Pool the page that left first of those that the card is done with; returns whether there is one."""
        busy: Fence | None = None
        for row, page in _in_turn(self._leaving):
            fence = self._leaving[row, page].fence
            if fence is busy or not fence.done():
                busy = self._busy = fence
            elif self._unmap(row, page):
                return True
        return False

    def _unmap(self, row: int, page: int) -> bool:
        """Pool a page that is leaving; one that the driver does not unmap stays, and is tried again, last."""
        address = self.address + self.grid.offset(row, page)
        leaving = self._leaving.pop((row, page))
        try:
            self._driver.unmap(address, self.grid.page_bytes)
        except DriverError:
            self._leaving[row, page] = leaving
            _log.exception("a page of row %d could not be unmapped", row)
            return False
        self._pool.append(leaving.handle)
        return True


def _in_turn(leaving: Mapping[tuple[int, int], _Leaving]) -> Iterator[tuple[int, int]]:
    """Rows and pages, which may change places meanwhile; mostly the first is all that is asked for."""
    yield from itertools.islice(leaving, 1)
    yield from list(leaving)


def _runs(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First page and count of each run of neighbours; pages ascend."""
    first, count = 0, 0
    for page in pages:
        if count and page == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = page, 1
    if count:
        yield first, count
