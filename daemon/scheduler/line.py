"""Every live query as the planner last saw it, kept in order from step to step.

    lanes   WAITING, by (class, what it needs, the policy's line)   order kept, the head ranked in a step
            begun, parked, or without a line, by (class, kind)      ranks renewed, all or in turn
    ──> merged by rank: the most urgent first

A change costs a binary search; a plan costs what it looks at.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Final

from batond.daemon.scheduler.claims import holds_device_bytes, in_parked_line
from batond.daemon.scheduler.hints import speaks_for
from batond.daemon.scheduler.lanes import UNTOUCHED, Kind, Lane, LineLane, RankedLane, kind_of
from batond.daemon.scheduler.rows import Rows
from batond.policies.base import KeepsLines, Phase, PreemptsByLevel

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from batond.daemon.scheduler.lanes import LaneKey, SortKey
    from batond.daemon.scheduler.rows import ViewOf
    from batond.policies.base import Policy, QueryView, Rank

#: Up to so many parked and begun queries, and queries of policies that keep no lines, are all ranked anew in
#: each step: their order is exact.
EXACT_UP_TO: Final = 64
#: Where there are more, so many are, in turn: of n, a rank is at most n / RENEWED_A_STEP steps old.
RENEWED_A_STEP: Final = 16
#: Most lines of a policy that are kept apart, for the head of each is ranked in each step. Queries of further
#: ones are treated like those of a policy that keeps none.
MOST_LINES: Final = 64


class Line:
    """The queries of an engine, in the order in which a policy serves them.

    Nothing of the policy is called by `put` and `remove`: whatever it raises comes out of `settle` and
    `rank`, and the next `settle` goes on where it stopped.

    Args:
        policy: Gives the ranks.
        view_of: Makes the views of running queries that were told of by `running.advance`.

    Attributes:
        running: Queries with a row.
        held: Queries parked by hand or put off, by id.
        ready: Prefilled queries in line by class order.
        holders: Queries that hold KV on the device without a row, by id.
        parked_bytes: The whole reserve of the parked queries in line.
        victim_bar: The policy's, if it has one that its `may_preempt` goes by; see `PreemptsByLevel`.
    """

    def __init__(self, policy: Policy, view_of: ViewOf | None = None) -> None:
        self.running = Rows(view_of)
        self.held: dict[str, QueryView] = {}
        self.holders: dict[str, QueryView] = {}
        self.ready: Counter[int] = Counter()
        self.parked_bytes = 0
        self._rowless: dict[str, QueryView] = {}
        self._rowless_bytes = 0  # Their present KV.
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
        running = map(self.running.view, self.running)
        return (*self._rowless.values(), *running)

    @property
    def taken_bytes(self) -> int:
        """The whole reserve of running queries and the present KV of all others."""
        return self.running.reserved_bytes + self._rowless_bytes

    @property
    def unwritten_bytes(self) -> int:
        """The part of the reserve of running queries that is not written yet."""
        return self.running.reserved_bytes - self.running.written_bytes

    @property
    def has_claims(self) -> bool:
        """Whether anybody who is not held lacks a row."""
        return len(self._rowless) > len(self.held)

    def view(self, query_id: str) -> QueryView | None:
        """A query as last put."""
        return self.running.view(query_id) if query_id in self.running else self._rowless.get(query_id)

    def known(self, query_id: str) -> QueryView | None:
        """A query as `view` gave it last: of a running one the tokens may be out of date."""
        return self.running.known(query_id) if query_id in self.running else self._rowless.get(query_id)

    def put(self, query: QueryView) -> None:
        """Take in a query, or what has changed of it."""
        running = query.phase is Phase.RUNNING
        if running and query.query_id in self.running:
            self.running.put(query)
            return
        if self._rowless.get(query.query_id) == query:
            return
        self.remove(query.query_id)
        if running:
            self.running.put(query)
            return
        self._rowless[query.query_id] = query
        self._count(query, 1)
        if query.kv_bytes and holds_device_bytes(query):
            self.holders[query.query_id] = query
        if query.held:
            self.held[query.query_id] = query
        else:
            self._pending[query.seq] = query

    def remove(self, query_id: str) -> None:
        """Forget a query; unknown ones are no error."""
        self.running.remove(query_id)
        query = self._rowless.pop(query_id, None)
        if query is None:
            return
        self._count(query, -1)
        self.held.pop(query_id, None)
        if self.holders:
            self.holders.pop(query_id, None)
        self._pending.pop(query.seq, None)
        self._claims.pop(query.seq, None)
        self._rota.pop(query.seq, None)
        self._keys.pop(query.seq, None)
        lane = self._lane_of.pop(query.seq, None)
        if lane is not None:
            lane.remove(query.seq)
            if not lane:
                del self._lanes[lane.key]

    def rank_by(self, policy: Policy) -> None:
        """Order all queries anew by another policy."""
        if policy is not self._policy:
            self.reorder(policy)

    def reorder(self, policy: Policy) -> None:
        """Order all queries anew, whatever is known of their order."""
        self._use(policy)
        for query in self._rowless.values():
            if not query.held:
                self._pending[query.seq] = query

    def settle(self, now_s: float) -> None:
        """Put everything in its place; ranks are those of `now_s` until the next call."""
        self._keys.clear()
        self._now_s = now_s
        count = EXACT_UP_TO if len(self._rota) <= EXACT_UP_TO else RENEWED_A_STEP
        turns = list(islice(self._rota.items(), count))
        pending, parked = self._newcomers()
        for query in pending:
            self._place(query)
        for seq, lane in turns:
            if not lane.parked:
                lane.put(seq, self._fresh_key(self._claims[seq]))
        # Parked ones come last: they take over levels of fresh ones.
        self._best = self._best_levels()
        for query in parked:
            self._place(query)
        for seq, lane in turns:
            if lane.parked:
                lane.put(seq, self._parked_key(self._claims[seq]))
        if len(turns) < len(self._rota):
            for seq, lane in turns:
                del self._rota[seq]
                self._rota[seq] = lane

    def lanes(self, kinds: Collection[Kind] | None = None) -> list[Lane]:
        """The lanes of all claims, or of those kinds."""
        return [lane for key, lane in self._lanes.items() if kinds is None or key[1] in kinds]

    def sort_key(self, lane: Lane, place: int) -> SortKey:
        """What a claim is merged by; only claims of the same line can have got out of date."""
        if isinstance(lane, LineLane):
            return self._line_key_of(lane.seqs[place])
        key = lane.entries[place][0]
        if lane.parked:
            best = self._best.get(lane.class_order, math.inf)
            return key if key[0] <= best else (best, *key[1:])
        return key

    def claim(self, lane: Lane, place: int) -> QueryView:
        """The claim at a place of a lane."""
        return self._claims[lane.seq_at(place)]

    # -- inside

    def _use(self, policy: Policy) -> None:
        self._policy, self._rank = policy, policy.rank
        self._line_of: Callable[[QueryView], object] | None = (
            policy.line_of if isinstance(policy, KeepsLines) else None
        )
        self.victim_bar: Callable[[QueryView, int, float], float | None] | None = None
        if isinstance(policy, PreemptsByLevel) and speaks_for(policy, "victim_bar", "may_preempt"):
            self.victim_bar = policy.victim_bar
        self._now_s = -math.inf
        self._best = {}
        self._pending: dict[int, QueryView] = {}  # By seq, in the order they came.
        self._claims: dict[int, QueryView] = {}  # What stands in a lane, by seq.
        self._lanes: dict[LaneKey, Lane] = {}
        self._lane_of: dict[int, Lane] = {}
        self._rota: dict[int, RankedLane] = {}  # Whose rank is renewed, the oldest first.
        self._keys: dict[int, SortKey] = {}  # Of lines, asked for since the last `settle`.

    def _count(self, query: QueryView, sign: int) -> None:
        self._rowless_bytes += sign * query.kv_bytes
        if query.phase is Phase.PARKED and not query.held:
            self.parked_bytes += sign * query.reserved_bytes
        if query.phase is Phase.READY and not query.held:
            self.ready[query.class_order] += sign

    def _newcomers(self) -> tuple[list[QueryView], list[QueryView]]:
        """Who has no place yet, fresh and parked."""
        pending: list[QueryView] = []
        parked: list[QueryView] = []
        for query in self._pending.values():
            if self._claims:
                # Who comes, or has changed its class, may move others: all do before any two are compared.
                self._ranked(query)
            (parked if in_parked_line(query) else pending).append(query)
        return pending, parked

    def _place(self, query: QueryView) -> None:
        """Give a new claim its place; nothing has changed if the policy raises."""
        seq = query.seq
        lane = self._lane_for(query, kind_of(query))
        if isinstance(lane, LineLane):
            lane.add(seq, self._line_key(seq, query), self._line_key_of)
        else:
            lane.put(seq, self._parked_key(query) if lane.parked else self._fresh_key(query))
            self._rota[seq] = lane
        self._claims[seq] = query
        self._lane_of[seq] = lane
        del self._pending[seq]

    def _lane_for(self, query: QueryView, kind: Kind) -> Lane:
        order = query.class_order
        key: LaneKey = (order, kind, None)
        if self._line_of is not None and kind in UNTOUCHED:
            line_key = (order, kind, (self._line_of(query),))
            lane = self._lanes.get(line_key)
            if lane is not None:
                return lane
            if len(self._lanes) < MOST_LINES:
                return self._lanes.setdefault(line_key, LineLane(line_key))
        return self._lanes.setdefault(key, RankedLane(key))

    def _line_key_of(self, seq: int) -> SortKey:
        return self._keys.get(seq) or self._line_key(seq, self._claims[seq])

    def _line_key(self, seq: int, query: QueryView) -> SortKey:
        rank = self._ranked(query)
        key = self._keys[seq] = (rank[0], 1, 0, rank, seq)
        return key

    def _ranked(self, query: QueryView) -> Rank:
        rank = self._rank(query, self._now_s)
        for number in rank:
            if math.isnan(number):  # It is neither before nor behind: nothing would be found again.
                raise ValueError(f"policy {self._policy.name} gave {query.query_id} the rank {rank}")
        return rank

    def _fresh_key(self, query: QueryView) -> SortKey:
        rank = self._ranked(query)
        return (rank[0], 1, 0, rank, query.seq)

    def _parked_key(self, query: QueryView) -> SortKey:
        # A parked query takes over the level of the most urgent fresh query of its class where that is the
        # better one: otherwise a fresh query that was submitted earlier, and aged for longer, would overtake
        # it (rule 3 of the design, behaviour S3).
        level, best = self._ranked(query)[0], self._best.get(query.class_order)
        return (level if best is None or level < best else best, 0, query.park_seq, (), query.seq)

    def _best_levels(self) -> dict[int, float]:
        best: dict[int, float] = {}
        for lane in self._lanes.values():
            if not lane.parked:
                level = self.sort_key(lane, 0)[0]
                if level < best.get(lane.class_order, math.inf):
                    best[lane.class_order] = level
        return best
