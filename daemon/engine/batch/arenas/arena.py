"""What the ring asks of the storage of its records; `plain.py`, `host.py` and `card.py` answer it.

    tensor[row, column]   one record, at an address that never changes
    row r                [ ..... | start ======== cursor | ahead | ........ ]
                           none    owned by a query        held    none        memory behind it

A row's range grows at the cursor and never shrinks before the row is freed: a ring has as many columns as the
longest query has tokens. So memory comes column by column (`commit`) and goes row by row (`release`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batond.daemon.memory.use import ArenaUse


@dataclass(frozen=True, slots=True)
class ArenaShape:
    """Size of a ring.

    Attributes:
        rows: Rows.
        capacity: Columns of each.
        record_bytes: Bytes of one column of one row.
    """

    rows: int
    capacity: int
    record_bytes: int


class Arena(Protocol):
    """Storage of rows x capacity records.

    One thread calls it, that of the engine; others may ask for `use` and `trim_soon`.

    Attributes:
        tensor: The records, uint8, shape [rows, capacity, record]; only what is committed may be touched on
            a card, elsewhere the rest reads as zeroes. Rows may lie further apart than their columns need.
        remark: What an operator should know, in words; "" if there is nothing.
    """

    tensor: torch.Tensor
    remark: str

    @property
    def use(self) -> ArenaUse:
        """What it takes now; cheap."""

    def commit(self, row: int, first: int, last: int) -> int:
        """See to it that columns [first, last) of a row can be written.

        Returns:
            How many columns from `last` on, up to the end of the ring, have memory as well.

        Raises:
            torch.OutOfMemoryError: There is none left; nothing has changed.
        """

    def expect(self, row: int, column: int) -> None:
        """Say that a row is about to reach a column: its memory may be had ahead, beside other work."""

    def release(self, row: int, written: Sequence[tuple[int, int]]) -> None:
        """Give all columns of a row back.

        Args:
            row: The row.
            written: Ranges [first, last) of what may hold numbers. Where attention reads rows together they
                are zero afterwards: what is masked counts as zero times its value.
        """

    def holds(self, row: int, first: int, last: int) -> bool:
        """Whether columns [first, last) of a row are committed."""

    def row_bytes(self, row: int) -> int:
        """Physical memory that a row holds."""

    def trim(self, keep_bytes: int = 0) -> int:
        """Give pooled memory back to the system, all but `keep_bytes`; returns how much."""

    def trim_soon(self) -> None:
        """Have all pooled memory given back, without waiting for it; any thread may ask."""

    def close(self) -> None:
        """Give everything back; the tensor must not be used afterwards."""

    def check_integrity(self) -> None:
        """Raise AssertionError where the books contradict each other."""


#: Makes the storage of a ring on a device.
NewArena = Callable[[ArenaShape, torch.device], Arena]
