"""Takes and gives the rows of a plan: whose bytes are not on the device yet gets its row in a later step.

    step      plan: resume b for a     again              again
    a         decodes                  decodes            parked
    b         copy begun ─────────────────────> landed    its row, decodes
    batch     never waits

A row stays with its owner until the bytes of whoever takes it are there; a row that was free stays free for
those one or two steps, as nobody overtakes the head of the line. Copies begun when a row was about to come
free have mostly landed by then. While nobody has a row, nobody is held up, and a copy is waited for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batond.daemon.wire.messages import QueryState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batond.daemon.engine.queries.lifecycle import Lifecycle
    from batond.daemon.engine.queries.query import Query
    from batond.daemon.engine.queries.residency import Residency
    from batond.daemon.engine.queries.roster import Roster
    from batond.daemon.engine.queries.spilling import Spilling
    from batond.daemon.engine.step.relief import Relief
    from batond.daemon.scheduler.plan import Chunk, Plan


class Rows:
    """Carries out what a plan says of rows.

    Args:
        residency: Whose rows.
        spilling: Brings slices from files.
        life: Parks.
        relief: Places, where memory may be short.
        roster: Knows what queries have reserved.
        inline: Whether prompts are computed inside the batch step.
    """

    def __init__(
        self,
        residency: Residency,
        spilling: Spilling,
        life: Lifecycle,
        relief: Relief,
        roster: Roster,
        *,
        inline: bool,
    ) -> None:
        self._residency, self._spilling = residency, spilling
        self._life, self._relief, self._roster = life, relief, roster
        self._inline = inline

    def prepare(self, plan: Plan) -> list[Chunk]:
        """Begin to bring to the device what the plan needs there, and what the next plans may.

        Returns:
            The chunks whose beginnings are there.
        """
        begun = self._live(chunk.query_id for chunk in plan.chunks)
        resumed, soon = self._live(plan.resume), self._live(plan.prefetch)
        there = {query.query_id: query for query in begun if self._spilling.at_hand(query)}
        due = [query for query in resumed if self._spilling.expect(query)]
        likely = [
            query for query in soon if query.state is QueryState.PARKED and self._spilling.expect(query)
        ]
        self._residency.bring([*there.values(), *due], likely)
        return [
            chunk for chunk in plan.chunks if chunk.query_id in there and self._landed(there[chunk.query_id])
        ]

    def can_move(self, plan: Plan) -> bool:
        """Whether anybody could get or lose a row now; not if all that are to wait for their bytes."""
        late = {query.query_id for query in self._live(plan.resume) if not self._residency.landed(query)}
        orders = any(order.for_query_id not in late for order in plan.park)
        return orders or bool(plan.admit) or len(late) < len(plan.resume)

    def run(self, plan: Plan) -> None:
        """Park the planned victims, and place the planned queries but those that must wait for their bytes.

        Those that ended with their first token or lost a damaged copy get nothing, either.
        """
        asked = {order.for_query_id for order in plan.park}
        planned = self._live((*plan.resume, *plan.admit))
        late = {one.query_id for one in planned if one.query_id in asked and not self._can_go_on(one)}
        for order in plan.park:
            if order.for_query_id not in late:
                query = self._life.queries[order.query_id]
                query.planner_parks += order.preempts
                self._life.park(query, order.mode, cause=order.cause, for_query_id=order.for_query_id)
        rows = self._left_over(plan, late)
        for query in planned:
            if query.query_id in late:
                continue
            if rows <= 0:
                break  # It was to have what victims keep.
            rows -= 1  # Also for whoever is late: nobody behind gets its row.
            if query.query_id in asked or self._can_go_on(query):
                self._relief.place(query, plan.reasons[query.query_id])
            self._spilling.let_go()
            if self._relief.struck:
                return  # Nor is there room for those behind it.
        self._spilling.let_go()

    def _left_over(self, plan: Plan, late: set[str]) -> int:
        """Rows that can be given now; none where others may have been promised bytes of victims that stay."""
        if not late:
            return len(self._residency.by_row)
        kept = [order.query_id for order in plan.park if order.for_query_id in late]
        if self._reserved(kept) > self._reserved(late):
            return 0
        return sum(owner is None for owner in self._residency.by_row)

    def _can_go_on(self, query: Query) -> bool:
        """Whether it can have a row at once; to be asked once a step."""
        return self._ready(query) and self._spilling.at_hand(query) and self._landed(query)

    def _reserved(self, query_ids: Iterable[str]) -> int:
        views = map(self._roster.line.known, query_ids)
        return sum(view.reserved_bytes for view in views if view is not None)

    def _ready(self, query: Query) -> bool:
        return self._inline or not query.to_prefill_tokens

    def _landed(self, query: Query) -> bool:
        """Whether what the query goes on from can be had at once, or nobody would be held up by it."""
        if self._residency.landed(query) or not self._residency.occupied:
            return True
        self._life.counters["waits_for_copy"] += 1
        return False

    def _live(self, query_ids: Iterable[str]) -> list[Query]:
        """Those that have not ended since the plan was made."""
        queries = self._life.queries
        return [queries[query_id] for query_id in query_ids if query_id in queries]
