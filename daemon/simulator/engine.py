"""One daemon in virtual time: the real planner decides, and a query's numbers move as in the engine."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Final

from batond.daemon.scheduler.chunks import ChunkBudget
from batond.daemon.scheduler.expected import ExpectedOutput, raised
from batond.daemon.scheduler.line import Line
from batond.daemon.scheduler.plan import BatchView, ParkMode
from batond.daemon.scheduler.planner import Planner
from batond.daemon.simulator.fair_queue import NEVER_MS, Spent
from batond.policies.base import Phase, QueryView, TracksEnds
from batond.policies.registry import load_configured

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

    from batond.daemon.scheduler.plan import Plan
    from batond.daemon.simulator.fair_queue import FairQueue
    from batond.daemon.simulator.setup import Setup
    from batond.daemon.simulator.trace import Request
    from batond.policies.classes import SlaClass

#: Decode steps taken at once while somebody waits in vain. Arrivals, ends and quanta end a leap earlier; only
#: what a policy would decide by time or tokens alone is seen late, by so many steps at most.
MOST_BLOCKED_STEPS: Final = 8


@dataclass(slots=True, eq=False)
class Query:
    """One request on its way.

    Attributes:
        max_tokens: Output tokens it asks for.
        reserved_tokens: Output tokens that KV is reserved for.
        cached_tokens: Tokens whose KV exists.
        to_prefill_tokens: Tokens to compute before it can decode.
        parks: How often it was parked.
        preemptions: Those of them that count against the cap.
        progress_s: When it last got anywhere; its arrival at first.
        starved_s: Longest time it got nowhere.
        had_row: Its longest queue time does not count any more.
        refused: It was not accepted: too large, or the queue or its tenant's part of it was full.
        late: It failed, past its time limit or its longest queue time.
    """

    request: Request
    sla: SlaClass
    seq: int
    weight: float
    max_tokens: int
    reserved_tokens: int = 0
    phase: Phase = Phase.WAITING
    cached_tokens: int = 0
    to_prefill_tokens: int = 0
    output_tokens: int = 0
    on_host: bool = False
    parks: int = 0
    preemptions: int = 0
    since_admission_tokens: int = 0
    park_seq: int = 0
    first_token_s: float = math.nan
    end_s: float = math.nan
    progress_s: float = 0.0
    starved_s: float = 0.0
    had_row: bool = False
    refused: bool = False
    late: bool = False

    @property
    def served(self) -> bool:
        """Whether it got all its tokens, or will."""
        return not (self.refused or self.late)

    @property
    def deadline_s(self) -> float:
        """When its last token must be out; infinity is never."""
        return self.request.arrival_s + self.request.time_limit_s

    @property
    def due_s(self) -> float:
        """When it fails as things stand; infinity is never."""
        if self.had_row or self.sla.longest_queue_s is None:
            return self.deadline_s
        return min(self.deadline_s, self.request.arrival_s + self.sla.longest_queue_s)

    @property
    def due_ms(self) -> int:
        """The same for the queue."""
        return NEVER_MS if math.isinf(self.due_s) else int(self.due_s * 1000)

    @property
    def left_tokens(self) -> int:
        """Tokens it will still emit."""
        return self.request.output_tokens - self.output_tokens

    def view(self, token_bytes: int) -> QueryView:
        """As the planner and the policies see it."""
        request, sla, nbytes = self.request, self.sla, self.cached_tokens * token_bytes
        return QueryView(
            query_id=str(self.seq),
            tenant=request.tenant,
            sla_class=sla.name,
            class_order=sla.order,
            preemptible=sla.preemptible,
            arrival_s=request.arrival_s,
            seq=self.seq,
            phase=self.phase,
            prompt_tokens=request.prompt_tokens,
            prefilled_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            max_tokens=self.max_tokens,
            parks=self.preemptions,
            since_admission_tokens=self.since_admission_tokens,
            park_seq=self.park_seq,
            kv_bytes=0 if self.on_host else nbytes,
            reserved_bytes=(request.prompt_tokens + self.reserved_tokens) * token_bytes,
            park_bytes=nbytes,
            to_prefill_tokens=self.to_prefill_tokens,
            deadline_s=self.deadline_s,
            ttft_target_s=sla.ttft_target_s,
            tpot_target_s=sla.tpot_target_s,
            tenant_weight=self.weight,
        )

    def progressed(self, start_s: float, end_s: float) -> None:
        """Note that it got somewhere in a step that began at `start_s`."""
        self.starved_s = max(self.starved_s, start_s - self.progress_s)
        self.progress_s = end_s

    def fail_late(self, now_s: float) -> None:
        """Note that it is over without its tokens."""
        self.late = True
        self.end_s = now_s
        self.progressed(now_s, now_s)


@dataclass(slots=True)
class Usage:
    """What a daemon did with its time."""

    busy_s: float = 0.0
    row_s: float = 0.0
    steps: int = 0
    plans: int = 0
    parks: int = 0
    recomputes: int = 0
    computed_tokens: int = 0


class Engine:
    """Claims, plans and steps.

    Args:
        setup: What is simulated.
        policy: Name of the policy; each daemon has its own object.
        dice: Of the noise.

    Attributes:
        emitted: Output and prompt tokens of the last step by query, until `settle`.
    """

    def __init__(self, setup: Setup, policy: str, dice: Random) -> None:
        self._setup, self._costs, self._dice = setup, setup.costs, dice
        self._policy = load_configured(policy, setup.policy_options)
        self._tracks = self._policy if isinstance(self._policy, TracksEnds) else None
        self._planner = Planner(self._policy, setup.limits)
        self._line = Line(self._policy)
        self._chunk_budget = ChunkBudget()
        expects = setup.overcommit and setup.max_tokens and setup.costs.kv_bytes
        self._expected = ExpectedOutput() if expects else None
        self._queries: dict[str, Query] = {}
        self._running: dict[str, Query] = {}
        self._park_seqs = count(1)
        self._host_bytes = setup.host_pool_bytes
        self._held: dict[str, int] = dict.fromkeys(setup.classes.names, 0)
        self._timers: list[tuple[float, int, Query]] = []
        self._ended: list[str] = []
        self.emitted: list[tuple[Query, int, int]] = []
        self.usage = Usage()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._queries

    def claim(self, queue: FairQueue[Query], now_s: float) -> None:
        """Claim as the dispatcher does: rows and a few more of every class, the most urgent class first."""
        most = self._setup.rows + self._setup.claim_ahead
        for name in self._setup.classes.names:
            for query in queue.claim(name, most - self._held[name], int(now_s * 1000)):
                self._held[name] += 1
                query.to_prefill_tokens = query.request.prompt_tokens
                query.reserved_tokens = query.max_tokens
                if self._expected is not None:
                    query.reserved_tokens = self._expected.tokens(name, query.max_tokens)
                self._queries[str(query.seq)] = query
                self._watch_time(query)
                self._note(query)

    def rowless(self) -> Iterator[Query]:
        """Claimed queries that have no row."""
        return (query for query in self._queries.values() if query.phase is not Phase.RUNNING)

    def settle(self, queue: FairQueue[Query], now_s: float) -> None:
        """Commit the last step: charge its tokens, and end those that are late, as the daemon's timers do."""
        while self._timers and self._timers[0][0] <= now_s:
            _, _, query = heapq.heappop(self._timers)
            if str(query.seq) in self._queries and query.due_s <= now_s:
                query.fail_late(now_s)
                self._let_go(query)
        spent = [
            Spent(query.sla.name, query.request.tenant, tokens) for query, _, tokens in self.emitted if tokens
        ]
        if spent or self._ended:
            queue.commit(spent, self._ended, int(now_s * 1000))
        self.emitted, self._ended = [], []

    def step(self, now_s: float, until_s: float) -> float:
        """Do one step, or several in which nothing is decided; gives its end.

        Args:
            now_s: When it begins.
            until_s: When something may come that has to be decided.

        Raises:
            RuntimeError: Nobody can move: a defect.
        """
        plan = self._plan(now_s)
        self.usage.plans += 1
        computed: dict[str, tuple[int, int]] = {}
        cost_s = self._compute(plan, computed) + self._take_rows(plan) + self._give_rows(plan)
        steps = 1
        if self._running:
            cached = sum(query.cached_tokens for query in self._running.values())
            if plan.empty:
                until_s = min(until_s, self._timers[0][0] if self._timers else math.inf)
                steps = self._leap(cached, until_s - now_s)
            cost_s += self._costs.decode_s(len(self._running), cached, steps)
        elif plan.empty:
            raise RuntimeError(f"nobody can move at {now_s} s; blocked: {plan.blocked}")
        if self._setup.noise:
            cost_s *= 1 + self._dice.uniform(-self._setup.noise, self._setup.noise)
        if self._running and not (plan.park or plan.resume):
            self._chunk_budget.note(cost_s / steps, sum(chunk.tokens for chunk in plan.chunks))
        self._decode(steps, computed)
        self._finish(now_s, now_s + cost_s, computed)
        self.usage.steps += steps
        self.usage.busy_s += cost_s
        return now_s + cost_s

    # -- inside

    def _note(self, query: Query) -> None:
        self._line.put(query.view(self._costs.kv_token_bytes))

    def _plan(self, now_s: float) -> Plan:
        budget = self._costs.kv_bytes
        chunk_tokens = self._setup.chunk_tokens
        if chunk_tokens == "auto":
            chunk_tokens = self._chunk_budget.tokens(query.sla for query in self._running.values())
        view = BatchView(
            now_s=now_s,
            rows=self._setup.rows,
            queries=(),
            chunk_tokens=chunk_tokens,
            ready_limit=self._setup.ready_limit,
            kv_free_bytes=budget - self._line.taken_bytes if budget else None,
            row_step_bytes=self._costs.kv_token_bytes,
            host_free_bytes=self._host_bytes,
        )
        return self._planner.plan(view, self._line)

    def _compute(self, plan: Plan, computed: dict[str, tuple[int, int]]) -> float:
        copied = 0
        for chunk in plan.chunks:
            query = self._queries[chunk.query_id]
            copied += self._bring_back(query)
            query.cached_tokens += chunk.tokens
            query.to_prefill_tokens -= chunk.tokens
            if query.phase is Phase.WAITING:
                query.phase = Phase.PREFILLING
            if chunk.last:
                query.phase = Phase.READY
                query.output_tokens += 1
            computed[chunk.query_id] = (chunk.tokens, int(chunk.last))
        prompts_s = self._costs.prompts_s(sum(chunk.tokens for chunk in plan.chunks))
        return prompts_s + copied * self._costs.park_byte_s

    def _take_rows(self, plan: Plan) -> float:
        copied = 0
        for order in plan.park:
            query = self._queries[order.query_id]
            self._running.pop(order.query_id, None)  # A slice without a row may be put off as well.
            nbytes = query.cached_tokens * self._costs.kv_token_bytes
            query.phase, query.park_seq = Phase.PARKED, query.park_seq or next(self._park_seqs)
            query.parks += 1
            query.preemptions += order.preempts
            self.usage.parks += 1
            if order.mode is ParkMode.OFFLOAD:
                query.on_host = True
                self._host_bytes -= nbytes
                copied += nbytes
            else:
                query.to_prefill_tokens = query.request.prompt_tokens + query.output_tokens
                query.cached_tokens = 0
                self.usage.recomputes += 1
            self._note(query)
        return copied * self._costs.park_byte_s

    def _give_rows(self, plan: Plan) -> float:
        copied = 0
        for query_id in (*plan.resume, *plan.admit):
            query = self._queries[query_id]
            if query.left_tokens <= 0:
                continue  # It ended with its first token, before what it asked for.
            copied += self._bring_back(query)
            query.phase, query.park_seq, query.since_admission_tokens = Phase.RUNNING, 0, 0
            query.had_row = True
            self._running[query_id] = query
        return copied * self._costs.park_byte_s

    def _bring_back(self, query: Query) -> int:
        """Bytes copied back from the host, if any."""
        if not query.on_host:
            return 0
        nbytes = query.cached_tokens * self._costs.kv_token_bytes
        query.on_host = False
        self._host_bytes += nbytes
        return nbytes

    def _leap(self, cached_tokens: int, until_s: float) -> int:
        """Decode steps until an end, an arrival, or something the planner could decide."""
        rows, quantum = self._running.values(), self._setup.limits.quantum_tokens
        steps = min(query.left_tokens for query in rows)
        if self._line.has_claims:
            short = (quantum - query.since_admission_tokens for query in rows)
            steps = min(steps, MOST_BLOCKED_STEPS, *(tokens for tokens in short if tokens > 0))
        if self._costs.kv_bytes:
            room = self._costs.kv_bytes - self._line.taken_bytes + self._line.unwritten_bytes
            steps = max(1, min(steps, room // max(1, len(rows) * self._costs.kv_token_bytes)))
        if math.isfinite(until_s):
            one_s = self._costs.decode_s(len(rows), cached_tokens)
            steps = max(1, min(steps, math.ceil(until_s / one_s)))
            while steps > 1 and self._costs.decode_s(len(rows), cached_tokens, steps - 1) >= until_s:
                steps -= 1
        return steps

    def _decode(self, steps: int, computed: dict[str, tuple[int, int]]) -> None:
        for query_id, query in self._running.items():
            query.output_tokens += steps
            query.since_admission_tokens += steps
            query.cached_tokens += steps
            prompt, output = computed.get(query_id, (0, 0))
            computed[query_id] = (prompt, output + steps)

    def _finish(self, start_s: float, end_s: float, computed: dict[str, tuple[int, int]]) -> None:
        self.usage.row_s += len(self._running) * (end_s - start_s)
        for query_id, (prompt, output) in computed.items():
            query = self._queries[query_id]
            query.progressed(start_s, end_s)
            query.reserved_tokens = raised(query.reserved_tokens, query.output_tokens, query.max_tokens)
            if output and math.isnan(query.first_token_s):
                query.first_token_s = end_s
            view = query.view(self._costs.kv_token_bytes)
            self._policy.on_tokens(view, prompt, output)
            self.usage.computed_tokens += prompt + output
            self.emitted.append((query, prompt, output))
            if query.left_tokens > 0:
                self._line.put(view)
                continue
            query.end_s = end_s
            self._let_go(query)

    def _watch_time(self, query: Query) -> None:
        for due_s in {query.due_s, query.deadline_s} - {math.inf}:
            heapq.heappush(self._timers, (due_s, query.seq, query))

    def _let_go(self, query: Query) -> None:
        query_id = str(query.seq)
        if self._expected is not None and not query.late:
            self._expected.note(query.sla.name, query.output_tokens)
        if self._tracks is not None:
            self._tracks.on_end(query.view(self._costs.kv_token_bytes))
        if query.on_host:
            self._host_bytes += query.cached_tokens * self._costs.kv_token_bytes
        self._line.remove(query_id)
        self._running.pop(query_id, None)
        del self._queries[query_id]
        self._held[query.sla.name] -= 1
        self._ended.append(query.request.tenant)
