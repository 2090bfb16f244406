"""How one step's events of a job become one commit, and what watchers see after it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batond.daemon.errors import DeadlineError
from batond.daemon.front.hub import CameBack, GotRow, LostRow
from batond.daemon.queue import Chunk, JobState, StepCommit
from batond.daemon.wire.messages import (
    CommandResult,
    Finished,
    FinishReason,
    Preempted,
    QueryFailed,
    Resumed,
    Started,
    Tokens,
)

if TYPE_CHECKING:
    from batond.daemon.front.held import HeldJob
    from batond.daemon.front.hub import LiveEvent
    from batond.daemon.wire.messages import QueryEvent, TokenLogprobs, Usage


def choice_of(query_id: str) -> int:
    """Which of its job's choices a query is."""
    return int(query_id.partition("#")[2] or 0)  # References are quoted: none has the sign itself.


@dataclass(slots=True)  # Frozen, making one would take four times as long, and one is made a row and step.
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


@dataclass(slots=True)
class _Output:
    """What one choice put out in a step."""

    first_index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str = ""

    def chunk(self, choice: int) -> Chunk | None:
        """For Redis and watchers; None if there is nothing in it."""
        if not (self.token_ids or self.text or self.finish_reason):
            return None
        return Chunk(
            first_index=self.first_index,
            token_ids=self.token_ids,
            text=self.text,
            choice=choice,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            finish_reason=self.finish_reason,
        )


class StepBuilder:
    """Takes in one step's events of a job, and changes the job with them.

    Args:
        held: The job.
    """

    __slots__ = ("_error", "_events", "_held", "_moved", "_outputs")

    def __init__(self, held: HeldJob) -> None:
        self._held = held
        self._events: list[LiveEvent] = []
        self._outputs: dict[int, _Output] = {}
        self._moved = False
        self._error = ("", "")

    def add(self, event: QueryEvent) -> None:
        """Take an event in."""
        if isinstance(event, CommandResult):
            return
        index = choice_of(event.query_id)
        choice = self._held.choices[index]
        match event:
            case Tokens():
                self._held.active = self._moved = True
                self._take(index, event)
            case Started():
                self._start(index, event.reason)
            case Preempted():
                self._held.parks += 1
                choice.parked = self._moved = True
                self._events.append(LostRow(event.cause, event.kept, index))
            case Resumed():
                choice.parked, self._moved = False, True
                self._events.append(CameBack(index, event.reason))
            case Finished():
                choice.finish_reason, choice.usage = event.finish_reason.value, event.usage
                if len(self._held.choices) > 1:
                    # Of one choice alone the record tells the end.
                    self._output(index).finish_reason = choice.finish_reason
            case QueryFailed():
                choice.finish_reason, choice.usage = FinishReason.ERROR.value, event.usage
                self._error = (event.reason, event.message)

    def fail(self, reason: str, message: str) -> None:
        """End every choice that has not ended; what each did and cost stays as it is."""
        self._error = (reason, message)
        self.end_all(FinishReason.ERROR)

    def end_all(self, reason: FinishReason) -> None:
        """End every choice that has not ended."""
        for choice in self._held.choices:
            choice.finish_reason = choice.finish_reason or reason.value

    def finish(self) -> JobStep:
        """Return what the step did."""
        held = self._held
        chunks = [one for index, output in self._outputs.items() if (one := output.chunk(index)) is not None]
        self._events += chunks
        state, finish_reason = self._outcome()
        usage = held.usage() if state is not None and state.final else None
        record, spec = held.claimed.record, held.claimed.spec
        held.ended = held.ended or usage is not None
        reason, message = self._error
        commit = StepCommit(
            tenant=held.tenant,
            job_id=held.job_id,
            epoch=record.epoch,
            chunks=tuple(chunks),
            state=state,
            prompt_tokens=len(spec.prompt_token_ids),
            preemptions=record.preemptions + held.parks,
            recomputed_tokens=-1 if usage is None else record.recomputed_tokens + usage.recomputed_tokens,
            cached_prompt_tokens=-1 if usage is None else usage.cached_prompt_tokens,
            finish_reason=finish_reason,
            error_reason=reason,
            error_message=message,
        )
        return JobStep(held, commit, self._events, usage)

    def _output(self, index: int) -> _Output:
        output = self._outputs.get(index)
        if output is None:
            output = self._outputs[index] = _Output(len(self._held.choices[index].token_ids))
        return output

    def _take(self, index: int, event: Tokens) -> None:
        output = self._output(index)
        output.token_ids += event.token_ids
        output.text += event.text
        if event.logprobs:
            output.logprobs = [*(output.logprobs or ()), *event.logprobs]
        output.prompt_logprobs = output.prompt_logprobs or event.prompt_logprobs
        self._held.choices[index].token_ids += event.token_ids

    def _start(self, index: int, reason: str) -> None:
        """A row was given. A new engine starts a choice anew; for its watchers it comes back."""
        choice = self._held.choices[index]
        if choice.had_row:
            self._events.append(CameBack(index, reason))
        elif not self._held.had_row:
            self._events.append(GotRow(reason))
        self._held.active = self._moved = choice.had_row = True
        choice.parked = False

    def _outcome(self) -> tuple[JobState | None, str]:
        """State and finish reason after this step; a job ends with its last choice, or the first failure."""
        held = self._held
        if self._error[0]:
            return JobState.FAILED, ""
        parked = [choice.parked for choice in held.choices if not choice.finish_reason]
        if not parked:
            return self._end([choice.finish_reason for choice in held.choices])
        if not self._moved:
            return None, ""
        return JobState.PARKED if all(parked) else JobState.RUNNING, ""

    def _end(self, reasons: list[str]) -> tuple[JobState, str]:
        """State and finish reason of a job whose choices have ended, by their finish reasons."""
        if FinishReason.ERROR.value in reasons:
            self._error = ("INTERNAL", "one of its choices failed under an earlier claim")
        elif FinishReason.CANCELLED.value in reasons and self._held.late:
            self._error = (DeadlineError.reason, self._held.late)
        elif FinishReason.CANCELLED.value in reasons:
            return JobState.CANCELLED, FinishReason.CANCELLED.value
        else:
            return JobState.SUCCEEDED, reasons[0]
        return JobState.FAILED, ""
