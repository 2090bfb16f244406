"""A job this daemon holds, and how one step's events become one commit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from batond.daemon.front.hub import CameBack, GotRow, LostRow
from batond.daemon.queue import Chunk, JobState, StepCommit
from batond.daemon.queue.keys import job_ref, split_ref
from batond.daemon.wire.messages import (
    Finished,
    FinishReason,
    Preempted,
    QueryFailed,
    Resumed,
    Started,
    Submit,
    Tokens,
    Usage,
)

if TYPE_CHECKING:
    from batond.daemon.front.hub import LiveEvent, LiveJob
    from batond.daemon.queue import ClaimedJob
    from batond.daemon.wire.messages import QueryEvent, TokenLogprobs


def ref_of(query_id: str) -> str:
    """Reference of the job a query runs: its name without the epoch."""
    return query_id.rpartition("@")[0]


def job_of(query_id: str) -> tuple[str, str]:
    """Tenant and job id of a query."""
    return split_ref(ref_of(query_id))


@dataclass(slots=True)
class HeldJob:
    """A claimed job.

    Attributes:
        claimed: As it was claimed.
        live: Its events, for watchers.
        claimed_s: When, monotonic.
        token_ids: Every token known: committed before the claim, or received from the engine since.
        parks: Parks under this claim.
        active: It was seen running in the present engine.
        had_row: It had a row before, under this claim or an earlier one.
        engine_deaths: Engines that died while it ran in them.
        ended: Its end was received; nothing more is sent to the engine for it.
    """

    claimed: ClaimedJob
    live: LiveJob
    claimed_s: float
    token_ids: list[int] = field(default_factory=list)
    parks: int = 0
    active: bool = False
    had_row: bool = False
    engine_deaths: int = 0
    ended: bool = False

    @property
    def tenant(self) -> str:
        """Whose."""
        return self.claimed.record.tenant

    @property
    def job_id(self) -> str:
        """Which."""
        return self.claimed.record.job_id

    @property
    def ref(self) -> str:
        """The job's reference in Redis; the key under which it is held."""
        return job_ref(self.tenant, self.job_id)

    @property
    def query_id(self) -> str:
        """Its name in the engine. The epoch keeps a former claim's late tokens out of this one."""
        return f"{self.ref}@{self.claimed.record.epoch}"

    def submit(self, waited_s: float) -> Submit:
        """The command that starts it, or lets it go on after the tokens it has."""
        spec = self.claimed.spec
        sampling = spec.sampling
        if self.token_ids and sampling.prompt_logprobs is not None:
            # They came with the first token: an engine that goes on after it must not send them again.
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return Submit(
            query_id=self.query_id,
            tenant=self.tenant,
            sla_class=self.claimed.record.sla_class,
            prompt_token_ids=spec.prompt_token_ids,
            sampling=sampling,
            seed=spec.seed,
            waited_s=waited_s,
            emitted_token_ids=list(self.token_ids),
            session_id=spec.session_id,
        )

    def fail(self, message: str) -> JobStep:
        """End it without the engine's word."""
        usage = Usage(
            prompt_tokens=len(self.claimed.spec.prompt_token_ids),
            output_tokens=len(self.token_ids),
            parks=self.parks,
            recomputed_tokens=0,
            waited_s=0.0,
            parked_s=0.0,
        )
        failed = QueryFailed(query_id=self.query_id, reason="INTERNAL", message=message, usage=usage)
        return self.digest([failed])

    def digest(self, events: list[QueryEvent]) -> JobStep:
        """Turn one step's events of this job into a commit and what watchers see after it."""
        step = _StepBuilder(self)
        for event in events:
            step.add(event)
        return step.finish()


@dataclass(frozen=True, slots=True)
class JobStep:
    """What a step did to one job.

    Attributes:
        held: The job.
        commit: For Redis.
        events: For watchers, once the commit is made.
        usage: Set if the job ended.
    """

    held: HeldJob
    commit: StepCommit
    events: list[LiveEvent]
    usage: Usage | None


class _StepBuilder:
    def __init__(self, held: HeldJob) -> None:
        self._held = held
        self._events: list[LiveEvent] = []
        self._tokens: list[int] = []
        self._text = ""
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._first_index = len(held.token_ids)
        self._state: JobState | None = None
        self._usage: Usage | None = None
        self._finish_reason = ""
        self._error = ("", "")

    def add(self, event: QueryEvent) -> None:
        match event:
            case Tokens():
                self._held.active = True
                self._tokens += event.token_ids
                self._text += event.text
                self._logprobs += event.logprobs or ()
                self._prompt_logprobs = self._prompt_logprobs or event.prompt_logprobs
                self._state = self._state or JobState.RUNNING
            case Started():
                # A new engine starts it anew; for its watchers it comes back.
                self._events.append(CameBack() if self._held.had_row else GotRow())
                self._held.active = self._held.had_row = True
                self._state = JobState.RUNNING
            case Preempted():
                self._held.parks += 1
                self._events.append(LostRow(event.cause, event.kept))
                self._state = JobState.PARKED
            case Resumed():
                self._events.append(CameBack())
                self._state = JobState.RUNNING
            case Finished():
                cancelled = event.finish_reason is FinishReason.CANCELLED
                self._state = JobState.CANCELLED if cancelled else JobState.SUCCEEDED
                self._usage, self._finish_reason = event.usage, event.finish_reason.value
            case QueryFailed():
                self._state, self._usage = JobState.FAILED, event.usage
                self._error = (event.reason, event.message)

    def finish(self) -> JobStep:
        held = self._held
        held.token_ids += self._tokens
        chunk = None
        if self._tokens or self._text:
            chunk = Chunk(
                first_index=self._first_index,
                token_ids=self._tokens,
                text=self._text,
                logprobs=self._logprobs or None,
                prompt_logprobs=self._prompt_logprobs,
            )
            self._events.append(chunk)
        record, recomputed, cached = held.claimed.record, -1, -1
        if self._usage is not None:
            held.ended = True
            recomputed = record.recomputed_tokens + self._usage.recomputed_tokens
            cached = self._usage.cached_prompt_tokens
        reason, message = self._error
        commit = StepCommit(
            tenant=held.tenant,
            job_id=held.job_id,
            epoch=record.epoch,
            chunk=chunk,
            state=self._state,
            prompt_tokens=len(held.claimed.spec.prompt_token_ids),
            preemptions=record.preemptions + held.parks,
            recomputed_tokens=recomputed,
            cached_prompt_tokens=cached,
            finish_reason=self._finish_reason,
            error_reason=reason,
            error_message=message,
        )
        return JobStep(held, commit, self._events, self._usage)
