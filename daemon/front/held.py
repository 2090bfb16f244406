"""A job this daemon holds: what it knows of it, and what may be done with it. steps.py takes events in."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import msgspec

from batond.daemon.front.steps import StepBuilder, choice_of
from batond.daemon.queue.keys import job_ref, split_ref
from batond.daemon.requests.params import split_sequences
from batond.daemon.telemetry.trace_context import TraceContext
from batond.daemon.wire.messages import FinishReason, Submit, Usage

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from batond.daemon.front.hub import LiveJob
    from batond.daemon.front.job_trace import JobTrace
    from batond.daemon.front.steps import JobStep
    from batond.daemon.queue import ClaimedJob, JobRecord
    from batond.daemon.wire.messages import QueryEvent


def ref_of(query_id: str) -> str:
    """Reference of the job a query runs: its name without the epoch."""
    return query_id.rpartition("@")[0]


def job_of(query_id: str) -> tuple[str, str]:
    """Tenant and job id of a query."""
    return split_ref(ref_of(query_id))


@dataclass(slots=True)
class ChoiceTimes:
    """When things happened to a choice under this claim; monotonic seconds, None is not (any more).

    Attributes:
        rowless_s: Since when it has had no row, and competes for one.
        parked_s: When it was parked.
        first_token_s: Its first token came.
        last_token_s: Its latest token came.
        later_tokens: Tokens after those that came first.
    """

    rowless_s: float | None = None
    parked_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0
    later_tokens: int = 0


@dataclass(slots=True)
class HeldChoice:
    """One choice of a held job; a query of its own in the engine.

    Attributes:
        token_ids: Every token known: committed before the claim, or received from the engine since.
        had_row: It had a row before, under this claim or an earlier one.
        parked: It lost its row and is not back.
        finish_reason: Why it ended; empty while it goes on.
        usage: What it cost under this claim, once it has ended.
        times: For metrics.
    """

    token_ids: list[int] = field(default_factory=list)
    had_row: bool = False
    parked: bool = False
    finish_reason: str = ""
    usage: Usage | None = None
    times: ChoiceTimes = field(default_factory=ChoiceTimes)


@dataclass(slots=True)
class HeldJob:
    """A claimed job.

    Attributes:
        claimed: As it was claimed.
        live: Its events, for watchers.
        claimed_s: When, monotonic.
        ref: The job's reference in Redis; the key under which it is held.
        choices: Its generations; most jobs have one.
        parks: Parks under this claim.
        given: The present engine has it.
        active: The present engine has begun to compute it.
        withdrawals: Counts up each time it is taken out of a living engine; from 0, or what HeldJobs says.
        ended: Its end was received; nothing more is sent to the engine for it.
        late: Why it is being ended with DEADLINE_EXCEEDED; empty while it has time.
        timer: Looks at its deadlines.
        trace: For its span; None if it has none.
    """

    claimed: ClaimedJob
    live: LiveJob
    claimed_s: float
    ref: str = field(init=False)
    choices: list[HeldChoice] = field(init=False)
    parks: int = 0
    given: bool = False
    active: bool = False
    withdrawals: int = 0
    ended: bool = False
    late: str = ""
    timer: asyncio.TimerHandle | None = None
    trace: JobTrace | None = None

    def __post_init__(self) -> None:
        """Go on from what earlier claims committed."""
        self.ref = job_ref(self.tenant, self.job_id)  # Asked for several times a token.
        had_row = self.claimed.record.started_ms > 0
        self.choices = [
            HeldChoice(list(one.token_ids), had_row=had_row, finish_reason=one.finish_reason)
            for one in self.claimed.choices
        ]
        for choice in self.choices:
            choice.times.rowless_s = self.claimed_s - self.claimed.record.waited_ms / 1000

    @property
    def tenant(self) -> str:
        """Whose."""
        return self.claimed.record.tenant

    @property
    def job_id(self) -> str:
        """Which."""
        return self.claimed.record.job_id

    @property
    def log_ids(self) -> dict[str, str]:
        """What a line of the log says of it: whose, which, and of which trace."""
        kept = self.claimed.record.trace
        context = TraceContext.read(kept) if kept else None
        ids = {"tenant": self.tenant, "job_id": self.job_id}
        return ids if context is None else {**ids, "trace_id": context.trace_id}

    @property
    def had_row(self) -> bool:
        """Whether any of its choices had a row before."""
        return any(choice.had_row for choice in self.choices)

    @property
    def parked(self) -> bool:
        """Whether all of its choices that go on have lost their rows."""
        return all(self.choices[index].parked for index in self.open_choices)

    @property
    def age_s(self) -> float:
        """Time since it was accepted."""
        before_ms = max(0, self.claimed.now_ms - self.claimed.record.created_ms)
        return before_ms / 1000 + time.monotonic() - self.claimed_s

    @property
    def left_s(self) -> float:
        """Time to its deadline; infinity if it has none."""
        left_ms = self.claimed.deadline_in_ms
        return math.inf if left_ms is None else left_ms / 1000 - (time.monotonic() - self.claimed_s)

    @property
    def left_to_start_s(self) -> float:
        """Time in which it must get its first row; infinity if it may wait, or had one."""
        left_ms = self.claimed.start_in_ms
        if left_ms is None or self.had_row:
            return math.inf
        return left_ms / 1000 - (time.monotonic() - self.claimed_s)

    @property
    def open_choices(self) -> list[int]:
        """The choices that go on."""
        return [index for index, choice in enumerate(self.choices) if not choice.finish_reason]

    @property
    def query_ids(self) -> list[str]:
        """Names in the engine of the choices that go on."""
        return [self.query_id(index) for index in self.open_choices]

    def query_id(self, choice: int = 0) -> str:
        """A choice's name in the engine. Epoch and withdrawals keep late tokens of former runs out."""
        name = f"{self.ref}@{self.claimed.record.epoch}" + (
            f".{self.withdrawals}" if self.withdrawals else ""
        )
        return f"{name}#{choice}" if choice else name

    def runs(self, query_id: str) -> bool:
        """Whether a query is one of this claim's, and its events still count."""
        return not self.ended and query_id == self.query_id(choice_of(query_id))

    def submits(self, waited_s: float, tenant_weight: float = 1.0) -> list[Submit]:
        """The commands that start its choices, or let them go on after the tokens they have."""
        spec = self.claimed.spec
        parts = split_sequences(spec.sampling, spec.seed)
        commands = []
        for index in self.open_choices:
            sampling, seed = parts[index]
            token_ids = self.choices[index].token_ids
            if token_ids and sampling.prompt_logprobs is not None:
                # They came with the first token: an engine that goes on after it must not send them again.
                sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
            commands.append(
                Submit(
                    query_id=self.query_id(index),
                    tenant=self.tenant,
                    sla_class=self.claimed.record.sla_class,
                    prompt_token_ids=spec.prompt_token_ids,
                    sampling=sampling,
                    seed=seed,
                    waited_s=waited_s,
                    emitted_token_ids=list(token_ids),
                    session_id=spec.session_id,
                    deadline_s=self.left_s,
                    tenant_weight=tenant_weight,
                )
            )
        return commands

    def take_update(self, record: JobRecord) -> bool:
        """Take class and deadlines from a newer record of this claim; returns whether they have changed."""
        known = self.claimed.record
        changed = {
            name: getattr(record, name)
            for name in ("sla_class", "deadline_ms", "start_by_ms")
            if getattr(record, name) != getattr(known, name)
        }
        if record.epoch != known.epoch or not changed:
            return False
        self.claimed = msgspec.structs.replace(self.claimed, record=msgspec.structs.replace(known, **changed))
        return True

    def usage(self) -> Usage:
        """What it cost under this claim, all choices together; the prompt counts once."""
        known = [choice.usage for choice in self.choices if choice.usage is not None]
        return Usage(
            prompt_tokens=len(self.claimed.spec.prompt_token_ids),
            output_tokens=sum(len(choice.token_ids) for choice in self.choices),
            parks=self.parks,
            recomputed_tokens=sum(one.recomputed_tokens for one in known),
            waited_s=min((one.waited_s for one in known), default=0.0),
            parked_s=sum(one.parked_s for one in known),
            cached_prompt_tokens=max((one.cached_prompt_tokens for one in known), default=0),
        )

    def withdraw(self) -> None:
        """It was taken out of its engine: what that still says of it does not count."""
        self.given = self.active = False
        self.withdrawals += 1
        for choice in self.choices:
            choice.parked = False

    def cancel(self) -> JobStep:
        """End it as cancelled, without the engine's word."""
        step = self._step()
        step.end_all(FinishReason.CANCELLED)
        return step.finish()

    def fail(self, message: str, reason: str = "INTERNAL") -> JobStep:
        """End it without the engine's word."""
        step = self._step()
        step.fail(reason, message)
        return step.finish()

    def digest(
        self, events: Sequence[QueryEvent], on_event: Callable[[HeldJob, QueryEvent], None] | None = None
    ) -> JobStep:
        """Turn one step's events of this job into a commit and what watchers see after it.

        Args:
            events: In order.
            on_event: Called with each event before it is taken in.
        """
        step = self._step()
        for event in events:
            if on_event is not None:
                on_event(self, event)
            step.add(event)
        return step.finish()

    def _step(self) -> StepBuilder:
        return StepBuilder(cast("Any", self))  # Type checkers know this class by two paths.
