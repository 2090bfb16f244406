"""Which pages of an arena a range of columns lies on; arithmetic only.

    row r   | page 0 | page 1 | page 2 | ...       each of page_bytes, none shared by two rows
            [ c0 c1 c2 c3 c4 c5 c6 ... ]           columns follow each other without gaps

Every row begins with a page of its own: what one row gives back is never part of another. That costs address
space at the end of a row, and no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from batond.daemon.engine.batch.arenas.arena import ArenaShape

#: Rows from this length on shall hold at most so much more than what their tokens take.
_SMALL_ROW_TOKENS: Final = 256
_WASTE: Final = 0.1
#: Pages held beyond what is live: parts of one at both ends of a range, and what is had ahead of the cursor.
_SPARE_PAGES: Final = 3
_LARGEST_BYTES: Final = 32 << 20


def page_bytes_for(record_bytes: int, granularity: int) -> int:
    """Size of an arena's pages: as large as waste allows, because a page costs the same whatever its size.

    Args:
        record_bytes: Bytes of a column of a row.
        granularity: What the system's pages are multiples of.

    Returns:
        A multiple of `granularity`.
    """
    wanted = int(_WASTE * _SMALL_ROW_TOKENS * record_bytes) // _SPARE_PAGES
    return max(min(wanted, _LARGEST_BYTES) // granularity, 1) * granularity


@dataclass(frozen=True, slots=True)
class PageGrid:
    """An arena cut into pages.

    Attributes:
        shape: Of the ring.
        page_bytes: Of a page.
    """

    shape: ArenaShape
    page_bytes: int

    @property
    def row_pages(self) -> int:
        """Pages of a row."""
        return -(-self.shape.capacity * self.shape.record_bytes // self.page_bytes)

    @property
    def row_bytes(self) -> int:
        """Bytes from one row to the next."""
        return self.row_pages * self.page_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.shape.rows * self.row_bytes

    @property
    def strides(self) -> tuple[int, int, int]:
        """Bytes between rows, columns and bytes of a record."""
        return (self.row_bytes, self.shape.record_bytes, 1)

    def offset(self, row: int, page: int) -> int:
        """First byte of a row's page."""
        return row * self.row_bytes + page * self.page_bytes

    def pages(self, first: int, last: int) -> range:
        """Pages that columns [first, last) lie on."""
        record = self.shape.record_bytes
        return range(first * record // self.page_bytes, -(-last * record // self.page_bytes))

    def columns_behind(self, last: int) -> int:
        """How many columns from `last` on lie wholly on the pages of those before, up to the ring's end."""
        record = self.shape.record_bytes
        whole = -(-last * record // self.page_bytes) * self.page_bytes // record
        return min(whole, self.shape.capacity) - last
