"""Plays jobs on the engine under a method: the engine decides and computes, the costs tell the time.

A step of the engine is a step of the method; what it computed is read off the engine's own counters and
events, and takes as long as `StepCosts` say. So the same jobs give the same figures on every machine, and
what two methods differ by is their schedule.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, Final

from batond.bench.baselines.methods import Method, Prompts, Swap
from batond.bench.baselines.second import Handed, HandedPrompt, SecondDevice
from batond.bench.baselines.swapping import Proactive, Reactive, Swapping
from batond.daemon.engine.local import LocalEngine
from batond.daemon.engine.queries.view import query_view
from batond.daemon.requests.params import SamplingParams
from batond.daemon.scheduler.planner import PlannerLimits
from batond.daemon.wire.messages import Preempted, Resumed, Tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batond.bench.baselines.groups import Job
    from batond.daemon.engine.model.causal import CausalModel
    from batond.daemon.simulator.costs import StepCosts
    from batond.daemon.wire.messages import QueryEvent

#: A byte over PCIe between device and host, and between two devices: about what is measured for large copies.
LINK_BYTE_S: Final = 1 / 50e9
#: Spare KV on the device for proactive swaps, in rows of the longest query.
SPARE_ROWS: Final = 2
_MANY_PARKS: Final = 1 << 30


@dataclass(slots=True)
class Served:
    """A job and what it got.

    Attributes:
        job: Which.
        token_ids: Its output.
        came_s: When each of them came.
        end_s: When its requester had all of it.
    """

    job: Job
    token_ids: list[int] = field(default_factory=list)
    came_s: list[float] = field(default_factory=list)
    end_s: float = 0.0

    @property
    def first_token_s(self) -> float:
        """From its arrival to its first token."""
        return self.came_s[0] - self.job.at_s

    @property
    def completion_s(self) -> float:
        """From its arrival to its end."""
        return self.end_s - self.job.at_s

    @property
    def worst_gap_s(self) -> float:
        """Longest time between two of its tokens; 0 if it has only one."""
        return max((b - a for a, b in zip(self.came_s, self.came_s[1:], strict=False)), default=0.0)


@dataclass(slots=True)
class Played:
    """Jobs under a method.

    Attributes:
        method: Its name.
        served: By name of the job.
        seconds: From the first arrival to the last end.
        steps: Decode steps.
        idle_row_steps: Rows that got no token in them.
        parks: Rows that were taken.
        waited_s: For copies of KV.
    """

    method: str
    served: dict[str, Served] = field(default_factory=dict)
    seconds: float = 0.0
    steps: int = 0
    idle_row_steps: int = 0
    parks: int = 0
    waited_s: float = 0.0

    @property
    def mean_completion_s(self) -> float:
        """Of all jobs."""
        return statistics.fmean(one.completion_s for one in self.served.values())

    @property
    def mean_first_token_s(self) -> float:
        """Of all jobs."""
        return statistics.fmean(one.first_token_s for one in self.served.values())

    @property
    def worst_gap_s(self) -> float:
        """Of all jobs."""
        return max(one.worst_gap_s for one in self.served.values())

    @property
    def output_rate(self) -> float:
        """Tokens a second."""
        return sum(len(one.token_ids) for one in self.served.values()) / self.seconds


class Stage:
    """An engine that is switched from method to method while it is idle.

    Args:
        model: The model.
        rows: Of the batch.
        longest_tokens: Prompt and output of the longest job.
        second: The model on a second device; None is the same one again.
    """

    def __init__(
        self, model: CausalModel, rows: int, longest_tokens: int, second: CausalModel | None = None
    ) -> None:
        self.engine = LocalEngine(
            model,
            rows=rows,
            batch="ring",
            policy="fcfs",
            host_pool_bytes=1 << 26,
            chunk_tokens=None,
            ready_limit=rows,
            max_query_tokens=longest_tokens,
            session_bytes=0,
            overlap=False,
            arena="plain",
        )
        self.rows, self.longest_tokens = rows, longest_tokens
        self._model, self._second = model, second or model
        inside: Any = self.engine
        self._alone, self._packer = inside.residency._new_prefill_batch, inside._prompts._packer  # noqa: SLF001 - nobody else changes them
        self.handed: dict[tuple[int, ...], Handed] = {}

    def switch(self, method: Method) -> None:
        """Schedule as the method has it; the engine is idle."""
        engine: Any = self.engine  # Nobody else changes these on a living engine.
        elsewhere = method.prompts is Prompts.SECOND_DEVICE
        engine._ready_limit = self.rows if method.prompts is Prompts.AHEAD else 0  # noqa: SLF001
        engine._bounds.chunk_tokens = method.chunk_tokens  # noqa: SLF001
        engine._prompts._packer = None if elsewhere else self._packer  # noqa: SLF001
        engine.residency._new_prefill_batch = self._take_handed if elsewhere else self._alone  # noqa: SLF001
        engine.planner._limits = PlannerLimits(quantum_tokens=1, max_parks=_MANY_PARKS)  # noqa: SLF001
        engine.set_policy(method.policy())
        self.handed.clear()

    def second_device(self, method: Method, costs: StepCosts) -> SecondDevice:
        """The device that computes prompts under the method."""
        layout = self.engine.residency.batch.layout
        return SecondDevice(self._second, layout, costs, LINK_BYTE_S, overlapped=method.overlapped)

    def close(self) -> None:
        """Give all memory back."""
        self.engine.close()

    def _take_handed(self) -> HandedPrompt:
        return HandedPrompt(self._model, self.engine.residency.batch.layout, self.handed)


def play(stage: Stage, method: Method, jobs: Sequence[Job], costs: StepCosts, seed: int = 0) -> Played:
    """Play jobs to their ends.

    Args:
        stage: Idle.
        method: How to schedule.
        jobs: In any order.
        costs: Of steps and prompts, in virtual seconds.
        seed: Of the prompts: the same ones under every method.
    """
    player = _Player(stage, method, jobs, costs, seed)
    while player.busy:
        player.step()
    return player.played


class _Player:
    """One play of jobs."""

    def __init__(
        self, stage: Stage, method: Method, jobs: Sequence[Job], costs: StepCosts, seed: int
    ) -> None:
        stage.switch(method)
        self._stage, self._method, self._costs = stage, method, costs
        self._engine = stage.engine
        dice, vocab_size = Random(seed), stage.engine.model.vocab_size  # noqa: S311 - prompts, no secret
        ordered = sorted(jobs, key=lambda job: job.at_s)
        self._prompts = {
            job.name: [dice.randrange(vocab_size) for _ in range(job.prompt_tokens)] for job in ordered
        }
        self._coming = deque(ordered)
        self._waiting: list[Job] = []
        self._group: list[Job] = []
        self._second: SecondDevice | None = None
        if method.prompts is Prompts.SECOND_DEVICE:
            self._second = stage.second_device(method, costs)
        self._swapping: Swapping = Reactive(LINK_BYTE_S)
        if method.swap is Swap.PROACTIVE:
            room = SPARE_ROWS * stage.longest_tokens * costs.kv_token_bytes
            self._swapping = Proactive(LINK_BYTE_S, room)
        self._parked: set[str] = set()
        self._events: list[QueryEvent] = []
        self._engine.on_event = self._events.append
        self._now_s = 0.0
        self.played = Played(method.name, {job.name: Served(job) for job in ordered})

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        crossing = self._second is not None and self._second.next_s is not None
        return bool(self._coming or self._waiting or self._engine.queries or crossing)

    def step(self) -> None:
        """One step of the engine, or a wait for the next job."""
        self._arrive()
        if not self._engine.queries:
            nexts = [self._coming[0].at_s] if self._coming else []
            if self._second is not None and self._second.next_s is not None:
                nexts.append(self._second.next_s)
            self._now_s = min(nexts)
            return
        counters = self._engine.counters
        before = counters.copy()
        self._engine.step()
        steps = counters["decode_steps"] - before["decode_steps"]
        idle = counters["idle_row_steps"] - before["idle_row_steps"]
        prompt_tokens = counters["prefill_tokens"] - before["prefill_tokens"]
        self._now_s += (
            self._compute_s(prompt_tokens, steps, steps * self._stage.rows - idle) + self._copies_s()
        )
        self.played.steps += steps
        self.played.idle_row_steps += idle
        self._hand_out()

    def _arrive(self) -> None:
        while self._coming and self._coming[0].at_s <= self._now_s:
            job = self._coming.popleft()
            if self._second is not None:
                self._second.take(job, self._prompts[job.name])
            else:
                self._waiting.append(job)
        if self._second is not None:
            for one in self._second.give(self._now_s):
                self._stage.handed[tuple(one.prompt)] = one
                self._submit(one.job)
        elif self._method.form is None:
            for job in self._waiting:
                self._submit(job)
            self._waiting.clear()
        elif self._waiting and not self._engine.queries:
            self._group = self._method.form(self._waiting, self._stage.rows, self._costs)
            for job in self._group:
                self._waiting.remove(job)
                self._submit(job)

    def _submit(self, job: Job) -> None:
        sampling = SamplingParams(max_tokens=job.output_tokens, ignore_eos=True)
        sla_class = "interactive" if job.urgent and self._method.knows_urgency else "batch"
        self._engine.submit(self._prompts[job.name], sampling, sla_class=sla_class, query_id=job.name)

    def _compute_s(self, prompt_tokens: int, steps: int, rows: int) -> float:
        """Of a step: prompts, if they were computed here, and the decode; a whole batch with its padding."""
        costs = self._costs
        if self._second is not None:
            prompt_tokens = 0
        if self._group:
            longest = max(job.prompt_tokens for job in self._group)
            prompt_tokens = longest * len(self._group) if prompt_tokens else 0
            rows = len(self._group)
        served = (self.played.served[name] for name in self._engine.queries)
        cached = sum(one.job.prompt_tokens + len(one.token_ids) for one in served)
        return costs.prompts_s(prompt_tokens) + (costs.decode_s(rows, cached) if steps else 0.0)

    def _copies_s(self) -> float:
        """What the batch waits for the KV of rows that changed hands in this step."""
        waited_s = 0.0
        for event in self._events:
            match event:
                case Preempted():
                    one = self.played.served[event.query_id]
                    tokens = one.job.prompt_tokens + len(one.token_ids)
                    nbytes = tokens * self._costs.kv_token_bytes
                    waited_s += self._swapping.park(event.query_id, nbytes, self._now_s)
                    self._parked.add(event.query_id)
                    self.played.parks += 1
                case Resumed() if event.query_id in self._parked:
                    waited_s += self._swapping.resume(event.query_id, self._now_s)
                    self._parked.discard(event.query_id)
                case _:
                    pass
        self.played.waited_s += waited_s
        return waited_s

    def _hand_out(self) -> None:
        """Give the step's tokens to their jobs, at the time it is now; let the link work until then."""
        for event in self._events:
            if isinstance(event, Tokens):
                one = self.played.served[event.query_id]
                first = None if one.token_ids or self._second is None else self._first_s(one.job)
                one.token_ids += event.token_ids
                one.came_s += [self._now_s] * len(event.token_ids)
                one.came_s[0] = first if first is not None else one.came_s[0]
                one.end_s = one.came_s[-1]
        self._events.clear()
        if self._group and not self._engine.queries:
            for job in self._group:
                self.played.served[job.name].end_s = self._now_s  # A whole batch answers as a whole.
            self._group = []
        self.played.seconds = self._now_s
        self._swapping.advance(self._now_s, self._turns())

    def _first_s(self, job: Job) -> float:
        """When a prompt's first token was there, on the device that computed it."""
        return self._stage.handed[tuple(self._prompts[job.name])].first_s

    def _turns(self) -> list[str]:
        """Who is parked, whose turn is next first: the policy's order."""
        queries = [self._engine.queries[name] for name in self._parked if name in self._engine.queries]
        policy, layout = self._engine.planner.policy, self._engine.residency.batch.layout
        return [
            name
            for _, name in sorted(
                (policy.rank(query_view(query, layout), 0.0), query.query_id) for query in queries
            )
        ]
