"""The planner's view of every live query, made anew only where something has changed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from batond.daemon.engine.queries.view import query_view
from batond.daemon.scheduler.line import Line

if TYPE_CHECKING:
    from batond.daemon.engine.queries.query import Query
    from batond.daemon.engine.queries.residency import Residency
    from batond.daemon.engine.queries.sessions import SessionKey
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
        line: The queries in order, as of the last `refresh`.
    """

    def __init__(self, residency: Residency, guard: PolicyGuard, *, inline: bool) -> None:
        self.line = Line(guard.policy)
        self._residency, self._guard, self._inline = residency, guard, inline
        self._noted: dict[str, Query] = {}
        self._by_session: dict[SessionKey, dict[str, Query]] = {}

    def note(self, query: Query) -> None:
        """A query is new, or something of it may have changed."""
        self._noted[query.query_id] = query
        if query.session is not None:
            self._by_session.setdefault(query.session, {})[query.query_id] = query

    def drop(self, query: Query) -> None:
        """A query has ended; the policy hears of it if it ever heard of the query."""
        self._noted.pop(query.query_id, None)
        if query.session is not None:
            turns = self._by_session.get(query.session, {})
            turns.pop(query.query_id, None)
            if not turns:
                self._by_session.pop(query.session, None)
        known = self.line.view(query.query_id)
        self.line.remove(query.query_id)
        if known is not None:
            self._guard.on_end(replace(known, output_tokens=len(query.output_token_ids)))

    def count(self, query: Query, prompt_tokens: int, output_tokens: int) -> None:
        """Have tokens accounted for, before they are appended."""
        self._guard.on_tokens(self._view(query), prompt_tokens, output_tokens)

    def refresh(self) -> Line:
        """Bring the line up to date, also with what has come and gone of sessions."""
        for key in self._residency.sessions.take_changed():
            for query in self._by_session.get(key, {}).values():
                self._noted[query.query_id] = query
        for query in self._noted.values():
            self._residency.expect_session(query)
            self.line.put(self._new_view(query))
        self._noted.clear()
        return self.line

    def plan(self, view: BatchView) -> Plan:
        """Plan a step for the queries as of the last `refresh`.

        Args:
            view: Everything but the queries.
        """
        return self._guard.plan(view, self.line)

    def check_integrity(self, queries: dict[str, Query]) -> None:
        """Raise AssertionError where a change was not noted."""
        for query_id, query in queries.items():
            if query_id not in self._noted and self.line.view(query_id) != self._new_view(query):
                raise AssertionError(f"query {query_id} has changed, and the line was not told")
        lost = {view.query_id for view in self.line.views} - set(queries)
        if lost:
            raise AssertionError(f"the line knows queries that have ended: {lost}")

    def _view(self, query: Query) -> QueryView:
        known = None if query.query_id in self._noted else self.line.view(query.query_id)
        return self._new_view(query) if known is None else known

    def _new_view(self, query: Query) -> QueryView:
        return query_view(query, self._residency.batch.layout, inline=self._inline)
