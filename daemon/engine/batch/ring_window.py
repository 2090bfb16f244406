"""Which columns of the ring a step reads, and how rows that are read together cost least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from batond.daemon.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

#: What one more attention call costs, in columns of one row read. CPU: measured with 3 heads of 64. CUDA: a
#: few launches of 10 us, at 16 KiB a column and 3 TB/s.
_CALL_COLUMNS = {"cpu": 256, "cuda": 8192}

_CALLS_OF_TWO_RANGES = 2  # Four products a row instead of one fused call.


def ranges_up_to(newest: int, length: int, capacity: int) -> tuple[tuple[int, int], ...]:
    """Ranges [first, last) of the `length` columns that end at `newest`, oldest first; two if they wrap."""
    start = newest + 1 - length
    if start >= 0:
        return ((start, newest + 1),)
    return ((start + capacity, capacity), (0, newest + 1))


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring rows that are read together.

    Attributes:
        rows: Range [first, last) of rows.
        ranges: Column ranges [first, last) read, in the columns handed to the model, oldest first: those of
            the longest row (two if it wraps), or the whole ring.
        seen: Which of those columns each row owns; bool, shape [rows, 1, 1, columns]. None: all.
    """

    rows: tuple[int, int]
    ranges: tuple[tuple[int, int], ...]
    seen: torch.Tensor | None

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """The run's part of a mask or bias, shape [rows or 1, heads or 1, 1, columns]."""
        rows = tensor[slice(*self.rows)] if tensor.shape[0] > 1 else tensor
        parts = [rows[..., -1:, first:last] for first, last in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class RingWindow:
    """Which columns a step reads: the live window, its place on the ring, and each row's part of it.

    Where the live window wraps, the model gets the whole ring as it lies, which costs nothing because
    attention reads the rows' ranges alone. A model that computes keys from what the cache keeps (MLA expands
    latents) would do so for the whole ring; it gets the live columns in order of age instead (`in_order`).

    Args:
        storage: The ring's records, shape [rows, capacity, record].
        row_by_row: Read every row by itself and in one piece, so that no shape depends on its mates.
        ignored: Arguments that the model passes and its own attention ignores.

    Attributes:
        in_order: Whether a wrapped window is copied together; set by the first attention over computed keys.
        cursor: Newest column.
        size: Columns handed to the model.
        spans: Their ranges [first, last) on the ring, oldest first; the whole ring, in one, where the live
            window wraps and is read as it lies.
        lengths: Tokens per row, the new one included; an idle row sees the newest column only, because
            attention over nothing is not defined.
        runs: All rows, in order, as they are read.
    """

    def __init__(
        self, storage: torch.Tensor, *, row_by_row: bool = False, ignored: frozenset[str] = frozenset()
    ) -> None:
        self.row_by_row = row_by_row
        self.ignored = ignored
        self.capacity = storage.shape[1]
        self.device = storage.device
        self._call_columns = _CALL_COLUMNS.get(storage.device.type, _CALL_COLUMNS["cpu"])
        self._storage_start = storage.untyped_storage().data_ptr()
        self.in_order = False
        self.cursor = 0
        self.size = 1
        self.spans: tuple[tuple[int, int], ...] = ((0, 1),)
        self.lengths: list[int] = []
        self.runs: list[Run] = []
        self._writing: torch.Tensor | None = None

    @property
    def rotated(self) -> bool:
        """Whether the columns handed to the model don't end with the newest."""
        return self.spans[-1][1] != self.cursor + 1

    def advance(self, cursor: int, lengths: Sequence[int]) -> None:
        """Move to a new newest column; `lengths` counts it already."""
        self.cursor = cursor
        self.spans = ranges_up_to(cursor, max(lengths), self.capacity)
        if len(self.spans) > 1 and not self.in_order:
            self.spans = ((0, self.capacity),)
        self.size = sum(last - first for first, last in self.spans)
        occupied = [row for row, length in enumerate(lengths) if length]
        every = len(occupied) == len(lengths)
        self._writing = None if every else torch.tensor(occupied, device=self.device)
        self.lengths = [max(length, 1) for length in lengths]
        self.runs = [self._run(rows) for rows in self._groups()]

    def update(
        self,
        key_store: torch.Tensor,
        value_store: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's newest column and return the columns handed to the model.

        Args:
            key_store: Shape [rows, capacity, heads, key dim].
            value_store: Shape [rows, capacity, heads, value dim].
            key_states: Shape [rows, heads, 1, key dim].
            value_states: Shape [rows, heads, 1, value dim].

        Returns:
            Shape [rows, size, heads, dim]; views, unless the window is `in_order` and wraps.
        """
        self.write(key_store, key_states)
        self.write(value_store, value_states)
        return self.read(key_store), self.read(value_store)

    def write(self, store: torch.Tensor, states: torch.Tensor) -> None:
        """Write the newest column of the occupied rows; what an idle row computes is nobody's.

        Args:
            store: Shape [rows, capacity, heads, dim].
            states: Shape [rows, heads, 1, dim].
        """
        if self._writing is None:
            store[:, self.cursor] = states[:, :, 0]
        else:
            store[self._writing, self.cursor] = states[self._writing, :, 0]

    def read(self, store: torch.Tensor) -> torch.Tensor:
        """The columns handed to the model; a view, unless they are copied together.

        Args:
            store: Shape [rows, capacity, ...].
        """
        parts = [store[:, first:last] for first, last in self.spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def to_ring_order(self, by_age: torch.Tensor | None) -> torch.Tensor | None:
        """A mask or bias over columns in order of age, as they lie in what the model is handed."""
        if by_age is None or not self.rotated:
            return by_age
        return by_age.roll(self.cursor + 1, dims=-1)

    def note_keys(self, key: torch.Tensor) -> None:
        """Learn from the keys of an attention whether the model computes them from what the ring keeps."""
        if self.in_order or self.holds(key):
            return
        if self.row_by_row:
            raise UnsupportedModelError(
                "the model computes keys from what its cache keeps, for all columns of the longest row"
            )
        self.in_order = True  # From the next step on.

    def holds(self, states: torch.Tensor) -> bool:
        """Whether keys or values are a view on the ring."""
        return states.untyped_storage().data_ptr() == self._storage_start

    def padding_mask(self) -> torch.Tensor:
        """1 where a row has a token, in order of age (newest last); int64, shape [rows, size]."""
        lengths = torch.tensor(self.lengths, device=self.device)
        age = torch.arange(self.size - 1, -1, -1, device=self.device)
        return (age[None] < lengths[:, None]).long()

    def ranges(self, length: int) -> tuple[tuple[int, int], ...]:
        """Where the newest `length` columns lie in those handed to the model, oldest first."""
        if not self.rotated:
            return ((self.size - length, self.size),)
        return ranges_up_to(self.cursor, length, self.capacity)

    def _groups(self) -> list[tuple[int, int]]:
        """Split the rows into neighbours that cost less together than one by one."""
        if self.row_by_row:
            return [(row, row + 1) for row in range(len(self.lengths))]
        groups: list[tuple[int, int]] = []
        for row in range(len(self.lengths)):
            joined = (groups[-1][0], row + 1) if groups else (row, row + 1)
            if groups and self._cost(joined) <= self._cost(groups[-1]) + self._cost((row, row + 1)):
                groups[-1] = joined
            else:
                groups.append((row, row + 1))
        return groups

    def _cost(self, rows: tuple[int, int]) -> int:
        """What reading rows together costs, in columns of one row."""
        return min(self._cost_of_ranges(rows), self._cost_of_ring(rows))

    def _cost_of_ranges(self, rows: tuple[int, int]) -> int:
        """The cost of reading the longest row's ranges: in one call, or row by row and range by range."""
        count, longest = rows[1] - rows[0], max(self.lengths[slice(*rows)])
        calls = 1 if len(self.ranges(longest)) == 1 else _CALLS_OF_TWO_RANGES * count
        return calls * self._call_columns + count * longest

    def _cost_of_ring(self, rows: tuple[int, int]) -> int:
        """The cost of reading all columns in one call."""
        return self._call_columns + (rows[1] - rows[0]) * self.size

    def _run(self, rows: tuple[int, int]) -> Run:
        lengths = self.lengths[slice(*rows)]
        ranges = self.ranges(max(lengths))
        if not self.row_by_row and self._cost_of_ring(rows) < self._cost_of_ranges(rows):
            ranges = ((0, self.size),)
        columns = sum(last - first for first, last in ranges)
        if min(lengths) == columns:
            return Run(rows, ranges, None)
        places = torch.cat([torch.arange(first, last, device=self.device) for first, last in ranges])
        newest = self.cursor if self.rotated else self.size - 1
        age = (newest - places) % self.capacity
        seen = age[None] < torch.tensor(lengths, device=self.device)[:, None]
        return Run(rows, ranges, seen[:, None, None])
