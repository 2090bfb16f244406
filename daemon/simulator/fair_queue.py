"""The queue without Redis: class, tenant with the smallest counter, job due first, oldest; quotas, late jobs.

A model of `daemon/queue/scripts/` (submit, claim, commit_step, reap, line), held against them by a test that
gives both the same calls. Left out: mending of keys written by hand, hand-backs, dead daemons, counters over
2^43, more than 10,000 tenants in debt. Times are whole milliseconds, as in the scripts.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar
from urllib.parse import quote

from batond.daemon.queue.limits import NO_LIMITS, TenantLimits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

QUEUE_STEP: Final = 2.0**-9  # As in line.lua: who comes at the floor stands behind those who came before.
LOOK_AGAIN_MS: Final = 5000
MINUTE_MS: Final = 60_000
NEVER_MS: Final = 1 << 53

JobT = TypeVar("JobT")


class Spent(NamedTuple):
    """Output tokens of one job in a step."""

    sla_class: str
    tenant: str
    tokens: int


class _Waiting(NamedTuple, Generic[JobT]):
    """Sorted as in a line: due first, then oldest; `seq` differs, so nothing behind it is compared."""

    due_ms: int
    seq: int
    prompt_tokens: int
    job: JobT


class _Class(Generic[JobT]):
    """One class.

    Attributes:
        lines: Waiting jobs by tenant, heaps.
        turns: Counters of tenants that may be served.
        resting: Tenants at a quota, and when to look again, ms.
        accounts: Counters above the floor.
        floor: Where counters begin; None before the first claim.
    """

    def __init__(self) -> None:
        self.lines: dict[str, list[_Waiting[JobT]]] = {}
        self.turns: dict[str, float] = {}
        self.resting: dict[str, int] = {}
        self.accounts: dict[str, float] = {}
        self.floor: float | None = None

    def floor_now(self) -> float:
        return self.floor if self.floor is not None else min(self.turns.values(), default=0.0)

    def counter(self, tenant: str) -> float:
        return max(self.floor_now(), self.accounts.get(tenant, 0.0))

    def give_turn(self, tenant: str) -> None:
        counter, floor = self.counter(tenant), self.floor_now()
        if tenant not in self.turns:
            self.turns[tenant] = counter
            if counter <= floor:
                self.floor = floor + QUEUE_STEP

    def leave(self, tenant: str) -> bool:
        """Take the first of a line; gives whether the tenant has others in it."""
        line = self.lines[tenant]
        heapq.heappop(line)
        if line:
            return True
        del self.lines[tenant]
        self.turns.pop(tenant, None)
        self.resting.pop(tenant, None)
        return False

    def set_counter(self, tenant: str, counter: float) -> None:
        self.accounts[tenant] = counter
        if tenant in self.turns:
            self.turns[tenant] = counter

    def raise_floor(self, chosen: float) -> None:
        floor = self.floor = max(self.floor_now(), chosen)
        self.accounts = {tenant: counter for tenant, counter in self.accounts.items() if counter > floor}


class FairQueue(Generic[JobT]):
    """Waiting jobs of all tenants, shared by all daemons.

    Args:
        limits: Shares and quotas of tenants; weight 1 and no quota where none is named.
        max_queued: Jobs that may wait; 0 is no bound.

    Attributes:
        late: Jobs that failed waiting, until somebody takes them out.
        woken: A tenant left its quota since somebody cleared this: daemons with nothing to do claim at once.
    """

    def __init__(self, limits: Mapping[str, TenantLimits] | None = None, max_queued: int = 0) -> None:
        self._limits = limits or {}
        self._max_queued = max_queued
        self._classes: dict[str, _Class[JobT]] = {}
        self._seqs = count()
        self._waiting: Counter[str] = Counter()
        self._running: Counter[str] = Counter()
        self._minutes: Counter[tuple[str, int]] = Counter()
        self.late: list[JobT] = []
        self.woken = False

    def add(self, sla_class: str, tenant: str, prompt_tokens: int, job: JobT, due_ms: int = NEVER_MS) -> bool:
        """Put a job into its tenant's line; gives False if the queue or the tenant's part of it is full.

        Args:
            sla_class: Its class.
            tenant: Whose.
            prompt_tokens: Charged when it is claimed.
            job: Given back by `claim`, or in `late`.
            due_ms: It fails if it waits until then.
        """
        quota = self._of(tenant).queued
        if 0 < self._max_queued <= self._waiting.total() or 0 < quota <= self._waiting[tenant]:
            return False
        one = self._classes.setdefault(sla_class, _Class())
        waiting = _Waiting(due_ms, next(self._seqs), max(1, prompt_tokens), job)
        heapq.heappush(one.lines.setdefault(tenant, []), waiting)
        self._waiting[tenant] += 1
        if tenant not in one.resting:
            one.give_turn(tenant)
        return True

    def claim(self, sla_class: str, room: int, now_ms: int = 0) -> list[JobT]:
        """Take up to `room` jobs of a class; their prompts are charged."""
        one = self._classes.get(sla_class)
        if one is None:
            return []
        for rested in sorted(one.resting, key=lambda name: (one.resting[name], _member(name))):
            if one.resting[rested] <= now_ms:
                del one.resting[rested]
                one.give_turn(rested)
        taken: list[JobT] = []
        highest = 0.0
        while len(taken) < room and (tenant := self._choose(one, now_ms)) is not None:
            counter, first = one.turns[tenant], one.lines[tenant][0]
            one.leave(tenant)
            self._waiting[tenant] -= 1
            if first.due_ms <= now_ms:
                self.late.append(first.job)
                continue
            one.set_counter(tenant, counter + self._cost(tenant, first.prompt_tokens))
            self._meter(tenant, first.prompt_tokens, now_ms)
            self._running[tenant] += 1
            highest = max(highest, counter)
            taken.append(first.job)
        if taken:
            one.raise_floor(highest)
        return taken

    def commit(self, spent: Iterable[Spent], ended: Iterable[str], now_ms: int = 0) -> None:
        """Charge the output tokens of one step.

        Args:
            spent: Tokens of each job.
            ended: Tenants of claimed jobs that ended in the step, in its order.
            now_ms: The time.
        """
        costs: dict[tuple[str, str], float] = {}
        tokens: Counter[str] = Counter()
        for sla_class, tenant, number in spent:
            key = (sla_class, tenant)
            costs[key] = costs.get(key, 0.0) + self._cost(tenant, number)
            tokens[tenant] += number
        for tenant in ended:
            self._running[tenant] -= 1
            self._wake(tenant)
        for (sla_class, tenant), cost in costs.items():
            one = self._classes[sla_class]
            turn = one.turns.get(tenant)
            one.set_counter(tenant, (one.counter(tenant) if turn is None else turn) + cost)
        for tenant, number in tokens.items():
            self._meter(tenant, number, now_ms)

    def reap(self, now_ms: int) -> None:
        """Fail what is late; forget counters where nobody waits once nothing runs. Done each second."""
        for one in self._classes.values():
            for tenant in list(one.lines):
                while one.lines.get(tenant) and one.lines[tenant][0].due_ms <= now_ms:
                    self.late.append(one.lines[tenant][0].job)
                    one.leave(tenant)
                    self._waiting[tenant] -= 1
            if not one.lines and not self._running.total():
                one.accounts, one.floor = {}, None
        minute = now_ms // MINUTE_MS
        for key in [key for key in self._minutes if key[1] < minute - 1]:
            del self._minutes[key]

    @property
    def has_waiting(self) -> bool:
        """Whether any job waits."""
        return any(one.lines for one in self._classes.values())

    def waiting(self) -> Iterator[tuple[str, str]]:
        """Class and tenant of every line."""
        for name, one in self._classes.items():
            for tenant in one.lines:
                yield name, tenant

    # -- inside

    def _choose(self, one: _Class[JobT], now_ms: int) -> str | None:
        """The tenant to be served; who is at a quota loses the turn."""
        while one.turns:
            tenant = min(one.turns, key=lambda name: (one.turns[name], _member(name)))
            rest_ms = self._rest_until(tenant, now_ms)
            if rest_ms is None:
                return tenant
            del one.turns[tenant]
            one.resting[tenant] = rest_ms
        return None

    def _rest_until(self, tenant: str, now_ms: int) -> int | None:
        limits = self._of(tenant)
        if 0 < limits.running <= self._running[tenant]:
            return now_ms + LOOK_AGAIN_MS
        return self._minute_over(tenant, limits.tokens_per_minute, now_ms)

    def _minute_over(self, tenant: str, most: int, now_ms: int) -> int | None:
        """When a tenant that has used up its minute may go on; the minute slides, see line.lua."""
        minute, into_ms = divmod(now_ms, MINUTE_MS)
        now, before = self._minutes[tenant, minute], self._minutes[tenant, minute - 1]
        if not most or now + before * (1 - into_ms / MINUTE_MS) < most:
            return None
        if now < most:
            return minute * MINUTE_MS + math.floor(MINUTE_MS * (1 - (most - now) / before)) + 1
        return (minute + 1) * MINUTE_MS + math.floor(MINUTE_MS * (1 - most / now)) + 1

    def _meter(self, tenant: str, tokens: int, now_ms: int) -> None:
        if self._of(tenant).tokens_per_minute:
            self._minutes[tenant, now_ms // MINUTE_MS] += tokens

    def _wake(self, tenant: str) -> None:
        for one in self._classes.values():
            if one.resting.pop(tenant, None) is not None:
                one.give_turn(tenant)
                self.woken = True

    def _cost(self, tenant: str, tokens: int) -> float:
        return tokens / self._of(tenant).weight

    def _of(self, tenant: str) -> TenantLimits:
        return self._limits.get(tenant, NO_LIMITS)


@lru_cache(maxsize=1 << 16)
def _member(tenant: str) -> str:
    """What a tenant is called in Redis: equal scores stand in the order of these."""
    return quote(tenant, safe="")
