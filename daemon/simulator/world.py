"""Runs a trace through a fleet: the event that is next in virtual time is always done next."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Final, TypeAlias

from batond.daemon.simulator.engine import Engine, Query
from batond.daemon.simulator.fair_queue import FairQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batond.daemon.simulator.engine import Usage
    from batond.daemon.simulator.setup import Setup
    from batond.daemon.simulator.trace import Request

WINDOW_S: Final = 10.0
#: As in the daemon: without a wake-up it claims so often; late jobs that wait are failed so often.
IDLE_CLAIM_S: Final = 1.0
REAP_EVERY_S: Final = 1.0

TenantLine: TypeAlias = tuple[str, str]  # Class and tenant.


@dataclass(slots=True)
class Window:
    """Ten seconds of the fleet.

    Attributes:
        waiting: Classes and tenants with a query without a row at the end.
        served: Prompt and output tokens by class and tenant.
        output: Output tokens by class and tenant.
    """

    waiting: frozenset[TenantLine] = frozenset()
    served: Counter[TenantLine] = field(default_factory=Counter)
    output: Counter[TenantLine] = field(default_factory=Counter)


@dataclass(slots=True)
class Outcome:
    """What came of a run.

    Attributes:
        policy: Its name.
        setup: What was simulated.
        queries: One a request, in order of arrival.
        windows: From time 0 on, `WINDOW_S` each.
        usage: One a daemon.
        end_s: When the last query ended.
    """

    policy: str
    setup: Setup
    queries: list[Query]
    windows: list[Window]
    usage: list[Usage]
    end_s: float


class World:
    """A queue, daemons, and the requests to come.

    Args:
        setup: What is simulated.
        policy: Name of a registered policy.
        requests: By arrival.
    """

    def __init__(self, setup: Setup, policy: str, requests: Sequence[Request]) -> None:
        self._setup, self._policy = setup, policy
        self._queue: FairQueue[Query] = FairQueue(setup.tenants, setup.max_queued)
        self._dice = random.Random(setup.seed)  # noqa: S311 - noise and ties, no secret
        self._engines = [Engine(setup, policy, self._dice) for _ in range(setup.daemons)]
        self._queries = [self._query(seq, request) for seq, request in enumerate(requests, 1)]
        self._coming = 0
        self._events: list[tuple[float, float, int]] = []
        self._next_s = [math.inf] * setup.daemons
        self._reap_s = 0.0
        self._windows: list[Window] = []

    def run(self, on_done: Callable[[int], None] = lambda _: None) -> Outcome:
        """Run to the end.

        Args:
            on_done: Told, now and then, how many requests have arrived.
        """
        ticks = count()
        for index in range(len(self._engines)):
            self._schedule(index, 0.0)
        while self._events:
            now_s, _, index = heapq.heappop(self._events)
            if self._next_s[index] == now_s:  # Else it was woken earlier.
                self._next_s[index] = math.inf
                self._turn(index, now_s)
            if next(ticks) % 512 == 0:
                on_done(self._coming)
        on_done(self._coming)
        ended = (query.end_s for query in self._queries if not query.refused)
        return Outcome(
            policy=self._policy,
            setup=self._setup,
            queries=self._queries,
            windows=self._windows,
            usage=[engine.usage for engine in self._engines],
            end_s=max(ended, default=0.0),
        )

    def _turn(self, index: int, now_s: float) -> None:
        """What a daemon does between two steps, and its next step."""
        engine = self._engines[index]
        engine.settle(self._queue, now_s)
        self._arrive(now_s)
        self._reap(now_s)
        self._open_windows(now_s)
        engine.claim(self._queue, now_s)
        self._fail_late(now_s)
        next_s = self._next_arrival_s()
        if self._queue.has_waiting:
            next_s = min(next_s, now_s + IDLE_CLAIM_S)
        if not engine.idle:
            end_s = engine.step(now_s, next_s)
            self._record(engine, end_s)
            self._schedule(index, end_s)
        elif next_s < math.inf:
            self._schedule(index, next_s)
        if self._queue.woken:
            self._queue.woken = False
            for other, one in enumerate(self._engines):
                if one.idle and self._next_s[other] > now_s:
                    self._schedule(other, now_s)

    def _schedule(self, index: int, at_s: float) -> None:
        self._next_s[index] = at_s
        heapq.heappush(self._events, (at_s, self._dice.random(), index))

    def _reap(self, now_s: float) -> None:
        if now_s >= self._reap_s:
            self._reap_s = now_s + REAP_EVERY_S
            self._queue.reap(int(now_s * 1000))

    def _fail_late(self, now_s: float) -> None:
        for query in self._queue.late:
            query.fail_late(now_s)
        self._queue.late.clear()

    def _query(self, seq: int, request: Request) -> Query:
        sla, weight = self._setup.classes.get(request.sla_class), self._setup.weight(request.tenant)
        most = max(request.output_tokens, self._setup.max_tokens)
        query = Query(request, sla, seq, weight, max_tokens=most, progress_s=request.arrival_s)
        costs = self._setup.costs
        query.refused = 0 < costs.kv_bytes < (request.prompt_tokens + most) * costs.kv_token_bytes
        return query

    def _next_arrival_s(self) -> float:
        if self._coming == len(self._queries):
            return float("inf")
        return self._queries[self._coming].request.arrival_s

    def _arrive(self, now_s: float) -> None:
        while self._next_arrival_s() <= now_s:
            query = self._queries[self._coming]
            self._coming += 1
            if not query.refused:
                one = query.request
                query.refused = not self._queue.add(
                    one.sla_class, one.tenant, one.prompt_tokens, query, query.due_ms
                )

    def _open_windows(self, now_s: float) -> None:
        while now_s >= WINDOW_S * len(self._windows):
            if self._windows:
                without = {
                    (query.sla.name, query.request.tenant)
                    for engine in self._engines
                    for query in engine.rowless()
                }
                self._windows[-1].waiting = frozenset({*self._queue.waiting(), *without})
            self._windows.append(Window())

    def _record(self, engine: Engine, end_s: float) -> None:
        self._open_windows(end_s)
        window = self._windows[int(end_s // WINDOW_S)]
        for query, prompt, output in engine.emitted:
            window.served[query.sla.name, query.request.tenant] += prompt + output
            window.output[query.sla.name, query.request.tenant] += output


def saturated_s(setup: Setup, requests: Sequence[Request]) -> float:
    """Seconds the fleet takes for all requests when all are there at once, first come first served.

    The number of requests over it is the capacity for this mix; quotas and time limits don't count.
    """
    at_once = [replace(request, arrival_s=0.0, time_limit_s=math.inf) for request in requests]
    return World(setup.unbounded(), "fcfs", at_once).run().end_s
