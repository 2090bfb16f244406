"""How long a plan takes, by waiting queries and rows, from scratch and with a line that is kept."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.table import Table

from batond.daemon.scheduler.line import Line
from batond.daemon.scheduler.plan import BatchView
from batond.daemon.scheduler.planner import Planner
from batond.policies.base import Phase, QueryView
from batond.policies.classes import DEFAULT_CLASSES
from batond.policies.registry import load_policy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batond.daemon.scheduler.plan import Plan
    from batond.policies.base import Policy

WAITING = (10, 100, 1000, 10_000)
ROWS = (8, 64, 256)
TENANTS = 20
STEP_S = 0.02
BYTES_PER_TOKEN = 1 << 15
CHUNK_TOKENS = 2048
WARM_UP_STEPS = 10


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one case, in milliseconds."""

    policy: str
    waiting: int
    rows: int
    parked: int
    scratch_ms: float  # Median of a plan that is given all queries anew.
    plan_ms: float  # Median of a plan with a line that is kept.
    plan_p99_ms: float
    update_ms: float  # Median of telling the line what has changed: every row has a new token.


class Load:
    """A full batch and a line before it; for each query that ends, another joins the line."""

    def __init__(self, waiting: int, rows: int, parked: int, seed: int = 0) -> None:
        self._dice = random.Random(seed)  # noqa: S311 - a workload, no secret
        self._count, self._parks = 0, 1 << 20
        self.now_s = 1000.0
        self.queries = {
            query.query_id: query
            for phase, count in ((Phase.WAITING, waiting), (Phase.PARKED, parked), (Phase.RUNNING, rows))
            for query in (self._query(phase) for _ in range(count))
        }

    def view(self, rows: int) -> BatchView:
        """What the engine would show."""
        return BatchView(
            self.now_s,
            rows,
            tuple(self.queries.values()),
            chunk_tokens=CHUNK_TOKENS,
            kv_free_bytes=1 << 40,
            row_step_bytes=BYTES_PER_TOKEN,
            host_free_bytes=1 << 36,
        )

    def step(self) -> Iterator[tuple[str, QueryView | None]]:
        """Yield what changes in a step: a token for every row; now and then one query for another."""
        self.now_s += STEP_S
        running = [query for query in self.queries.values() if query.phase is Phase.RUNNING]
        for query in running:
            if query.output_tokens + 1 == query.max_tokens:
                del self.queries[query.query_id]
                yield query.query_id, None
                yield self._set(self._query(Phase.WAITING))
                continue
            nbytes = query.kv_bytes + BYTES_PER_TOKEN
            yield self._set(
                replace(
                    query,
                    output_tokens=query.output_tokens + 1,
                    since_admission_tokens=query.since_admission_tokens + 1,
                    kv_bytes=nbytes,
                    park_bytes=nbytes,
                )
            )

    def do(self, plan: Plan) -> Iterator[tuple[str, QueryView | None]]:
        """Yield what a plan changes."""
        for chunk in plan.chunks:
            query = self.queries[chunk.query_id]
            done = query.prefilled_tokens + chunk.tokens
            yield self._set(
                replace(
                    query,
                    phase=Phase.READY if chunk.last else Phase.PREFILLING,
                    prefilled_tokens=done,
                    to_prefill_tokens=query.to_prefill_tokens - chunk.tokens,
                    output_tokens=query.output_tokens + chunk.last,
                    kv_bytes=done * BYTES_PER_TOKEN,
                )
            )
        for order in plan.park:
            query = self.queries[order.query_id]
            self._parks += 1
            yield self._set(
                replace(query, phase=Phase.PARKED, kv_bytes=0, parks=query.parks + 1, park_seq=self._parks)
            )
        for query_id in (*plan.resume, *plan.admit):
            query = self.queries[query_id]
            cached = query.prompt_tokens + query.output_tokens
            yield self._set(
                replace(
                    query,
                    phase=Phase.RUNNING,
                    park_seq=0,
                    since_admission_tokens=0,
                    kv_bytes=cached * BYTES_PER_TOKEN,
                )
            )

    def _set(self, query: QueryView) -> tuple[str, QueryView]:
        self.queries[query.query_id] = query
        return query.query_id, query

    def _query(self, phase: Phase) -> QueryView:
        dice = self._dice
        self._count += 1
        order = dice.choices(range(len(DEFAULT_CLASSES)), [1, 4, 5])[0]
        sla = DEFAULT_CLASSES[order]
        prompt, most = dice.randint(20, 2000), dice.choice((128, 256, 512, 1024))
        done = 0 if phase is Phase.WAITING else dice.randint(1, most // 2)
        on_device = phase is Phase.RUNNING
        return QueryView(
            query_id=f"q{self._count}",
            tenant=f"t{dice.randrange(TENANTS)}",
            sla_class=sla.name,
            class_order=order,
            preemptible=sla.preemptible,
            arrival_s=self.now_s - dice.uniform(0, 300),
            seq=self._count,
            phase=phase,
            prompt_tokens=prompt,
            prefilled_tokens=prompt + done - 1 if done else 0,
            output_tokens=done,
            max_tokens=most,
            since_admission_tokens=done if on_device else 0,
            park_seq=self._count if phase is Phase.PARKED else 0,
            kv_bytes=(prompt + done) * BYTES_PER_TOKEN if on_device else 0,
            reserved_bytes=(prompt + most) * BYTES_PER_TOKEN,
            park_bytes=(prompt + done) * BYTES_PER_TOKEN if done else 0,
            to_prefill_tokens=0 if done else prompt,
            ttft_target_s=sla.ttft_target_s,
            tpot_target_s=sla.tpot_target_s,
        )


def measure(policy_name: str, waiting: int, rows: int, steps: int) -> Timing:
    """Time one case on one core; a tenth as many parked queries as rows stand in line too."""
    load = Load(waiting, rows, parked=rows // 10)
    planner = Planner(load_policy(policy_name))
    line = Line(planner.policy, load.queries.__getitem__)
    for live in load.queries.values():
        line.put(live)
    plan = planner.plan(replace(load.view(rows), queries=()), line)
    plans, updates = [], []
    for step in range(WARM_UP_STEPS + steps):
        changes = [*load.do(plan), *load.step()]
        view = replace(load.view(rows), queries=())
        started = time.thread_time()
        for query_id, query in changes:
            _tell(line, query_id, query)
        updated = time.thread_time()
        plan = planner.plan(view, line)
        if step >= WARM_UP_STEPS:
            plans.append((time.thread_time() - updated) * 1e3)
            updates.append((updated - started) * 1e3)
    return Timing(
        policy=policy_name,
        waiting=waiting,
        rows=rows,
        parked=rows // 10,
        scratch_ms=_from_scratch_ms(load, load_policy(policy_name), rows),
        plan_ms=statistics.median(plans),
        plan_p99_ms=statistics.quantiles(plans, n=100)[98],
        update_ms=statistics.median(updates),
    )


def _tell(line: Line, query_id: str, query: QueryView | None) -> None:
    """As the engine does: of a query that keeps its row, only how far it has come."""
    if query is None:
        line.remove(query_id)
    elif query_id in line.running and query.phase is Phase.RUNNING:
        line.running.advance(
            query_id,
            left_tokens=query.max_tokens - query.output_tokens,
            since_admission_tokens=query.since_admission_tokens,
            kv_bytes=query.kv_bytes,
        )
    else:
        line.put(query)


def _from_scratch_ms(load: Load, policy: Policy, rows: int, repeats: int = 5) -> float:
    planner, view, times = Planner(policy), load.view(rows), []
    for _ in range(repeats):
        started = time.thread_time()
        planner.plan(view)
        times.append((time.thread_time() - started) * 1e3)
    return statistics.median(times)


def report(timings: list[Timing]) -> Table:
    """The times as a table."""
    table = Table(title="A plan, milliseconds on one core")
    for name in ("policy", "waiting", "rows", "from scratch", "plan, median", "plan, p99", "update, median"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for timing in timings:
        times = (timing.scratch_ms, timing.plan_ms, timing.plan_p99_ms, timing.update_ms)
        table.add_row(
            timing.policy, f"{timing.waiting}", f"{timing.rows}", *(f"{value:.2f}" for value in times)
        )
    return table
