"""Factory of query views, and a small engine without tensors that runs the real planner under a policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

import pytest

from batond.daemon.scheduler.line import Line
from batond.daemon.scheduler.plan import BatchView, ParkMode, Plan
from batond.daemon.scheduler.planner import Planner, PlannerLimits
from batond.policies.base import Phase, QueryView, TracksEnds
from batond.policies.classes import DEFAULT_CLASSES

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.policies.base import Policy


@pytest.fixture
def make_query() -> Callable[..., QueryView]:
    """Return a factory of waiting standard queries, each later than the one before."""
    numbers = count(1)

    def make(**changes: object) -> QueryView:
        number = next(numbers)
        values: dict[str, object] = {
            "query_id": f"q{number}",
            "tenant": "t0",
            "sla_class": "standard",
            "class_order": 1,
            "preemptible": True,
            "arrival_s": float(number),
            "seq": number,
            "phase": Phase.WAITING,
            "prompt_tokens": 8,
            "prefilled_tokens": 0,
            "output_tokens": 0,
            "max_tokens": 16,
        }
        return QueryView(**(values | changes))

    return make


@dataclass(slots=True)
class SimulatedQuery:
    """A query of the simulation; it ends after `length` tokens, which policies can't see."""

    view: QueryView
    length: int
    first_row_s: float | None = None
    first_token_s: float | None = None
    finish_s: float | None = None


class Simulation:
    """Does the planner's plans as the engine does: chunks, parks, rows, one token for every row.

    A step takes `step_s`, whatever it computes; KV is without bound.
    Policies are told what the engine tells.
    """

    def __init__(
        self,
        policy: Policy,
        rows: int,
        *,
        limits: PlannerLimits | None = None,
        chunk_tokens: int | None = None,
        ready_limit: int = 1,
        step_s: float = 0.01,
    ) -> None:
        self.policy = policy
        self.rows = rows
        self.chunk_tokens = chunk_tokens
        self.ready_limit = ready_limit
        self.step_s = step_s
        self.now_s = 0.0
        self.park_count = 0
        self.live: dict[str, SimulatedQuery] = {}
        self.ended: dict[str, SimulatedQuery] = {}
        self.tokens: dict[str, int] = {}  # Computed for a tenant, prompts included.
        self._planner = Planner(policy, limits or PlannerLimits())
        self._line = Line(policy)
        self._numbers = count(1)
        self._park_seq = count(1)

    def submit(
        self,
        sla: str = "standard",
        prompt: int = 8,
        length: int = 16,
        *,
        max_tokens: int | None = None,
        tenant: str = "t0",
        **more: object,
    ) -> str:
        """Add a query of a default class; its id is returned."""
        number = next(self._numbers)
        order, found = next((n, found) for n, found in enumerate(DEFAULT_CLASSES) if found.name == sla)
        values: dict[str, object] = {
            "query_id": f"{sla}{number}",
            "tenant": tenant,
            "sla_class": sla,
            "class_order": order,
            "preemptible": found.preemptible,
            "arrival_s": self.now_s,
            "seq": number,
            "phase": Phase.WAITING,
            "prompt_tokens": prompt,
            "prefilled_tokens": 0,
            "output_tokens": 0,
            "max_tokens": max_tokens or length,
            "to_prefill_tokens": prompt,
            "ttft_target_s": found.ttft_target_s,
            "tpot_target_s": found.tpot_target_s,
        }
        view = QueryView(**(values | more))
        self.live[view.query_id] = SimulatedQuery(view, length)
        self._line.put(view)
        return view.query_id

    def step(self) -> Plan:
        """One step of the engine."""
        view = BatchView(
            now_s=self.now_s,
            rows=self.rows,
            queries=(),
            chunk_tokens=self.chunk_tokens,
            ready_limit=self.ready_limit,
            host_free_bytes=1 << 40,
        )
        plan = self._planner.plan(view, self._line)
        self.now_s += self.step_s
        self._compute_chunks(plan)
        for order in plan.park:
            assert order.mode is ParkMode.OFFLOAD
            self._park(order.query_id)
        for query_id in (*plan.resume, *plan.admit):
            self._give_row(query_id)
        for query in [query for query in self.live.values() if query.view.phase is Phase.RUNNING]:
            self.policy.on_tokens(query.view, 0, 1)
            self._emit(query, since_admission_tokens=query.view.since_admission_tokens + 1)
        return plan

    def run(self, most_steps: int, arrive: Callable[[], bool] = lambda: False) -> None:
        """Step until nothing is left and `arrive`, called before each step, says that nothing will come."""
        for _ in range(most_steps):
            more = arrive()
            if not (self.live or more):
                return
            self.step()
        pytest.fail(f"{len(self.live)} queries are left after {most_steps} steps")

    def cancel(self, query_id: str) -> None:
        """End a query before its time."""
        self._end(self.live[query_id])

    def mean_completion_s(self) -> float:
        """Mean time from arrival to the last token of all that ended."""
        times = [query.finish_s - query.view.arrival_s for query in self.ended.values() if query.finish_s]
        return sum(times) / len(times)

    def _compute_chunks(self, plan: Plan) -> None:
        for chunk in plan.chunks:
            query = self.live[chunk.query_id]
            view = query.view
            self.policy.on_tokens(view, chunk.tokens, 0)
            self._count(query, chunk.tokens)
            changes = {
                "prefilled_tokens": view.prefilled_tokens + chunk.tokens,
                "to_prefill_tokens": view.to_prefill_tokens - chunk.tokens,
            }
            if chunk.last:
                self._emit(query, phase=Phase.READY, **changes)
            else:
                self._change(query, phase=Phase.PREFILLING, **changes)

    def _park(self, query_id: str) -> None:
        query = self.live[query_id]
        assert query.view.phase is Phase.RUNNING
        self.park_count += 1
        parks = query.view.parks + 1
        self._change(query, phase=Phase.PARKED, parks=parks, park_seq=next(self._park_seq))

    def _give_row(self, query_id: str) -> None:
        query = self.live.get(query_id)
        if query is None:
            return  # It ended with its prefill.
        if query.first_row_s is None:
            query.first_row_s = self.now_s
        self._change(query, phase=Phase.RUNNING, park_seq=0, since_admission_tokens=0)

    def _change(self, query: SimulatedQuery, **changes: object) -> None:
        query.view = replace(query.view, **changes)
        self._line.put(query.view)

    def _emit(self, query: SimulatedQuery, **changes: object) -> None:
        if query.first_token_s is None:
            query.first_token_s = self.now_s
        self._change(query, output_tokens=query.view.output_tokens + 1, **changes)
        self._count(query, 1)
        if query.view.output_tokens == query.length:
            query.finish_s = self.now_s
            self._end(query)

    def _end(self, query: SimulatedQuery) -> None:
        self.ended[query.view.query_id] = self.live.pop(query.view.query_id)
        self._line.remove(query.view.query_id)
        if isinstance(self.policy, TracksEnds):
            self.policy.on_end(query.view)

    def _count(self, query: SimulatedQuery, tokens: int) -> None:
        self.tokens[query.view.tenant] = self.tokens.get(query.view.tenant, 0) + tokens


@pytest.fixture
def simulation() -> type[Simulation]:
    """Return the class of the simulation."""
    return Simulation
