"""Who gives up a row: the least urgent, as few as possible, or nobody."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

from batond.daemon.scheduler.claims import in_parked_line
from batond.daemon.scheduler.rows import Standing
from batond.policies.base import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from batond.daemon.scheduler.line import Line
    from batond.daemon.scheduler.rows import Group
    from batond.policies.base import QueryView, Rank


@dataclass(frozen=True, slots=True)
class Choice:
    """Victims that make room, or the reason why there are none.

    Attributes:
        victims: Queries to park; empty without `reason` means that there is room already.
        reason: None, or "row", "kv_bytes", "quantum", "park_cap".
    """

    victims: tuple[QueryView, ...] = ()
    reason: str | None = None


@dataclass(slots=True)
class _Pile:
    """Queries a newcomer might take rows from, all of one standing.

    Attributes:
        rows: How many there are.
        nbytes: What they have reserved together.
        whole: Groups that belong to it entirely, the most urgent class first; each stands behind all before.
        others: Queries above a bar, or that the policy was asked about one by one; in no order.
    """

    rows: int = 0
    nbytes: int = 0
    whole: list[Group] = field(default_factory=list)
    others: list[QueryView] = field(default_factory=list)


class VictimPool:
    """The running queries of one planning pass. Ranks only those that may be taken, if any are."""

    def __init__(self, line: Line, now_s: float) -> None:
        self._rows, self._policy, self._victim_bar = line.running, line.policy, line.victim_bar
        self._now_s = now_s
        self._groups: list[Group] | None = None
        self._taken: set[str] = set()
        self._taken_rows: dict[Group, int] = {}
        self._taken_bytes: dict[Group, int] = {}
        self._keys: dict[int, tuple[Rank, int, int]] = {}
        self._refused: dict[tuple[int, bool], str] = {}

    def least_urgent(self, count: int) -> tuple[QueryView, ...]:
        """The `count` least urgent queries, whatever protects them otherwise."""
        everybody = [self._rows.view(query_id) for query_id in self._rows if query_id not in self._taken]
        return tuple(sorted(everybody, key=self._urgency, reverse=True)[:count])

    def less_urgent(self, newcomer: QueryView, *, equals: bool) -> tuple[QueryView, ...]:
        """Whoever `newcomer` is strictly more urgent than (rule 1), the least urgent first.

        Quantum and park cap protect nobody here, only the class does.

        Args:
            newcomer: Has no row.
            equals: Also those behind it that are as urgent.
        """
        may, now_s = self._policy.may_preempt, self._now_s
        place = (self._policy.rank(newcomer, now_s), newcomer.seq)

        def may_be_taken(query: QueryView) -> bool:
            if self._may_take(newcomer, query, None):
                return True
            behind = (self._urgency(query)[0], query.seq) > place
            return equals and behind and not may(query, newcomer, now_s)

        running = [self._rows.view(query_id) for query_id in self._rows]
        taken = [query for query in running if query.preemptible and may_be_taken(query)]
        return tuple(sorted(taken, key=self._urgency, reverse=True))

    def over_limit(
        self,
        nbytes: float,
        rowless: Iterable[QueryView],
        row_step_bytes: int,
        stays: QueryView | None = None,
    ) -> tuple[QueryView, ...]:
        """The least urgent whose KV makes up for `nbytes`, whatever protects them otherwise.

        Args:
            nbytes: What is too much at the end of this step.
            rowless: Who holds KV without a row.
            row_step_bytes: What a row writes in this step; spared too if it is taken.
            stays: Who is not taken, for one must always advance. None is the most urgent that has a row, or
                where nobody has, of those that hold KV.
        """
        running = [self._rows.view(query_id) for query_id in self._rows if query_id not in self._taken]
        # Who is held by hand has no use for it, and goes first.
        holders = sorted((*running, *rowless), key=lambda query: (query.held, self._urgency(query)))
        stays = stays or min(running, key=self._urgency, default=holders[0] if holders else None)
        holders = [query for query in reversed(holders) if query is not stays]
        chosen: list[tuple[QueryView, int]] = []
        freed_bytes = 0
        for query in holders:
            if freed_bytes >= nbytes:
                break
            gives = query.kv_bytes + (row_step_bytes if query.phase is Phase.RUNNING else 0)
            chosen.append((query, gives))
            freed_bytes += gives
        needed = []
        for query, gives in reversed(chosen):  # The most urgent first: who is not needed is spared.
            if freed_bytes - gives >= nbytes:
                freed_bytes -= gives
            else:
                needed.append(query)
        return tuple(reversed(needed))

    def take(self, victims: Iterable[QueryView]) -> None:
        """Forget queries that are parked in this pass."""
        for victim in victims:
            group = self._rows.group_of(victim.query_id)
            self._taken.add(victim.query_id)
            self._taken_rows[group] = self._taken_rows.get(group, 0) + 1
            self._taken_bytes[group] = self._taken_bytes.get(group, 0) + victim.reserved_bytes

    def choose(self, newcomer: QueryView, rows: int, nbytes: float) -> Choice:
        """Choose a set that frees at least `rows` rows and `nbytes` bytes, and from which none can be spared.

        A claim that was refused speaks for the claims of its class behind it: they are not more urgent, and
        must not overtake it by being smaller. That also keeps a pass linear in the number of claims.
        """
        key = (newcomer.class_order, in_parked_line(newcomer))
        refused = self._refused.get(key)
        if refused is not None:
            return Choice(reason=refused)
        choice = self._choose(newcomer, rows, nbytes)
        if choice.reason is not None:
            self._refused[key] = choice.reason
        return choice

    def refuses(self, class_order: int, *, parked: bool) -> bool:
        """Whether claims of a class were refused in this pass."""
        return (class_order, parked) in self._refused

    def _choose(self, newcomer: QueryView, rows: int, nbytes: float) -> Choice:
        piles = self._piles(newcomer)
        found_rows = found_bytes = 0
        for standing, reason in (
            (Standing.OPEN, None),
            (Standing.IN_QUANTUM, "quantum"),
            (Standing.CAPPED, "park_cap"),
        ):
            found_rows += piles[standing].rows
            found_bytes += piles[standing].nbytes
            if found_rows >= rows and found_bytes >= nbytes:
                if reason is not None:
                    return Choice(reason=reason)
                return Choice(victims=self._fewest(piles[standing], rows, nbytes))
        return Choice(reason="row" if found_rows < rows else "kv_bytes")

    def _piles(self, newcomer: QueryView) -> tuple[_Pile, _Pile, _Pile]:
        """Those `newcomer` is strictly more urgent than (rule 1), by standing."""
        piles = _Pile(), _Pile(), _Pile()
        if self._groups is None:
            groups = (group for group in self._rows.groups if group.standing is not Standing.KEPT)
            self._groups = sorted(groups, key=attrgetter("class_order"))
        for group in self._groups:
            pile = piles[group.standing]
            bar = self._victim_bar(newcomer, group.class_order, self._now_s) if self._victim_bar else None
            if bar == -math.inf:
                pile.rows += len(group.members) - self._taken_rows.get(group, 0)
                pile.nbytes += group.reserved_bytes - self._taken_bytes.get(group, 0)
                pile.whole.append(group)
            elif bar is None or bar < math.inf:
                less_urgent = [query for query in self._left(group) if self._may_take(newcomer, query, bar)]
                pile.rows += len(less_urgent)
                pile.nbytes += sum(query.reserved_bytes for query in less_urgent)
                pile.others += less_urgent
        return piles

    def _left(self, group: Group) -> Iterator[QueryView]:
        view, taken = self._rows.view, self._taken
        return (view(query_id) for query_id in group.members if query_id not in taken)

    def _may_take(self, newcomer: QueryView, victim: QueryView, bar: float | None) -> bool:
        if bar is not None:
            return self._urgency(victim)[0][0] > bar
        # Rule 1 holds for careless policies too: who would pre-empt each other are equals.
        may, now_s = self._policy.may_preempt, self._now_s
        return may(newcomer, victim, now_s) and not may(victim, newcomer, now_s)

    def _fewest(self, pile: _Pile, rows: int, nbytes: float) -> tuple[QueryView, ...]:
        """The least urgent that suffice together, without those that can be spared."""
        chosen: list[QueryView] = []
        freed_bytes = 0
        for victims in (*map(self._left, reversed(pile.whole)), pile.others):
            if rows <= 1 and nbytes <= 0:
                least = max(victims, key=self._urgency, default=None)
                if least is not None:
                    return (least,)
                continue
            for victim in sorted(victims, key=self._urgency, reverse=True):
                chosen.append(victim)
                freed_bytes += victim.reserved_bytes
                if len(chosen) >= rows and freed_bytes >= nbytes:
                    return _minimal(chosen, rows, nbytes)
        return _minimal(chosen, rows, nbytes)

    def _urgency(self, query: QueryView) -> tuple[Rank, int, int]:
        # Among equals the one that decoded least since its admission has least to lose; then the latest.
        key = self._keys.get(query.seq)
        if key is None:
            rank = self._policy.rank(query, self._now_s)
            key = self._keys[query.seq] = (rank, -query.since_admission_tokens, query.seq)
        return key


def _minimal(victims: Sequence[QueryView], rows: int, nbytes: float) -> tuple[QueryView, ...]:
    """Spare the most urgent ones that are not needed; `victims` has the least urgent first."""
    spare_rows = len(victims) - rows
    spare_bytes = sum(victim.reserved_bytes for victim in victims) - nbytes
    chosen = []
    for victim in reversed(victims):
        if spare_rows > 0 and spare_bytes >= victim.reserved_bytes:
            spare_rows -= 1
            spare_bytes -= victim.reserved_bytes
        else:
            chosen.append(victim)
    return tuple(reversed(chosen))
