"""The planner's view of every live query, made anew only where something has changed."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from batond.daemon.engine.queries.view import query_view
from batond.daemon.scheduler.expected import raised
from batond.daemon.scheduler.line import Line
from batond.daemon.wire.messages import QueryState
from batond.policies.base import Phase

if TYPE_CHECKING:
    from batond.daemon.engine.queries.query import Query
    from batond.daemon.engine.queries.residency import Residency
    from batond.daemon.engine.queries.sessions import SessionKey
    from batond.daemon.scheduler.expected import ExpectedOutput
    from batond.daemon.scheduler.guard import PolicyGuard
    from batond.daemon.scheduler.plan import BatchView, Plan
    from batond.policies.base import QueryView


class Roster:
    """Tells line and policy of the queries; whoever changes one notes it here.

    Args:
        residency: Where their KV is, and what is kept of their sessions.
        guard: Its policy ranks and accounts for tokens.
        inline: Whether prompts are computed inside the batch step.

    Attributes:
        expected: Learns how long outputs are, and says what to reserve for new ones; None reserves all that
            may come.
        line: The queries in order, as of the last `refresh`.
    """

    def __init__(self, residency: Residency, guard: PolicyGuard, *, inline: bool) -> None:
        self.expected: ExpectedOutput | None = None
        self.line = Line(guard.policy, self._view_now)
        self._residency, self._guard, self._inline = residency, guard, inline
        self._queries: dict[str, Query] = {}
        self._noted: dict[str, Query] = {}
        self._by_session: dict[SessionKey, dict[str, Query]] = {}

    def note(self, query: Query) -> None:
        """A query is new, or something of it may have changed."""
        if self.expected is not None and query.query_id not in self._queries:
            query.reserved_tokens = self.expected.tokens(query.sla_class.name, query.sampling.max_tokens)
        self._queries[query.query_id] = self._noted[query.query_id] = query
        if query.session is not None:
            self._by_session.setdefault(query.session, {})[query.query_id] = query

    def change(self, query: Query) -> None:
        """Something of a query has changed that no token changes: its class or its deadline."""
        self.note(query)
        self.line.put(self._new_view(query))

    def drop(self, query: Query) -> None:
        """A query has ended; the policy hears of it if it ever heard of the query."""
        self._queries.pop(query.query_id, None)
        self._noted.pop(query.query_id, None)
        if self.expected is not None and query.state is QueryState.FINISHED:
            self.expected.note(query.sla_class.name, len(query.output_token_ids))
        if query.session is not None:
            turns = self._by_session.get(query.session, {})
            turns.pop(query.query_id, None)
            if not turns:
                self._by_session.pop(query.session, None)
        known = self.line.known(query.query_id)
        self.line.remove(query.query_id)
        if known is not None:
            self._guard.on_end(_ended(known, query))

    def count(self, query: Query, prompt_tokens: int, output_tokens: int) -> None:
        """Have tokens accounted for, before they are appended."""
        known = self.line.known(query.query_id) if self._guard.counts_by_owner else None
        self._guard.on_tokens(known or self._view(query), prompt_tokens, output_tokens)

    def refresh(self) -> Line:
        """Bring the line up to date, also with what has come and gone of sessions."""
        for key in self._residency.sessions.take_changed():
            for query in self._by_session.get(key, {}).values():
                self._noted[query.query_id] = query
        for query in self._noted.values():
            self._residency.expect_session(query)
            self._tell(query)
        self._noted.clear()
        return self.line

    def _tell(self, query: Query) -> None:
        outgrown = _raise_reserve(query)
        if query.row is None or query.query_id not in self.line.running or outgrown:
            self.line.put(self._new_view(query))
            return
        # It has kept its row, so it has decoded and nothing else; whoever looks at it has a view made.
        self.line.running.advance(
            query.query_id,
            left_tokens=query.sampling.max_tokens - len(query.output_token_ids),
            since_admission_tokens=query.since_admission_tokens,
            kv_bytes=self._residency.batch.layout.nbytes(query.prefilled_tokens),
        )

    def plan(self, view: BatchView) -> Plan:
        """Plan a step for the queries as of the last `refresh`.

        Args:
            view: Everything but the queries.
        """
        return self._guard.plan(view, self.line)

    def least_urgent(self, count: int) -> list[Query]:
        """Who loses a row first now, in the middle of a step; whatever protects them otherwise."""
        line = self.refresh()
        return [self._queries[name] for name in self._guard.least_urgent(line, time.monotonic(), count)]

    def less_urgent(self, query: Query, *, equals: bool) -> list[Query]:
        """Who has a row that the query may take in the middle of a step, as `VictimPool.less_urgent`."""
        line = self.refresh()
        view, now_s = self._new_view(query), time.monotonic()
        return [self._queries[name] for name in self._guard.less_urgent(line, view, now_s, equals=equals)]

    def check_integrity(self, queries: dict[str, Query]) -> None:
        """Raise AssertionError where a change was not noted."""
        for query_id, query in queries.items():
            if query_id in self._noted:
                continue
            known, now = self.line.known(query_id), self._new_view(query)
            if known is not None and query_id in self.line.running:
                known = _with_progress(known, now)
            if known != now:
                raise AssertionError(f"query {query_id} has changed, and the line was not told")
        running = [query for query in queries.values() if query.query_id in self.line.running]
        written_bytes = sum(self._new_view(query).kv_bytes for query in running)
        if not self._noted and self.line.running.written_bytes != written_bytes:
            raise AssertionError("the line was not told of all tokens")
        lost = {view.query_id for view in self.line.views} - set(queries)
        if lost:
            raise AssertionError(f"the line knows queries that have ended: {lost}")

    def _view(self, query: Query) -> QueryView:
        known = None if query.query_id in self._noted else self.line.view(query.query_id)
        return self._new_view(query) if known is None else known

    def _new_view(self, query: Query) -> QueryView:
        return query_view(query, self._residency.batch.layout, inline=self._inline)

    def _view_now(self, query_id: str) -> QueryView:
        return self._new_view(self._queries[query_id])


def _raise_reserve(query: Query) -> bool:
    """Give a query that has emitted more than was reserved a larger reserve; returns whether it did."""
    if query.reserved_tokens is None or len(query.output_token_ids) <= query.reserved_tokens:
        return False
    emitted, most = len(query.output_token_ids), query.sampling.max_tokens
    query.reserved_tokens = raised(query.reserved_tokens, emitted, most)
    return True


def _ended(known: QueryView, query: Query) -> QueryView:
    """A query at its end, when its row and state are gone already."""
    emitted = len(query.output_token_ids)
    if known.phase is not Phase.RUNNING:
        return replace(known, output_tokens=emitted)
    return replace(
        known,
        output_tokens=emitted,
        since_admission_tokens=query.since_admission_tokens,
        prefilled_tokens=max(known.prefilled_tokens, len(query.prompt_token_ids) + emitted - 1),
    )


def _with_progress(known: QueryView, now: QueryView) -> QueryView:
    """What was known of a running query, as far as it has come now."""
    return replace(
        known,
        prefilled_tokens=now.prefilled_tokens,
        output_tokens=now.output_tokens,
        since_admission_tokens=now.since_admission_tokens,
        kv_bytes=now.kv_bytes,
        park_bytes=now.park_bytes,
    )
