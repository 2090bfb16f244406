"""The queue's order without Redis: class, tenant with the smallest counter, arrival.

A model of `daemon/queue/scripts/line.lua` and `claim.lua` without due times and quotas.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

QUEUE_STEP: Final = 2.0**-9  # As in line.lua: who comes at the floor stands behind those who came before.

JobT = TypeVar("JobT")


class _Class(Generic[JobT]):
    def __init__(self) -> None:
        self.lines: dict[str, deque[tuple[int, JobT]]] = {}  # By tenant: prompt tokens, job.
        self.turns: dict[str, float] = {}
        self.accounts: dict[str, float] = {}
        self.floor: float | None = None

    def floor_now(self) -> float:
        return self.floor if self.floor is not None else min(self.turns.values(), default=0.0)

    def counter(self, tenant: str) -> float:
        return max(self.floor_now(), self.accounts.get(tenant, 0.0))


class FairQueue(Generic[JobT]):
    """Waiting jobs of all tenants, shared by all daemons.

    Args:
        weights: Shares of tenants; 1 where none is named.
    """

    def __init__(self, weights: dict[str, float] | None = None) -> None:
        self._weights = weights or {}
        self._classes: dict[str, _Class[JobT]] = {}

    def add(self, sla_class: str, tenant: str, prompt_tokens: int, job: JobT) -> None:
        """Put a job at the end of its tenant's line."""
        one = self._classes.setdefault(sla_class, _Class())
        one.lines.setdefault(tenant, deque()).append((prompt_tokens, job))
        if tenant not in one.turns:
            counter, floor = one.counter(tenant), one.floor_now()
            one.turns[tenant] = counter
            if counter <= floor:
                one.floor = floor + QUEUE_STEP

    def claim(self, sla_class: str, room: int) -> Iterator[JobT]:
        """Take up to `room` jobs of a class; their prompts are charged."""
        one = self._classes.get(sla_class)
        if one is None:
            return
        highest = None
        for _ in range(room):
            if not one.turns:
                break
            counter, tenant = min((counter, tenant) for tenant, counter in one.turns.items())
            highest = counter if highest is None else max(highest, counter)
            line = one.lines[tenant]
            prompt_tokens, job = line.popleft()
            one.accounts[tenant] = counter + prompt_tokens / self._weight(tenant)
            if line:
                one.turns[tenant] = one.accounts[tenant]
            else:
                del one.lines[tenant], one.turns[tenant]
            yield job
        if highest is not None:
            floor = one.floor = max(one.floor_now(), highest)
            one.accounts = {name: value for name, value in one.accounts.items() if value > floor}

    def charge(self, sla_class: str, tenant: str, output_tokens: int) -> None:
        """Charge tokens that were committed."""
        one = self._classes[sla_class]
        turn = one.turns.get(tenant)
        counter = one.counter(tenant) if turn is None else turn
        one.accounts[tenant] = counter + output_tokens / self._weight(tenant)
        if turn is not None:
            one.turns[tenant] = one.accounts[tenant]

    def waiting(self) -> Iterator[tuple[str, str]]:
        """Class and tenant of every line."""
        for name, one in self._classes.items():
            for tenant in one.lines:
                yield name, tenant

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)
