"""Factories of views, a check of plans against the contract, and a small pure engine that executes them.

Longer than 400 lines: in importlib mode tests share code through conftest only; the engine checks every plan.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING

import pytest

from batond.daemon.scheduler.claims import ends_with_prefill, holds_device_bytes, needed_bytes
from batond.daemon.scheduler.expected import raised
from batond.daemon.scheduler.plan import BatchView, Gate, ParkMode, Plan
from batond.daemon.scheduler.planner import Planner, PlannerLimits
from batond.policies.base import Phase, QueryView
from batond.policies.priority import Priority

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.policies.base import Policy

CLASSES = {"interactive": (0, False), "standard": (1, True), "batch": (2, True)}


class Views:
    """Makes query views, one byte a token, each later than the one before."""

    def __init__(self) -> None:
        self._numbers = count(1)

    def waiting(
        self, sla: str = "standard", prompt: int = 8, max_tokens: int = 100, **more: object
    ) -> QueryView:
        """Nothing of the prompt is computed."""
        number = next(self._numbers)
        order, preemptible = CLASSES[sla]
        values: dict[str, object] = {
            "query_id": f"{sla}{number}",
            "tenant": "t0",
            "sla_class": sla,
            "class_order": order,
            "preemptible": preemptible,
            "arrival_s": float(number),
            "seq": number,
            "phase": Phase.WAITING,
            "prompt_tokens": prompt,
            "prefilled_tokens": 0,
            "output_tokens": 0,
            "max_tokens": max_tokens,
            "reserved_bytes": prompt + max_tokens,
            "to_prefill_tokens": prompt,
        }
        return QueryView(**(values | more))

    def prefilling(self, sla: str = "standard", prompt: int = 8, done: int = 4, **more: object) -> QueryView:
        """Part of the prompt is computed."""
        values = {
            "phase": Phase.PREFILLING,
            "prefilled_tokens": done,
            "to_prefill_tokens": prompt - done,
            "kv_bytes": done,
        }
        return self.waiting(sla, prompt, **(values | more))

    def ready(self, sla: str = "standard", prompt: int = 8, **more: object) -> QueryView:
        """Prefilled, without a row."""
        values = {"phase": Phase.READY, "output_tokens": 1, "to_prefill_tokens": 0, "kv_bytes": prompt}
        return self.waiting(sla, prompt, **(values | more))

    def running(self, sla: str = "standard", prompt: int = 8, since: int = 50, **more: object) -> QueryView:
        """Has a row since `since` tokens."""
        values = {
            "phase": Phase.RUNNING,
            "output_tokens": since + 1,
            "to_prefill_tokens": 0,
            "since_admission_tokens": since,
            "kv_bytes": prompt + since,
            "park_bytes": prompt + since,
        }
        return self.waiting(sla, prompt, **(values | more))

    def parked(self, sla: str = "standard", prompt: int = 8, park_seq: int = 1, **more: object) -> QueryView:
        """Parked with its KV in the host pool."""
        values = {
            "phase": Phase.PARKED,
            "output_tokens": 20,
            "to_prefill_tokens": 0,
            "park_seq": park_seq,
            "parks": 1,
        }
        return self.waiting(sla, prompt, **(values | more))

    def dropped(self, sla: str = "standard", prompt: int = 8, **more: object) -> QueryView:
        """Parked without a copy of its KV."""
        return self.parked(sla, prompt, **({"to_prefill_tokens": prompt + 20} | more))


@pytest.fixture
def views() -> Views:
    """Return a factory of query views."""
    return Views()


@pytest.fixture
def plan() -> Callable[..., Plan]:
    """Plan one checked step: `plan(rows, *queries, policy=, limits=, **fields of BatchView)`."""

    def run(
        rows: int,
        *queries: QueryView,
        policy: Policy | None = None,
        limits: PlannerLimits | None = None,
        **fields: object,
    ) -> Plan:
        planner = Planner(policy or Priority(), limits or PlannerLimits())
        fields = {
            "now_s": 100.0 if queries else 0.0,
            "host_free_bytes": 1 << 40,
            "chunk_tokens": None,
        } | fields
        view = BatchView(rows=rows, queries=queries, **fields)
        result = planner.plan(view)
        check(view, result, planner.policy, limits or PlannerLimits())
        return result

    return run


@pytest.fixture
def check_plan() -> Callable[..., None]:
    """Return the check of a plan against its view: `check_plan(view, plan, policy, limits)`."""
    return check


def check(view: BatchView, plan: Plan, policy: Policy, limits: PlannerLimits) -> None:
    """Assert everything that must hold for every plan, whatever the policy."""
    by_id = {query.query_id: query for query in view.queries}
    last = {chunk.query_id for chunk in plan.chunks if chunk.last}
    parked = [order.query_id for order in plan.park]
    given = [*plan.resume, *plan.admit]
    assert max(Counter(parked + given).values(), default=1) == 1, "S4: a query is in two lists"
    assert max(Counter(chunk.query_id for chunk in plan.chunks).values(), default=1) == 1
    check_chunks(view, plan, by_id)
    check_limit(view, plan, by_id)
    for order in plan.park:
        assert by_id[order.query_id].phase is Phase.RUNNING or order.cause == "kv_limit"
    for query_id in plan.resume:
        query = by_id[query_id]
        assert query.phase is Phase.PARKED
        assert query.to_prefill_tokens == 0
        assert not query.held
    for query_id in plan.admit:
        query = by_id[query_id]
        assert query.phase is Phase.READY or query_id in last
        assert not query.held
        assert not ends_with_prefill(query)
    running = sum(query.phase is Phase.RUNNING for query in view.queries)
    assert running - len(parked) + len(given) <= max(view.rows, 0)
    need = sum(max(0, needed_bytes(by_id[query_id])) for query_id in given)
    if view.kv_free_bytes is not None and need and not is_alone(view, plan):
        assert need <= view.kv_free_bytes + sum(taken_bytes(by_id[query_id]) for query_id in parked)
    check_parks(view, plan, by_id, policy, limits)
    assert len(plan.blocked) <= 8
    blocked = {query_id for query_id, reason in plan.blocked.items() if reason != "held"}
    assert not blocked & (set(given) | set(parked))


def taken_bytes(query: QueryView) -> int:
    """What a query is counted for in `kv_free_bytes`."""
    return query.reserved_bytes if query.phase is Phase.RUNNING else query.kv_bytes


def is_alone(view: BatchView, plan: Plan) -> bool:
    """Whether a plan serves one query where nobody runs: it may go over the budget (rule 7)."""
    served = {*(chunk.query_id for chunk in plan.chunks), *plan.resume, *plan.admit}
    idle = not any(query.phase is Phase.RUNNING for query in view.queries)
    return idle and len(served) == 1 and not plan.park


def check_limit(view: BatchView, plan: Plan, by_id: dict[str, QueryView]) -> None:
    """Assert that bytes above the budget are given back, no query for nothing, and that one is left."""
    shed = [by_id[order.query_id] for order in plan.park if order.cause == "kv_limit"]
    if view.kv_free_bytes is None:
        assert not shed
        return
    budget = view.kv_free_bytes + sum(map(taken_bytes, view.queries))
    gone = {order.query_id for order in plan.park if order.cause in {"row_limit", "kv_limit"}}
    left = [query for query in view.queries if query.query_id not in gone and holds_device_bytes(query)]
    running = [query for query in left if query.phase is Phase.RUNNING]
    written = sum(query.kv_bytes for query in left) + view.row_step_bytes * len(running)
    assert written <= budget or len(left) <= 1 or len(running) == 1
    if any(query.phase is Phase.RUNNING for query in shed):
        assert running, "the last running query was parked for the limit"
    if running:  # Where nobody ran, a single one may have got more than there is.
        for query in shed:
            step = view.row_step_bytes if query.phase is Phase.RUNNING else 0
            assert written + query.kv_bytes + step > budget, f"{query.query_id} was parked for nothing"
    if shed:
        assert not plan.chunks, "chunks come before parks, and there is no room"


def check_chunks(view: BatchView, plan: Plan, by_id: dict[str, QueryView]) -> None:
    """Assert that chunks fit the budget of tokens, and the bytes there are before rows are taken."""
    written = 0
    for chunk in plan.chunks:
        query = by_id[chunk.query_id]
        assert query.phase is not Phase.RUNNING
        assert not query.held
        assert 1 <= chunk.tokens <= query.to_prefill_tokens
        assert chunk.last == (chunk.tokens == query.to_prefill_tokens)
        if view.fixed_chunks and view.chunk_tokens is not None:
            end = query.prefilled_tokens + chunk.tokens
            assert chunk.tokens <= view.chunk_tokens
            assert chunk.last or end % view.chunk_tokens == 0, "a chunk ends off the grid"
        written += chunk.tokens
    if view.chunk_tokens is not None:
        assert written <= view.chunk_tokens
    if view.kv_free_bytes is not None and written and not is_alone(view, plan):
        running = [query for query in view.queries if query.phase is Phase.RUNNING]
        # Here a token is a byte.
        assert written <= view.kv_free_bytes + sum(query.reserved_bytes - query.kv_bytes for query in running)


def check_parks(
    view: BatchView, plan: Plan, by_id: dict[str, QueryView], policy: Policy, limits: PlannerLimits
) -> None:
    """Assert that victims may be taken, for somebody, and go to the host pool while it lasts."""
    host_bytes = 0 if view.recompute_only else view.host_free_bytes
    given = {*plan.resume, *plan.admit}
    for order in plan.park:
        victim = by_id[order.query_id]
        fits = victim.park_bytes <= host_bytes and not view.recompute_only
        assert order.mode is (ParkMode.OFFLOAD if fits else ParkMode.RECOMPUTE)
        host_bytes -= victim.park_bytes if fits else 0
        if order.cause in {"row_limit", "kv_limit"}:
            assert order.for_query_id == ""
            assert not order.preempts
            continue
        assert order.preempts
        newcomer = by_id[order.for_query_id]
        assert view.gate is Gate.ITERATION
        assert order.cause in {"row", "kv_bytes"}
        assert order.for_query_id in given or order.cause == "kv_bytes" or view.kv_free_bytes is not None
        assert policy.may_preempt(newcomer, victim, view.now_s)
        assert not policy.may_preempt(victim, newcomer, view.now_s)
        assert victim.preemptible
        assert victim.since_admission_tokens >= limits.quantum_tokens
        assert victim.parks < limits.max_parks


@dataclass
class FakeQuery:
    """A query of the fake engine; one byte of KV a token."""

    view: QueryView
    cached_tokens: int = 0
    in_host_pool: bool = False
    limit_parks: int = 0
    output_tokens: int = 0
    reserved_tokens: int = 0
    history: list[str] = field(default_factory=list)
    computed_prompt_tokens: int = 0
    first_row_step: int | None = None
    first_token_step: int | None = None


class FakeEngine:
    """Executes plans as the engine does: chunks, park, resume and admit, one token for every row."""

    def __init__(
        self,
        policy: Policy,
        rows: int,
        limits: PlannerLimits | None = None,
        *,
        kv_bytes: int | None = None,
        host_bytes: int = 1 << 30,
        step_s: float = 0.01,
        expects: int | None = None,
        **fields: object,
    ) -> None:
        self.limits = limits or PlannerLimits()
        self.planner = Planner(policy, self.limits)
        self.rows = rows
        self.kv_bytes = kv_bytes
        self.host_bytes = host_bytes
        self.step_s = step_s
        self.expects = expects
        self.fields: dict[str, object] = {"chunk_tokens": None} | fields
        self.live: dict[str, FakeQuery] = {}
        self.finished: dict[str, FakeQuery] = {}
        self.now_s = 0.0
        self.steps = 0
        self.park_count = 0
        self.idle_row_steps = 0
        self.written_bytes = 0
        self.submitted = 0
        self._park_seq = count(1)

    def submit(
        self,
        sla: str,
        prompt: int,
        max_tokens: int,
        arrival_s: float | None = None,
        query_id: str = "",
        *,
        output_tokens: int | None = None,
    ) -> str:
        """Add a query that stops by itself after `output_tokens`; its id is returned."""
        self.submitted += 1
        order, preemptible = CLASSES[sla]
        query_id = query_id or f"{sla}{self.submitted}"
        reserved = max_tokens if self.expects is None else min(self.expects, max_tokens)
        self.live[query_id] = FakeQuery(
            QueryView(
                query_id=query_id,
                tenant="t0",
                sla_class=sla,
                class_order=order,
                preemptible=preemptible,
                arrival_s=self.now_s if arrival_s is None else arrival_s,
                seq=self.submitted,
                phase=Phase.WAITING,
                prompt_tokens=prompt,
                prefilled_tokens=0,
                output_tokens=0,
                max_tokens=max_tokens,
                reserved_bytes=prompt + reserved,
                to_prefill_tokens=prompt,
            ),
            output_tokens=output_tokens or max_tokens,
            reserved_tokens=reserved,
        )
        return query_id

    def view(self) -> BatchView:
        """Show the engine as the planner sees it."""
        queries = tuple(query.view for query in self.live.values())
        free = None
        if self.kv_bytes is not None:
            free = self.kv_bytes - sum(
                view.reserved_bytes if view.phase is Phase.RUNNING else view.kv_bytes for view in queries
            )
        used = sum(query.cached_tokens for query in self.live.values() if query.in_host_pool)
        return BatchView(
            now_s=self.now_s,
            rows=self.rows,
            queries=queries,
            kv_free_bytes=free,
            host_free_bytes=self.host_bytes - used,
            row_step_bytes=1,
            **self.fields,
        )

    def step(self) -> Plan:
        """One step; every plan is checked, and every row that was not parked gets exactly one token."""
        view = self.view()
        plan = self.planner.plan(view)
        check(view, plan, self.planner.policy, self.limits)
        before = {q.query_id: q.output_tokens for q in view.queries if q.phase is Phase.RUNNING}
        waiting = any(query.phase is not Phase.RUNNING and not query.held for query in view.queries)
        self._do_chunks(plan)
        for order in plan.park:
            self._park(order.query_id, order.mode, order.cause, planner=order.preempts)
        for query_id in (*plan.resume, *plan.admit):
            self._give_row(query_id)
        rows = [query for query in self.live.values() if query.view.phase is Phase.RUNNING]
        if waiting:
            self.idle_row_steps += self.rows - len(rows)
        for query in rows:
            query.cached_tokens += 1
        self._check_written()
        for query in rows:
            self._emit(query, since_admission_tokens=query.view.since_admission_tokens + 1)
        for query_id, tokens in before.items():
            one = 0 if query_id in {order.query_id for order in plan.park} else 1
            assert (self.live.get(query_id) or self.finished[query_id]).view.output_tokens == tokens + one
        assert len(self.live) + len(self.finished) == self.submitted
        self.steps += 1
        self.now_s += self.step_s
        return plan

    def _check_written(self) -> None:
        """Assert that memory holds what it may at the end of a step; a single query may go beyond."""
        holders = [query for query in self.live.values() if query.cached_tokens and not query.in_host_pool]
        self.written_bytes = sum(query.cached_tokens for query in holders)
        assert self.kv_bytes is None or self.written_bytes <= self.kv_bytes or len(holders) <= 1

    def run(self, most_steps: int) -> None:
        """Step until all are finished; fails if it takes longer."""
        for _ in range(most_steps):
            if not self.live:
                return
            self.step()
        assert not self.live, f"{len(self.live)} queries are not finished after {most_steps} steps"

    def hold(self, query_id: str) -> None:
        """Park by hand, as the engine does on request."""
        query = self.live[query_id]
        if query.view.phase is Phase.RUNNING:
            self._park(query_id, ParkMode.OFFLOAD, "manual", planner=False)
        query.view = replace(query.view, held=True)

    def release(self, query_id: str) -> None:
        """Let the planner resume a query parked by hand."""
        self.live[query_id].view = replace(self.live[query_id].view, held=False)

    def cancel(self, query_id: str) -> None:
        """Forget a query in whatever phase."""
        self.finished[query_id] = self.live.pop(query_id)

    def phase(self, query_id: str) -> Phase | None:
        """Phase of a query; None once it is finished."""
        return self.live[query_id].view.phase if query_id in self.live else None

    def _do_chunks(self, plan: Plan) -> None:
        for chunk in plan.chunks:
            query = self.live[chunk.query_id]
            query.in_host_pool = False
            query.computed_prompt_tokens += chunk.tokens
            query.cached_tokens += chunk.tokens
            parked = query.view.phase is Phase.PARKED
            query.view = replace(
                query.view,
                phase=Phase.PARKED if parked else Phase.PREFILLING,
                prefilled_tokens=query.cached_tokens,
                to_prefill_tokens=query.view.to_prefill_tokens - chunk.tokens,
                kv_bytes=query.cached_tokens,
            )
            if chunk.last:
                assert query.view.to_prefill_tokens == 0
                query.view = replace(query.view, phase=Phase.READY)
                self._emit(query)

    def _park(self, query_id: str, mode: ParkMode, cause: str, *, planner: bool) -> None:
        query = self.live[query_id]
        assert query.cached_tokens
        self.park_count += planner
        query.history.append(f"park:{mode.value}")
        query.limit_parks += cause == "kv_limit"
        query.in_host_pool = mode is ParkMode.OFFLOAD
        if mode is ParkMode.RECOMPUTE:
            query.cached_tokens = 0
        view = query.view
        to_prefill = view.to_prefill_tokens
        if not query.in_host_pool:
            to_prefill = view.prompt_tokens + view.output_tokens
        query.view = replace(
            view,
            phase=Phase.PARKED,
            park_seq=view.park_seq or next(self._park_seq),
            parks=view.parks + planner,
            prefilled_tokens=query.cached_tokens,
            kv_bytes=0,
            to_prefill_tokens=to_prefill,
        )

    def _give_row(self, query_id: str) -> None:
        query = self.live.get(query_id)
        if query is None:
            return  # It ended with its prefill.
        assert query.view.phase in {Phase.READY, Phase.PARKED}
        query.history.append("row")
        query.in_host_pool = False
        query.first_row_step = self.steps if query.first_row_step is None else query.first_row_step
        query.view = replace(
            query.view,
            phase=Phase.RUNNING,
            park_seq=0,
            since_admission_tokens=0,
            kv_bytes=query.cached_tokens,
        )

    def _emit(self, query: FakeQuery, **changes: int) -> None:
        query.first_token_step = self.steps if query.first_token_step is None else query.first_token_step
        tokens = query.view.output_tokens + 1
        nbytes = query.cached_tokens
        view = query.view
        query.reserved_tokens = raised(query.reserved_tokens, tokens, view.max_tokens)
        query.view = replace(
            view,
            output_tokens=tokens,
            kv_bytes=nbytes,
            park_bytes=nbytes + 1,
            reserved_bytes=view.prompt_tokens + query.reserved_tokens,
            **changes,
        )
        if tokens == query.output_tokens:
            self.finished[query.view.query_id] = self.live.pop(query.view.query_id)


@pytest.fixture
def fake_engine() -> type[FakeEngine]:
    """Return the class of the fake engine."""
    return FakeEngine
