"""Every live query as the planner last saw it, kept in order from step to step.

    lanes   WAITING, by (class, what it needs, the policy's line)   order kept, the head ranked in a step
            begun, parked, or without a line, by (class, kind)      ranks renewed, RENEWED_A_STEP a step
    ──> merged by rank: the most urgent first

A change costs a binary search; a plan costs what it looks at.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Final

from batond.daemon.scheduler.claims import in_parked_line
from batond.daemon.scheduler.lanes import PARKED, UNTOUCHED, Kind, Lane, LineLane, RankedLane, kind_of
from batond.policies.base import KeepsLines, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from batond.daemon.scheduler.lanes import LaneKey, SortKey
    from batond.policies.base import Policy, QueryView, Rank

#: Parked and begun queries, and those of policies that keep no lines, that are ranked anew in a step. Up to
#: so many the order is exact in every step; of n, a rank is at most n / RENEWED_A_STEP steps old.
RENEWED_A_STEP: Final = 64
#: Most lines of a policy that are kept apart, for the head of each is ranked in each step. Queries of further
#: ones are treated like those of a policy that keeps none.
MOST_LINES: Final = 64


class Line:
    """The queries of an engine, in the order in which a policy serves them.

    Nothing of the policy is called by `put` and `remove`: whatever it raises comes out of `settle` and
    `rank`, and the next `settle` goes on where it stopped.

    Args:
        policy: Gives the ranks.

    Attributes:
        running: Queries with a row, by id.
        held: Queries parked by hand, by id.
        ready: Prefilled queries in line by class order.
        taken_bytes: The whole reserve of running queries and the present KV of all others.
        parked_bytes: The whole reserve of the parked queries in line.
        unwritten_bytes: The part of that reserve that is not written yet.
    """

    def __init__(self, policy: Policy) -> None:
        self.running: dict[str, QueryView] = {}
        self.held: dict[str, QueryView] = {}
        self.ready: Counter[int] = Counter()
        self.taken_bytes = self.unwritten_bytes = self.parked_bytes = 0
        self._views: dict[str, QueryView] = {}
        self._best: dict[int, float] = {}  # Level of the most urgent fresh query, by class order.
        self._use(policy)

    @classmethod
    def of(cls, queries: Iterable[QueryView], policy: Policy) -> Line:
        """A line from scratch."""
        line = cls(policy)
        for query in queries:
            line.put(query)
        return line

    @property
    def policy(self) -> Policy:
        """Whose ranks order the line."""
        return self._policy

    @property
    def views(self) -> Collection[QueryView]:
        """Every query, in no order."""
        return self._views.values()

    @property
    def has_claims(self) -> bool:
        """Whether anybody who is not held lacks a row."""
        return len(self._views) > len(self.running) + len(self.held)

    def view(self, query_id: str) -> QueryView | None:
        """A query as last put."""
        return self._views.get(query_id)

    def put(self, query: QueryView) -> None:
        """Take in a query, or what has changed of it."""
        known = self._views.get(query.query_id)
        if known is not None and known.phase is query.phase is Phase.RUNNING:
            self.taken_bytes += query.reserved_bytes - known.reserved_bytes
            self.unwritten_bytes += query.reserved_bytes - known.reserved_bytes
            self.unwritten_bytes -= query.kv_bytes - known.kv_bytes
            self._views[query.query_id] = self.running[query.query_id] = query
            return
        if known == query:
            return
        if known is not None:
            self.remove(query.query_id)
        self._views[query.query_id] = query
        self._count(query, 1)
        if query.phase is Phase.RUNNING:
            self.running[query.query_id] = query
        elif query.held:
            self.held[query.query_id] = query
        else:
            self._pending[query.seq] = query

    def remove(self, query_id: str) -> None:
        """Forget a query; unknown ones are no error."""
        query = self._views.pop(query_id, None)
        if query is None:
            return
        self._count(query, -1)
        self.running.pop(query_id, None)
        self.held.pop(query_id, None)
        self._pending.pop(query.seq, None)
        self._claims.pop(query.seq, None)
        self._rota.pop(query.seq, None)
        self._ranks.pop(query.seq, None)
        key = self._lane_of.pop(query.seq, None)
        if key is not None:
            lane = self._lanes[key]
            lane.remove(query.seq)
            if not lane:
                del self._lanes[key]

    def rank_by(self, policy: Policy) -> None:
        """Order all queries anew by another policy."""
        if policy is not self._policy:
            self.reorder(policy)

    def reorder(self, policy: Policy) -> None:
        """Order all queries anew, whatever is known of their order."""
        views = list(self._views.values())
        self._use(policy)
        for query in views:
            if query.phase is not Phase.RUNNING and not query.held:
                self._pending[query.seq] = query

    def settle(self, now_s: float) -> None:
        """Put everything in its place; ranks are those of `now_s` until the next call."""
        self._ranks.clear()
        self._now_s = now_s
        renewed = [self._claims[seq] for seq in islice(self._rota, RENEWED_A_STEP)]
        parked: list[QueryView] = []
        for query in list(self._pending.values()):
            if in_parked_line(query):
                parked.append(query)
            else:
                self._place(query)
        for query in renewed:
            if in_parked_line(query):
                parked.append(query)
            else:
                self._renew(query)
        self._best = self._best_levels() if parked else {}
        for query in parked:
            if query.seq in self._pending:
                self._place(query)
            else:
                self._renew(query)

    def rank(self, query: QueryView) -> Rank:
        """Rank of a claim at the time of the last `settle`; the policy is asked once a step."""
        rank = self._ranks.get(query.seq)
        if rank is None:
            rank = self._ranks[query.seq] = self._policy.rank(query, self._now_s)
        return rank

    def lanes(self, kinds: Collection[Kind] | None = None) -> list[Lane]:
        """The lanes of all claims, or of those kinds."""
        return [lane for key, lane in self._lanes.items() if kinds is None or key[1] in kinds]

    def sort_key(self, lane: Lane, place: int) -> SortKey:
        """What a claim is merged by; only claims of the same line can have got out of date."""
        if isinstance(lane, LineLane):
            return self._key(self._claims[lane.seqs[place]])
        key = lane.entries[place][0]
        if lane.kind in PARKED:
            return (min(key[0], self._best.get(lane.class_order, math.inf)), *key[1:])
        return key

    def claim(self, lane: Lane, place: int) -> QueryView:
        """The claim at a place of a lane."""
        return self._claims[lane.seq_at(place)]

    # -- inside

    def _use(self, policy: Policy) -> None:
        self._policy = policy
        self._line_of: Callable[[QueryView], object] | None = (
            policy.line_of if isinstance(policy, KeepsLines) else None
        )
        self._now_s = -math.inf
        self._best = {}
        self._pending: dict[int, QueryView] = {}  # By seq, in the order they came.
        self._claims: dict[int, QueryView] = {}  # What stands in a lane, by seq.
        self._lanes: dict[LaneKey, Lane] = {}
        self._lane_of: dict[int, LaneKey] = {}
        self._rota: dict[int, None] = {}  # Whose rank is renewed, the oldest first.
        self._ranks: dict[int, Rank] = {}  # Asked since the last `settle`.

    def _count(self, query: QueryView, sign: int) -> None:
        if query.phase is Phase.RUNNING:
            self.taken_bytes += sign * query.reserved_bytes
            self.unwritten_bytes += sign * (query.reserved_bytes - query.kv_bytes)
        else:
            self.taken_bytes += sign * query.kv_bytes
        if query.phase is Phase.PARKED and not query.held:
            self.parked_bytes += sign * query.reserved_bytes
        if query.phase is Phase.READY and not query.held:
            self.ready[query.class_order] += sign

    def _place(self, query: QueryView) -> None:
        """Give a new claim its place; nothing has changed if the policy raises."""
        rank, seq = self.rank(query), query.seq
        key, lane = self._lane_for(query, kind_of(query))
        if isinstance(lane, LineLane):
            lane.add(seq, (rank, seq), self._rank_of_seq)
        else:
            lane.put(seq, self._key(query))
            self._rota[seq] = None
        self._claims[seq] = query
        self._lane_of[seq] = key
        del self._pending[seq]

    def _renew(self, query: QueryView) -> None:
        """Give a claim the place that its rank has now, and the last turn to be renewed."""
        seq = query.seq
        lane = self._lanes[self._lane_of[seq]]
        if isinstance(lane, RankedLane):
            lane.put(seq, self._key(query))
        del self._rota[seq]
        self._rota[seq] = None

    def _lane_for(self, query: QueryView, kind: Kind) -> tuple[LaneKey, Lane]:
        order = query.class_order
        key: LaneKey = (order, kind, None)
        if self._line_of is not None and kind in UNTOUCHED:
            line_key = (order, kind, (self._line_of(query),))
            lane = self._lanes.get(line_key)
            if lane is not None:
                return line_key, lane
            if len(self._lanes) < MOST_LINES:
                return line_key, self._lanes.setdefault(line_key, LineLane(order, kind))
        return key, self._lanes.setdefault(key, RankedLane(order, kind))

    def _rank_of_seq(self, seq: int) -> tuple[Rank, int]:
        return self.rank(self._claims[seq]), seq

    def _key(self, query: QueryView) -> SortKey:
        level, *rest = self.rank(query)
        if not in_parked_line(query):
            return (level, 1, 0, *rest, query.seq)
        # A parked query takes over the level of the most urgent fresh query of its class where that is the
        # better one: otherwise a fresh query that was submitted earlier, and aged for longer, would overtake
        # it (rule 3 of the design, behaviour S3).
        level = min(level, self._best.get(query.class_order, math.inf))
        return (level, 0, query.park_seq, *rest, query.seq)

    def _best_levels(self) -> dict[int, float]:
        best: dict[int, float] = {}
        for lane in self._lanes.values():
            if lane.kind not in PARKED:
                level = self.sort_key(lane, 0)[0]
                best[lane.class_order] = min(level, best.get(lane.class_order, math.inf))
        return best
