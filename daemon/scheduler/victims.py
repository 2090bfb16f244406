"""Who gives up a row: the least urgent, as few as possible, or nobody."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batond.daemon.scheduler.claims import in_parked_line

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from batond.policies.base import Policy, QueryView, Rank


@dataclass(frozen=True, slots=True)
class PlannerLimits:
    """Protection of running queries, the same under every policy.

    Attributes:
        quantum_tokens: Tokens a query decodes after each admission before it may be parked (rule 4).
        max_parks: A query parked so often by the planner is not pre-empted any more (rule 3).
        prefetch_tokens: A row counts as coming free when its query may emit at most so many tokens more.
    """

    quantum_tokens: int = 16
    max_parks: int = 8
    prefetch_tokens: int = 2


@dataclass(frozen=True, slots=True)
class Choice:
    """Victims that make room, or the reason why there are none.

    Attributes:
        victims: Queries to park; empty without `reason` means that there is room already.
        reason: None, or "row", "kv_bytes", "quantum", "park_cap".
    """

    victims: tuple[QueryView, ...] = ()
    reason: str | None = None


class VictimPool:
    """The running queries of one planning pass. Ranks only those that may be taken, if any are."""

    def __init__(
        self, running: Collection[QueryView], policy: Policy, limits: PlannerLimits, now_s: float
    ) -> None:
        self._running = list(running)
        self._policy = policy
        self._limits = limits
        self._now_s = now_s
        self._keys: dict[int, tuple[Rank, int, int]] = {}
        self._refused: dict[tuple[int, bool], str] = {}

    def least_urgent(self, count: int) -> tuple[QueryView, ...]:
        """The `count` least urgent queries, whatever protects them otherwise."""
        return tuple(sorted(self._running, key=self._urgency, reverse=True)[:count])

    def take(self, victims: Iterable[QueryView]) -> None:
        """Forget queries that are parked in this pass."""
        gone = {victim.query_id for victim in victims}
        self._running = [query for query in self._running if query.query_id not in gone]

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
        eligible: list[QueryView] = []
        in_quantum: list[QueryView] = []
        capped: list[QueryView] = []
        may, now_s, limits = self._policy.may_preempt, self._now_s, self._limits
        for victim in self._running:
            # Rule 1 holds for careless policies too: who would pre-empt each other are equals.
            if not victim.preemptible or not may(newcomer, victim, now_s) or may(victim, newcomer, now_s):
                continue
            if victim.parks >= limits.max_parks:
                capped.append(victim)
            elif victim.since_admission_tokens < limits.quantum_tokens:
                in_quantum.append(victim)
            else:
                eligible.append(victim)
        if _suffices(eligible, rows, nbytes):
            return Choice(victims=self._fewest(eligible, rows, nbytes))
        if _suffices(eligible + in_quantum, rows, nbytes):
            return Choice(reason="quantum")
        if _suffices(eligible + in_quantum + capped, rows, nbytes):
            return Choice(reason="park_cap")
        no_row = len(eligible) + len(in_quantum) + len(capped) < rows
        return Choice(reason="row" if no_row else "kv_bytes")

    def _fewest(self, eligible: list[QueryView], rows: int, nbytes: float) -> tuple[QueryView, ...]:
        """The least urgent that suffice together, without those that can be spared."""
        if rows <= 1 and nbytes <= 0:
            return (max(eligible, key=self._urgency),)
        chosen = []
        freed_bytes = 0
        for victim in sorted(eligible, key=self._urgency, reverse=True):
            chosen.append(victim)
            freed_bytes += victim.reserved_bytes
            if len(chosen) >= rows and freed_bytes >= nbytes:
                break
        return _minimal(chosen, rows, nbytes)

    def _urgency(self, query: QueryView) -> tuple[Rank, int, int]:
        # Among equals the one that decoded least since its admission has least to lose; then the latest.
        key = self._keys.get(query.seq)
        if key is None:
            rank = self._policy.rank(query, self._now_s)
            key = self._keys[query.seq] = (rank, -query.since_admission_tokens, query.seq)
        return key


def _suffices(victims: Sequence[QueryView], rows: int, nbytes: float) -> bool:
    return len(victims) >= rows and sum(victim.reserved_bytes for victim in victims) >= nbytes


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
