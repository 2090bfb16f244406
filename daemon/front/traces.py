"""What happens to jobs, as spans of their callers' traces.

A job has one span, from its submission to its end, whichever daemons had it: its ids are kept with it in
Redis, and whoever ends it sends it. A claim that ends before its job (a drain, a lost lease, a conviction)
sends a span of its own below the job's; what a killed daemon knew of its claims is lost. All times are those
of Redis's clock. Prompts, texts and other people's ids are in no span.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec

import msgspec

from batond.daemon.errors import BatondError
from batond.daemon.front.job_trace import JobTrace
from batond.daemon.front.steps import choice_of
from batond.daemon.queue import HandBackOutcome, JobState
from batond.daemon.telemetry.logging import get_logger
from batond.daemon.telemetry.trace_context import TraceContext
from batond.daemon.telemetry.tracing import SpanData
from batond.daemon.wire.messages import (
    CommandResult,
    Finished,
    ParkCause,
    Preempted,
    QueryFailed,
    Resumed,
    Started,
    Tokens,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from batond.daemon.front.held import HeldJob
    from batond.daemon.front.job_trace import Event
    from batond.daemon.front.steps import JobStep
    from batond.daemon.queue import JobRecord, JobSpec, JobStore
    from batond.daemon.telemetry.tracing import SpanSink, Value
    from batond.daemon.wire.messages import QueryEvent


#: Of one claim; a job is parked `max_parks` times at most, but may have many choices.
MOST_EVENTS: Final = 100
#: Jobs that ended while they waited, whose records are still to be read.
MOST_LOOKUPS: Final = 1000
_LARGEST_INT: Final = (1 << 63) - 1  # What OTLP carries.

_log = get_logger(__name__)
_Given = ParamSpec("_Given")


def _harmless(
    hook: Callable[Concatenate[JobTraces, _Given], None],
) -> Callable[Concatenate[JobTraces, _Given], None]:
    """A hook that fails costs a span, never a job."""

    @functools.wraps(hook)
    def guarded(self: JobTraces, /, *args: _Given.args, **kwargs: _Given.kwargs) -> None:
        try:
            hook(self, *args, **kwargs)
        except Exception:  # noqa: BLE001 - whatever it is, it concerns the span alone
            _log.exception("trace_broke", hook=getattr(hook, "__name__", ""))

    return guarded


class JobTraces:
    """Turns what happens to jobs into spans. Exists only where spans are wanted.

    Args:
        spans: Where they go.
        store: Has the records of jobs that end while they wait.
        sample_ratio: Part of the jobs that are traced where the caller brings no trace.
    """

    def __init__(self, spans: SpanSink, store: JobStore, sample_ratio: float) -> None:
        self._spans, self._store, self._sample_ratio = spans, store, sample_ratio
        self._ended: asyncio.Queue[tuple[str, str]] = asyncio.Queue(MOST_LOOKUPS)

    def begin(self, metadata: Iterable[tuple[str, str | bytes]]) -> TraceContext:
        """A new job's place in its caller's trace, or in one of its own."""
        return TraceContext.begin(metadata, self._sample_ratio)

    async def close(self) -> None:
        """Let what waits leave for a moment."""
        await self._spans.close()

    # -- held jobs --------------------------------------------------------------------------------------

    @_harmless
    def take(self, held: HeldJob) -> None:
        """A job was claimed."""
        record = held.claimed.record
        context = TraceContext.read(record.trace)
        if context is not None and context.sampled:
            held.trace = JobTrace(context, started_ms=record.started_ms, first_token_ms=record.first_token_ms)

    def after(self, first: Callable[[HeldJob, QueryEvent], None]) -> Callable[[HeldJob, QueryEvent], None]:
        """What hears each event: `first`, then this."""

        def heard(held: HeldJob, event: QueryEvent) -> None:
            first(held, event)
            if held.trace is not None:
                self.heard(held, event)

        return heard

    @_harmless
    def heard(self, held: HeldJob, event: QueryEvent) -> None:
        """Note an event of a job, before the job takes it in."""
        trace = held.trace
        if trace is None or isinstance(event, CommandResult):
            return
        index = choice_of(event.query_id)
        several = len(held.choices) > 1
        match event:
            case Tokens() if event.token_ids and not trace.first_token_ms:
                trace.first_token_ms = self._note(held, trace, "first_token", index)
            case Started() | Resumed():
                again = isinstance(event, Resumed) or held.choices[index].had_row
                name = "resumed" if again else "started"
                at_ms = self._note(held, trace, name, index, row=event.row, reason=event.reason)
                trace.started_ms = trace.started_ms or at_ms
            case Preempted():
                self._note(held, trace, "parked", index, cause=event.cause, kept=event.kept)
            case Finished() if several:
                self._note(held, trace, "choice_finished", index, reason=event.finish_reason.value)
            case QueryFailed() if several:
                self._note(held, trace, "choice_failed", index, reason=event.reason)

    @_harmless
    def lost_rows(self, held: HeldJob, choices: Iterable[int]) -> None:
        """Choices of a job lost their rows because an engine died, or somebody is tried alone."""
        if held.trace is not None:
            for index in choices:
                self._note(
                    held, held.trace, "parked", index, cause=ParkCause.ENGINE_RESTART.value, kept=False
                )

    @_harmless
    def ended(self, step: JobStep) -> None:
        """A job ended, and Redis has it."""
        held, commit = step.held, step.commit
        if held.trace is None or commit.state is None:
            return
        record = msgspec.structs.replace(
            held.claimed.record,
            state=commit.state,
            finish_reason=commit.finish_reason,
            error_reason=commit.error_reason,
            preemptions=max(0, commit.preemptions),
            recomputed_tokens=max(0, commit.recomputed_tokens),
            cached_prompt_tokens=max(0, commit.cached_prompt_tokens),
            prompt_tokens=max(0, commit.prompt_tokens),
        )
        self._close(held, held.trace, record)

    @_harmless
    def handed_back(self, held: HeldJob, outcome: HandBackOutcome, *, charged: bool) -> None:
        """A job was given up by this claim; that may be its end."""
        trace, record = held.trace, held.claimed.record
        if trace is None:
            return
        trace.fate = "convicted" if charged else "handed_back"
        if outcome is HandBackOutcome.CANCELLED:
            self._close(held, trace, msgspec.structs.replace(record, state=JobState.CANCELLED))
        elif outcome is HandBackOutcome.DEAD:
            dead = msgspec.structs.replace(record, state=JobState.DEAD, error_reason="ATTEMPTS")
            self._close(held, trace, dead)

    @_harmless
    def left(self, held: HeldJob) -> None:
        """A job is held no more; if it has not ended, the claim has a span of its own."""
        trace, record = held.trace, held.claimed.record
        if trace is None or trace.closed:
            return
        trace.closed = True
        self._spans.emit(
            SpanData(
                name="claim",
                context=trace.context.child(),
                start_ms=held.claimed.now_ms,
                end_ms=_now_ms(held),
                attributes={
                    **_names(record),
                    "batond.claim": record.epoch,
                    "batond.claim.end": trace.fate,
                    "batond.parks": held.parks,
                    **_left_out(trace),
                },
                events=trace.events,
            )
        )

    # -- jobs that wait ---------------------------------------------------------------------------------

    @_harmless
    def ended_waiting(self, names: Iterable[tuple[str, str]]) -> None:
        """Jobs ended that nobody held, named by tenant and id: their records are read in a moment."""
        for name in names:
            if self._ended.full():
                _log.warning("traces_skipped", why="too many jobs end while they wait")
                return
            self._ended.put_nowait(name)

    async def run(self) -> None:
        """Send the spans of jobs that ended while they waited, until cancelled."""
        while True:
            tenant, job_id = await self._ended.get()
            try:
                self._tell(await self._store.get(tenant, job_id))
            except BatondError:
                continue  # Redis is away, or the job is gone.

    @_harmless
    def _tell(self, record: JobRecord) -> None:
        context = TraceContext.read(record.trace)
        if context is None or not context.sampled or not record.state.final:
            return
        events = [*_before(record), _finished(record, record.finished_ms)]
        attributes = _outcome(record) | _times(record, record.started_ms, record.first_token_ms)
        self._spans.emit(_job_span(context, record, record.finished_ms, attributes, events))

    # -- small pieces -----------------------------------------------------------------------------------

    def _note(self, held: HeldJob, trace: JobTrace, name: str, choice: int = 0, **attributes: Value) -> float:
        """Note an event that happens now; returns when that is."""
        now_ms = _now_ms(held)
        if len(trace.events) >= MOST_EVENTS:
            trace.left_out += 1
            return now_ms
        shown: dict[str, Value] = {f"batond.{key}": value for key, value in attributes.items() if value != ""}
        if len(held.choices) > 1:
            shown["batond.choice"] = choice
        trace.events.append((name, now_ms, shown))
        return now_ms

    def _close(self, held: HeldJob, trace: JobTrace, record: JobRecord) -> None:
        trace.closed = True
        now_ms = _now_ms(held)
        output_tokens = sum(len(choice.token_ids) for choice in held.choices)
        attributes = {
            **_outcome(record),
            **_asked(held.claimed.spec),
            **_times(record, trace.started_ms, trace.first_token_ms),
            "gen_ai.usage.output_tokens": output_tokens,
            "gen_ai.response.finish_reasons": [choice.finish_reason or "error" for choice in held.choices],
            **_left_out(trace),
        }
        events = [*_before(record), ("claimed", held.claimed.now_ms, {}), *trace.events]
        events.append(_finished(record, now_ms))
        self._spans.emit(_job_span(trace.context, record, now_ms, attributes, events))


def _job_span(
    context: TraceContext,
    record: JobRecord,
    end_ms: float,
    attributes: dict[str, Value],
    events: list[Event],
) -> SpanData:
    failed = record.state in {JobState.FAILED, JobState.DEAD}
    return SpanData(
        name=f"text_completion {record.model}",
        context=context,
        start_ms=record.created_ms,
        end_ms=end_ms,
        attributes=attributes,
        events=events,
        error=(record.error_reason or "INTERNAL") if failed else "",
    )


def _names(record: JobRecord) -> dict[str, Value]:
    return {
        "batond.tenant": record.tenant,
        "batond.job_id": record.job_id,
        "batond.sla_class": record.sla_class,
    }


def _outcome(record: JobRecord) -> dict[str, Value]:
    """What a record says of an ended job; names of the GenAI conventions where they have one."""
    failed = record.state in {JobState.FAILED, JobState.DEAD}
    return {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "batond",
        "gen_ai.request.model": record.model,
        "gen_ai.response.id": record.job_id,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.total_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_prompt_tokens,
        **_names(record),
        "batond.outcome": record.state.value,
        "batond.claims": record.epoch,
        "batond.parks": record.preemptions,
        "batond.recomputed_tokens": record.recomputed_tokens,
        **({"error.type": record.error_reason or "INTERNAL"} if failed else {}),
    }


def _asked(spec: JobSpec) -> dict[str, Value]:
    """How tokens were to be chosen, as far as the GenAI conventions name it."""
    sampling = spec.sampling
    asked: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p if sampling.top_p < 1 else None,
        "top_k": sampling.top_k or None,
        "presence_penalty": sampling.presence_penalty or None,
        "frequency_penalty": sampling.frequency_penalty or None,
        "choice.count": sampling.n if sampling.n > 1 else None,
        "seed": spec.seed if spec.seed <= _LARGEST_INT else None,
    }
    return {f"gen_ai.request.{key}": value for key, value in asked.items() if value is not None}


def _times(record: JobRecord, started_ms: float, first_token_ms: float) -> dict[str, Value]:
    """Seconds from submission: to the first row, and to the first token."""
    times: dict[str, Value] = {}
    if started_ms:
        times["batond.queue_time"] = _s(started_ms - record.created_ms)
    if first_token_ms:
        times["gen_ai.response.time_to_first_chunk"] = _s(first_token_ms - record.created_ms)
    return times


def _before(record: JobRecord) -> list[Event]:
    """What the record says of the time before this claim."""
    events: list[Event] = [("queued", record.created_ms, {})]
    if record.started_ms:
        events.append(("started", record.started_ms, {}))
    if record.first_token_ms:
        events.append(("first_token", record.first_token_ms, {}))
    if record.queued_ms > record.created_ms:
        events.append(("queued", record.queued_ms, {"batond.claims": max(0, record.epoch - 1)}))
    return sorted(events, key=lambda event: event[1])


def _finished(record: JobRecord, at_ms: float) -> Event:
    return ("finished", at_ms, {"batond.outcome": record.state.value})


def _left_out(trace: JobTrace) -> dict[str, Value]:
    return {"batond.events_left_out": trace.left_out} if trace.left_out else {}


def _now_ms(held: HeldJob) -> float:
    """Redis's clock, as it goes on from the claim."""
    return held.claimed.now_ms + (time.monotonic() - held.claimed_s) * 1000


def _s(ms: float) -> float:
    return math.floor(max(0.0, ms)) / 1000
