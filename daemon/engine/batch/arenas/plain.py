"""One tensor for all rows, made once: what is not elastic."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from batond.daemon.memory.use import ArenaUse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batond.daemon.engine.batch.arenas.arena import ArenaShape


class PlainArena:
    """Memory of torch, all of it from the start; see `arena.Arena` for the contract.

    Args:
        shape: Of the ring.
        device: Where it lies.
        remark: What an operator should know.
    """

    def __init__(self, shape: ArenaShape, device: torch.device, *, remark: str = "") -> None:
        size = (shape.rows, shape.capacity, shape.record_bytes)
        # On the CPU, zeroed pages are committed by the system when they are first written.
        self.tensor = torch.zeros(size, dtype=torch.uint8, device=device)
        self.remark = remark
        self._capacity = shape.capacity

    @property
    def use(self) -> ArenaUse:
        """All of it, whoever uses it."""
        return ArenaUse(self.tensor.nbytes, 0, self.tensor.nbytes, elastic=False)

    def commit(self, row: int, first: int, last: int) -> int:  # noqa: ARG002 - the protocol's
        """All columns have memory."""
        return self._capacity - last

    def expect(self, row: int, column: int) -> None:
        """Nothing to be had ahead."""

    def release(self, row: int, written: Sequence[tuple[int, int]]) -> None:
        """Zero what was written."""
        for first, last in written:
            self.tensor[row, first:last] = 0

    @staticmethod
    def holds(row: int, first: int, last: int) -> bool:  # noqa: ARG004 - the protocol's
        """Always."""
        return True

    def row_bytes(self, row: int) -> int:
        """The same for every row."""
        return self.tensor[row].nbytes

    @staticmethod
    def trim(keep_bytes: int = 0) -> int:  # noqa: ARG004 - the protocol's
        """Nothing is pooled."""
        return 0

    @staticmethod
    def trim_soon() -> None:
        """Likewise."""

    def close(self) -> None:
        """Give the memory back to torch."""
        self.tensor = self.tensor.new_zeros(0, 0, 0)

    def check_integrity(self) -> None:
        """There are no books."""
