"""Claims of one kind in order, and the walk that merges them."""

from __future__ import annotations

import enum
import heapq
from bisect import bisect_left, insort
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from batond.daemon.scheduler.claims import in_parked_line
from batond.policies.base import Phase, Rank

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from batond.policies.base import QueryView

#: Level, 0 for parked, park order, rank, seq. The level is the first number of the rank, and of the rank of
#: a parked query nothing else is of use, for no two have the same park order.
SortKey: TypeAlias = tuple[float, int, int, Rank, int]


class Kind(enum.IntEnum):  # Integers, for they are hashed often.
    """What a claim needs."""

    PROMPT = 1  # Nothing is computed.
    ROWLESS = 2  # Nothing is computed, and with its first token it ends.
    INLINE = 3  # Nothing is computed, and a row is all it needs.
    BEGUN = 4  # Has KV on the device.
    COPY = 5  # Parked, its KV in the host pool.
    DROPPED = 6  # Lost its row, and its KV must be computed again.


#: Kinds of which nothing is computed yet.
UNTOUCHED: Final = (Kind.PROMPT, Kind.ROWLESS, Kind.INLINE)
#: Kinds that lost a row.
PARKED: Final = (Kind.COPY, Kind.DROPPED)

LaneKey: TypeAlias = tuple[int, Kind, object]  # Class order, kind, the policy's line.
_Place: TypeAlias = tuple[SortKey, int, int]  # Key of a claim, number of its lane, its place there.


def kind_of(query: QueryView) -> Kind:
    """Kind of a claim."""
    if in_parked_line(query):
        return Kind.COPY if query.to_prefill_tokens == 0 else Kind.DROPPED
    if query.phase is Phase.WAITING:
        return Kind.ROWLESS if query.max_tokens - query.output_tokens <= 1 else Kind.PROMPT
    inline = query.prefilled_tokens == query.kv_bytes == query.to_prefill_tokens == 0
    return Kind.INLINE if inline and query.output_tokens == 0 else Kind.BEGUN


class LineLane:
    """Claims that keep their places among each other; a newcomer is ranked against them as they are then."""

    parked = False

    def __init__(self, key: LaneKey) -> None:
        self.key = key
        self.class_order, self.kind, _ = key
        self.seqs: list[int] = []

    def __len__(self) -> int:
        return len(self.seqs)

    def seq_at(self, place: int) -> int:
        """Number of the claim at a place."""
        return self.seqs[place]

    def add(self, seq: int, key: SortKey, key_of: Callable[[int], SortKey]) -> None:
        """Put a claim in its place; most come last."""
        if not self.seqs or key_of(self.seqs[-1]) < key:
            self.seqs.append(seq)
        else:
            self.seqs.insert(bisect_left(self.seqs, key, key=key_of), seq)

    def remove(self, seq: int) -> None:
        """Take a claim out. Not by its rank, which may be another by now; mostly it is among the first."""
        self.seqs.remove(seq)


class RankedLane:
    """Claims sorted by the ranks they had when they were put."""

    def __init__(self, key: LaneKey) -> None:
        self.key = key
        self.class_order, self.kind, _ = key
        self.parked = self.kind in PARKED
        self.entries: list[tuple[SortKey, int]] = []
        self._keys: dict[int, SortKey] = {}

    def __len__(self) -> int:
        return len(self.entries)

    def seq_at(self, place: int) -> int:
        """Number of the claim at a place."""
        return self.entries[place][1]

    def put(self, seq: int, key: SortKey) -> None:
        """Put a claim in its place, or in its new one."""
        known = self._keys.get(seq)
        if known == key:
            return
        if known is not None:
            self.remove(seq)
        insort(self.entries, (key, seq))
        self._keys[seq] = key

    def remove(self, seq: int) -> None:
        """Take a claim out."""
        del self.entries[bisect_left(self.entries, (self._keys.pop(seq), seq))]


Lane: TypeAlias = LineLane | RankedLane


class Lanes(Protocol):
    """What a walk asks of the line it goes along."""

    def lanes(self, kinds: Collection[Kind] | None = None) -> list[Lane]:
        """The lanes of all claims, or of those kinds."""

    def sort_key(self, lane: Lane, place: int) -> SortKey:
        """What a claim is merged by."""

    def claim(self, lane: Lane, place: int) -> QueryView:
        """The claim at a place of a lane."""


class Walk:
    """Goes over the claims, the most urgent first, and looks into no lane longer than anybody can be served.

    A class and kind that is shut waits at its place with all its lanes; once it opens, it comes next.

    Args:
        line: Settled for this step.
        shut: Whether nobody of a class and kind can be given anything as things stand; None looks at all.
        kinds: What to look at; None is everything.
    """

    def __init__(
        self,
        line: Lanes,
        shut: Callable[[int, Kind], bool] | None = None,
        kinds: Collection[Kind] | None = None,
    ) -> None:
        self._line = line
        self._shut = shut
        self._paused: list[tuple[int, Kind]] = []
        self._lanes = line.lanes(kinds)
        self._heaps: dict[tuple[int, Kind], list[_Place]] = {}
        for number, lane in enumerate(self._lanes):
            heap = self._heaps.setdefault(lane.key[:2], [])
            heap.append((line.sort_key(lane, 0), number, 0))
        for heap in self._heaps.values():
            heapq.heapify(heap)
        self._heads = [(heap[0], group) for group, heap in self._heaps.items()]
        heapq.heapify(self._heads)

    def reopen(self) -> None:
        """Look at shut lanes again: something has come free. Nothing else opens them."""
        paused, self._paused = self._paused, []
        for group in paused:
            if self._shut is not None and self._shut(*group):
                self._paused.append(group)
            else:
                heapq.heappush(self._heads, (self._heaps[group][0], group))

    def __iter__(self) -> Iterator[QueryView]:
        """Yield claims; every one at most once."""
        heads, line = self._heads, self._line
        while heads:
            group = heads[0][1]
            if self._shut is not None and self._shut(*group):
                heapq.heappop(heads)
                self._paused.append(group)
                continue
            heap = self._heaps[group]
            _, number, place = heap[0]
            lane = self._lanes[number]
            query = line.claim(lane, place)
            place += 1
            if place < len(lane):
                heapq.heapreplace(heap, (line.sort_key(lane, place), number, place))
            else:
                heapq.heappop(heap)
            if heap:
                heapq.heapreplace(heads, (heap[0], group))
            else:
                heapq.heappop(heads)
            yield query
