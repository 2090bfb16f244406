"""First-fit allocation of byte ranges; several ranges may serve one request."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple


class Extent(NamedTuple):
    """A range of bytes: [start, start + nbytes)."""

    start: int
    nbytes: int

    @property
    def end(self) -> int:
        """First byte behind the range."""
        return self.start + self.nbytes


class ExtentAllocator:
    """Hands out ranges of [0, capacity).

        [ free | owner a | free | owner b | owner a | free )

    Free ranges are kept sorted and never touch each other. A request takes the first free range that holds
    it whole, else as many free ranges as it needs, lowest first: what fits by bytes is never refused.

    Args:
        capacity_bytes: Size of the space, 0 or more.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.free_bytes = capacity_bytes
        self._free = [Extent(0, capacity_bytes)] if capacity_bytes else []

    @property
    def free_extents(self) -> tuple[Extent, ...]:
        """The free ranges, lowest first."""
        return tuple(self._free)

    def take(self, nbytes: int) -> tuple[Extent, ...] | None:
        """Take `nbytes`, in as few ranges as first fit allows.

        Returns:
            The ranges (none for 0 bytes), or None if fewer bytes are free.
        """
        if nbytes > self.free_bytes:
            return None
        if nbytes == 0:
            return ()
        whole = next((at for at, extent in enumerate(self._free) if extent.nbytes >= nbytes), None)
        taken: list[Extent] = []
        at = 0 if whole is None else whole
        missing = nbytes
        while missing:
            extent = self._free[at]
            part = Extent(extent.start, min(missing, extent.nbytes))
            taken.append(part)
            missing -= part.nbytes
            if part.nbytes == extent.nbytes:
                del self._free[at]
            else:
                self._free[at] = Extent(part.end, extent.nbytes - part.nbytes)
        self.free_bytes -= nbytes
        return tuple(taken)

    def give_back(self, extents: tuple[Extent, ...]) -> None:
        """Return ranges that `take` handed out, merging them with free neighbours."""
        for extent in extents:
            at = bisect_left(self._free, extent)
            start, end = extent.start, extent.end
            if at < len(self._free) and self._free[at].start == end:
                end = self._free.pop(at).end
            if at and self._free[at - 1].end == start:
                at -= 1
                start = self._free.pop(at).start
            self._free.insert(at, Extent(start, end - start))
            self.free_bytes += extent.nbytes

    def check_integrity(self, taken: list[Extent]) -> None:
        """Raise AssertionError unless free and taken ranges tile the space exactly.

        Args:
            taken: Every range that is handed out now.
        """
        position = 0
        for extent in sorted([*self._free, *taken]):
            if extent.nbytes <= 0:
                raise AssertionError(f"empty range {extent}")
            if extent.start != position:
                word = "overlaps" if extent.start < position else "leaves a gap after"
                raise AssertionError(f"range {extent} {word} byte {position}")
            position = extent.end
        if position != self.capacity_bytes:
            raise AssertionError(f"ranges end at {position}, capacity is {self.capacity_bytes}")
        if self.free_bytes != sum(extent.nbytes for extent in self._free):
            raise AssertionError(f"free_bytes is {self.free_bytes}, free ranges are {self._free}")
        for left, right in zip(self._free, self._free[1:], strict=False):
            if left.end == right.start:
                raise AssertionError(f"free ranges {left} and {right} were not merged")
