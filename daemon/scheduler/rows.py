"""The queries with a row, sorted by what a plan asks of them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from batond.policies.base import QueryView

    #: Makes the view of a running query as it is now, by its id.
    ViewOf: TypeAlias = Callable[[str], QueryView]


@dataclass(frozen=True, slots=True)
class PlannerLimits:
    """Protection of running queries, the same under every policy.

    Attributes:
        quantum_tokens: Tokens a query decodes after each admission before it may be parked (rule 4).
        max_parks: A query parked so often by the planner is not pre-empted any more (rule 3).
        pass_over_s: Who needs more than the whole budget as it is now is passed by others until it has waited
            so long since its arrival; then it stops the line, and runs alone (rule 5).
        prefetch_tokens: A row counts as coming free when its query may emit at most so many tokens more.
    """

    quantum_tokens: int = 16
    max_parks: int = 8
    prefetch_tokens: int = 2
    pass_over_s: float = 60.0


class Standing(enum.IntEnum):
    """What protects a running query from being parked."""

    OPEN = 0  # Nothing but its urgency.
    IN_QUANTUM = 1
    CAPPED = 2  # Parked as often as it may be.
    KEPT = 3  # Its class is not preemptible.


@dataclass(slots=True, eq=False)
class Group:
    """Running queries of one class and standing.

    Attributes:
        reserved_bytes: Of all its members together.
    """

    class_order: int
    standing: Standing
    members: dict[str, Row] = field(default_factory=dict)
    reserved_bytes: int = 0


@dataclass(slots=True, eq=False)
class Row:
    """One running query.

    Attributes:
        known: Its view as last made.
        stale: It has decoded since, so `known` tells the truth about who it is, not about how far it is.
    """

    known: QueryView
    group: Group
    kv_bytes: int
    stale: bool = False


class Rows:
    """Running queries by class and by what protects them.

    A decoded token moves a query only when it crosses a line: the end of its quantum, or `prefetch_tokens`
    before its end. So a plan that takes nobody's row looks at none of them, and their views, which change
    with each token, need not be made before somebody looks.

    Args:
        view_of: Makes the views of those that were told of by `advance`; without it there is `put` alone.

    Attributes:
        reserved_bytes: The whole reserve of all of them.
        written_bytes: The part of it that is written.
        ending: Ids of those that may emit at most `prefetch_tokens` tokens more.
    """

    def __init__(self, view_of: ViewOf | None = None) -> None:
        self.reserved_bytes = self.written_bytes = 0
        self.ending: set[str] = set()
        self._view_of = view_of
        self._limits = PlannerLimits()
        self._rows: dict[str, Row] = {}
        self._groups: dict[tuple[int, Standing], Group] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, query_id: object) -> bool:
        return query_id in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    @property
    def groups(self) -> Collection[Group]:
        """All groups that have members, in no order."""
        return self._groups.values()

    def view(self, query_id: str) -> QueryView:
        """A query as it is now.

        Raises:
            KeyError: It has no row.
        """
        row = self._rows[query_id]
        if row.stale and self._view_of is not None:
            row.known, row.stale = self._view_of(query_id), False
        return row.known

    def known(self, query_id: str) -> QueryView:
        """A query as it was when it was last looked at: the same one, but maybe with fewer tokens.

        Raises:
            KeyError: It has no row.
        """
        return self._rows[query_id].known

    def group_of(self, query_id: str) -> Group:
        """Where a query stands."""
        return self._rows[query_id].group

    def protect(self, limits: PlannerLimits) -> None:
        """Sort all anew if the limits are others."""
        if limits == self._limits:
            return
        views = [self.view(query_id) for query_id in self._rows]
        for query in views:
            self.remove(query.query_id)
        self._limits = limits
        for query in views:
            self.put(query)

    def put(self, query: QueryView) -> None:
        """Take in a query, or what has changed of it."""
        row = self._rows.get(query.query_id)
        if row is not None and _is_other(query, row.known):
            self.remove(query.query_id)
            row = None
        if row is None:
            group = self._group(query.class_order, self._standing(query))
            row = self._rows[query.query_id] = Row(query, group, kv_bytes=0)
            self._join(query.query_id, row, group)
            self.reserved_bytes += query.reserved_bytes
        row.known, row.stale = query, False
        left = query.max_tokens - query.output_tokens
        self._progress(query.query_id, row, left, query.since_admission_tokens, query.kv_bytes)

    def advance(self, query_id: str, *, left_tokens: int, since_admission_tokens: int, kv_bytes: int) -> None:
        """Note that a query has decoded; its view is made when somebody asks for it.

        Args:
            query_id: A query that has a row.
            left_tokens: Tokens it may still emit.
            since_admission_tokens: As in `QueryView`.
            kv_bytes: As in `QueryView`.
        """
        row = self._rows[query_id]
        row.stale = True
        self._progress(query_id, row, left_tokens, since_admission_tokens, kv_bytes)

    def remove(self, query_id: str) -> None:
        """Forget a query; unknown ones are no error."""
        row = self._rows.pop(query_id, None)
        if row is None:
            return
        self._leave(query_id, row)
        self.reserved_bytes -= row.known.reserved_bytes
        self.written_bytes -= row.kv_bytes
        self.ending.discard(query_id)

    # -- inside

    def _progress(self, query_id: str, row: Row, left: int, since: int, kv_bytes: int) -> None:
        self.written_bytes += kv_bytes - row.kv_bytes
        row.kv_bytes = kv_bytes
        if left <= self._limits.prefetch_tokens:
            self.ending.add(query_id)
        elif self.ending:
            self.ending.discard(query_id)
        standing, young = row.group.standing, since < self._limits.quantum_tokens
        if young and standing is Standing.OPEN:
            self._move(query_id, row, Standing.IN_QUANTUM)
        elif not young and standing is Standing.IN_QUANTUM:
            self._move(query_id, row, Standing.OPEN)

    def _standing(self, query: QueryView) -> Standing:
        if not query.preemptible:
            return Standing.KEPT
        if query.parks >= self._limits.max_parks:
            return Standing.CAPPED
        young = query.since_admission_tokens < self._limits.quantum_tokens
        return Standing.IN_QUANTUM if young else Standing.OPEN

    def _group(self, order: int, standing: Standing) -> Group:
        group = self._groups.get((order, standing))
        if group is None:
            group = self._groups[order, standing] = Group(order, standing)
        return group

    def _move(self, query_id: str, row: Row, standing: Standing) -> None:
        self._leave(query_id, row)
        self._join(query_id, row, self._group(row.group.class_order, standing))

    def _join(self, query_id: str, row: Row, group: Group) -> None:
        row.group = group
        group.members[query_id] = row
        group.reserved_bytes += row.known.reserved_bytes

    def _leave(self, query_id: str, row: Row) -> None:
        group = row.group
        del group.members[query_id]
        group.reserved_bytes -= row.known.reserved_bytes
        if not group.members:
            del self._groups[group.class_order, group.standing]


def _is_other(query: QueryView, known: QueryView) -> bool:
    """Whether something has changed that no decoded token changes."""
    return (
        query.reserved_bytes != known.reserved_bytes
        or query.parks != known.parks
        or query.class_order != known.class_order
        or query.preemptible is not known.preemptible
    )
