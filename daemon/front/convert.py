"""From the queue's records to the contract's messages."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from google.protobuf import duration_pb2, timestamp_pb2

from batond.daemon.front.follow import InLine
from batond.daemon.front.held import job_of
from batond.daemon.front.hub import CameBack, GotRow, LostRow
from batond.daemon.front.status import code_of_reason
from batond.daemon.front.steps import choice_of
from batond.daemon.queue import Chunk, JobState
from batond.daemon.queue.dead import LATEST_MS
from batond.daemon.wire.messages import GovernorState, QueryState
from batond.v1 import admin_pb2, types_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from batond.daemon.front.follow import FollowEvent
    from batond.daemon.front.recent import Recent, Times
    from batond.daemon.queue import DeadLetter, JobRecord, JobSpec, Place
    from batond.daemon.queue.registry import DaemonRecord
    from batond.daemon.wire.messages import MemorySnapshot, Snapshot, TokenLogprobs
    from batond.policies.classes import SlaClass

MOST_COUNT: Final = (1 << 32) - 1
NS_PER_S: Final = 1_000_000_000
STATES: Final[dict[JobState, types_pb2.JobState]] = {
    JobState.QUEUED: types_pb2.JOB_STATE_QUEUED,
    JobState.CLAIMED: types_pb2.JOB_STATE_RUNNING,
    JobState.RUNNING: types_pb2.JOB_STATE_RUNNING,
    JobState.PARKED: types_pb2.JOB_STATE_PARKED,
    JobState.SUCCEEDED: types_pb2.JOB_STATE_SUCCEEDED,
    JobState.CANCELLED: types_pb2.JOB_STATE_CANCELLED,
    JobState.FAILED: types_pb2.JOB_STATE_FAILED,
    JobState.DEAD: types_pb2.JOB_STATE_FAILED,
}
#: The queue's states that clients see as one.
STORED_STATES: Final[dict[int, tuple[JobState, ...]]] = {
    int(shown): tuple(stored for stored, seen in STATES.items() if seen == shown) for shown in STATES.values()
}
_FINISH_REASONS: Final[dict[str, types_pb2.FinishReason]] = {
    "length": types_pb2.FINISH_REASON_LENGTH,
    "stop": types_pb2.FINISH_REASON_STOP,
    "cancelled": types_pb2.FINISH_REASON_CANCELLED,
    "error": types_pb2.FINISH_REASON_ERROR,
}
_QUERY_STATES: Final[dict[QueryState, admin_pb2.QueryState]] = {
    QueryState.WAITING: admin_pb2.QUERY_STATE_WAITING,
    QueryState.PREFILLING: admin_pb2.QUERY_STATE_PREFILLING,
    QueryState.READY: admin_pb2.QUERY_STATE_READY,
    QueryState.RUNNING: admin_pb2.QUERY_STATE_RUNNING,
    QueryState.PARKED: admin_pb2.QUERY_STATE_PARKED,
}
_GOVERNOR_STATES: Final[dict[GovernorState, admin_pb2.GovernorState]] = {
    GovernorState.OFF: admin_pb2.GOVERNOR_STATE_OFF,
    GovernorState.STEADY: admin_pb2.GOVERNOR_STATE_STEADY,
    GovernorState.SHRINKING: admin_pb2.GOVERNOR_STATE_SHRINKING,
    GovernorState.CRITICAL: admin_pb2.GOVERNOR_STATE_CRITICAL,
    GovernorState.GROWING: admin_pb2.GOVERNOR_STATE_GROWING,
    GovernorState.LOST: admin_pb2.GOVERNOR_STATE_LOST,
}


#: States of daemons as they stand in the registry.
DAEMON_STATES: Final[dict[admin_pb2.ServerState, str]] = {
    admin_pb2.SERVER_STATE_LOADING: "loading",
    admin_pb2.SERVER_STATE_READY: "ready",
    admin_pb2.SERVER_STATE_DRAINING: "draining",
    admin_pb2.SERVER_STATE_DEGRADED: "degraded",
}
_DAEMON_STATES: Final = {name: state for state, name in DAEMON_STATES.items()}


def daemon(record: DaemonRecord) -> admin_pb2.Daemon:
    """A daemon; a state that only a newer release knows is unspecified."""
    return admin_pb2.Daemon(
        daemon_id=record.id,
        model=record.model,
        address=record.address,
        state=_DAEMON_STATES.get(record.state, admin_pb2.SERVER_STATE_UNSPECIFIED),
        rows=record.rows,
        running_jobs=record.running_jobs,
        version=record.version,
        start_time=timestamp(record.started_ms),
    )


def timestamp(ms: float) -> timestamp_pb2.Timestamp:
    """Milliseconds since 1970; what lies beyond the year 9999, written by hand, is its end."""
    stamp = timestamp_pb2.Timestamp()
    stamp.FromNanoseconds(int(min(max(ms, 0), LATEST_MS) * 1_000_000))
    return stamp


def duration(seconds: float) -> duration_pb2.Duration:
    """Seconds."""
    span = duration_pb2.Duration()
    span.FromNanoseconds(int(min(seconds, LATEST_MS / 1000) * 1e9))
    return span


def _shown(count: int) -> int:
    """A counter as 32 bits show it: records may have been written by hand."""
    return min(count, MOST_COUNT)


def queue_time_s(record: JobRecord, now_ms: float) -> float:
    """From being accepted to the first row, or until now by the clock of Redis."""
    end_ms = record.started_ms or record.finished_ms or now_ms
    return max(end_ms - record.created_ms, 0) / 1000


def job(
    record: JobRecord,
    chunks: Sequence[Chunk] = (),
    *,
    now_ms: float,
    place: Place | None = None,
    spec: JobSpec | None = None,
) -> types_pb2.Job:
    """Describe a job.

    Args:
        record: Its record.
        chunks: Its output, if it shall be included, that of each choice in order.
        now_ms: By the clock of Redis.
        place: Where it stands, if it waits and that is known.
        spec: What it runs; without it, labels and the class that was asked for are left out.
    """
    shown = types_pb2.Job(
        job_id=record.job_id,
        tenant=record.tenant,
        model=record.model,
        state=STATES[record.state],
        sla_class=spec.asked_class if spec else "",
        effective_sla_class=record.sla_class,
        queue_time=duration(queue_time_s(record, now_ms)),
        queue_position=0 if place is None else place.ahead + 1,
        preemptions=_shown(record.preemptions),
        recomputed_tokens=record.recomputed_tokens,
        prompt_tokens=_shown(record.prompt_tokens),
        cached_prompt_tokens=_shown(record.cached_prompt_tokens),
        output_tokens=_shown(record.total_output_tokens),
        finish_reason=_finish_reason(record.finish_reason),
        attempts=_shown(max(0, record.epoch - record.handed_back)),
        labels=spec.labels if spec else None,
    )
    shown.created_time.CopyFrom(timestamp(record.created_ms))
    if place is not None and place.start_ms:
        shown.estimated_start_time.CopyFrom(timestamp(place.start_ms))
    if record.deadline_ms:
        shown.deadline.CopyFrom(timestamp(record.deadline_ms))
    if record.started_ms:
        shown.started_time.CopyFrom(timestamp(record.started_ms))
    if record.finished_ms:
        shown.finished_time.CopyFrom(timestamp(record.finished_ms))
    if chunks:
        _add_output(shown, chunks, choices=record.choices, prompt=spec.prompt_token_ids if spec else ())
    if shown.state == types_pb2.JOB_STATE_FAILED:
        shown.finish_reason = types_pb2.FINISH_REASON_ERROR
        shown.error.code = code_of_reason(record.error_reason)
        shown.error.reason = record.error_reason
        shown.error.message = record.error_message
    return shown


def _add_output(
    shown: types_pb2.Job, chunks: Sequence[Chunk], *, choices: int, prompt: Sequence[int]
) -> None:
    """Put in what the choices emitted: the first's at the top, and each by itself if there are several."""
    outputs = [types_pb2.Choice(index=index) for index in range(choices)]
    texts: list[list[str]] = [[] for _ in outputs]  # A message's text that grows is copied with each chunk.
    for chunk in chunks:
        if chunk.choice >= choices:
            continue  # Written by hand.
        output = outputs[chunk.choice]
        texts[chunk.choice].append(chunk.text)
        output.token_ids.extend(chunk.token_ids)
        if chunk.logprobs is not None:
            output.logprobs.extend(token_logprobs(chunk.token_ids, chunk.logprobs))
        if chunk.finish_reason:
            output.finish_reason = _finish_reason(chunk.finish_reason)
        if chunk.prompt_logprobs is not None:
            shown.prompt_logprobs.extend(token_logprobs(prompt, chunk.prompt_logprobs))
    for output, parts in zip(outputs, texts, strict=True):
        output.text = "".join(parts)
    shown.output_token_ids.extend(outputs[0].token_ids)
    shown.logprobs.extend(outputs[0].logprobs)
    shown.text = outputs[0].text
    if choices > 1:
        shown.choices.extend(outputs)


def _finish_reason(reason: str) -> types_pb2.FinishReason:
    return _FINISH_REASONS.get(reason, types_pb2.FINISH_REASON_UNSPECIFIED)


def token_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None] | None
) -> Iterator[types_pb2.TokenLogprobs]:
    """Describe the log-probabilities of some tokens.

    Args:
        token_ids: The tokens.
        logprobs: One per token; None gives nothing.
    """
    if logprobs is None or len(logprobs) != len(token_ids):  # As for another prompt: written by hand.
        return
    for token_id, one in zip(token_ids, logprobs, strict=True):
        shown = types_pb2.TokenLogprobs(token_id=token_id)
        if one is not None:
            shown.logprob = one.logprob
            for top_id, logprob in one.top:
                shown.top.add(token_id=top_id, logprob=logprob)
        yield shown


def stream_event(
    event: FollowEvent,
    sequence: int,
    *,
    ended: types_pb2.Job | None = None,
    prompt_token_ids: Sequence[int] = (),
    shown: types_pb2.StreamEvent | None = None,
) -> types_pb2.StreamEvent:
    """Describe what happened to a job.

    Args:
        event: What happened.
        sequence: Number of the event in its stream.
        ended: The whole job, if the event is its end.
        prompt_token_ids: The job's prompt, if the event brings its log-probabilities.
        shown: An empty message to write it into, which it is a part of; None makes one.
    """
    shown = types_pb2.StreamEvent() if shown is None else shown
    shown.sequence = sequence
    if isinstance(event, Chunk):
        _show_chunk(event, shown, prompt_token_ids)
        return shown
    shown.time.GetCurrentTime()
    match event:
        case InLine():
            shown.queued.job_id = event.record.job_id
            shown.queued.effective_sla_class = event.record.sla_class
            if event.place is not None:
                shown.queued.position = event.place.ahead + 1
                if event.place.start_ms:
                    shown.queued.estimated_start_time.CopyFrom(timestamp(event.place.start_ms))
        case GotRow():
            shown.started.SetInParent()
            shown.started.reason = event.reason
        case LostRow():
            shown.preempted.reason, shown.preempted.kept = event.cause, event.kept
            shown.preempted.choice = event.choice
        case CameBack():
            shown.resumed.SetInParent()
            shown.resumed.choice, shown.resumed.reason = event.choice, event.reason
        case _:
            shown.finished.job.CopyFrom(ended or job(event.record, now_ms=event.record.finished_ms))
    return shown


def _show_chunk(chunk: Chunk, shown: types_pb2.StreamEvent, prompt_token_ids: Sequence[int]) -> None:
    """Describe output. Once a token and stream: nothing is touched that most chunks don't have."""
    # GetCurrentTime() goes through a calendar, and takes longer than all the rest.
    shown.time.seconds, shown.time.nanos = divmod(time.time_ns(), NS_PER_S)
    shown.chunk.token_ids.extend(chunk.token_ids)
    shown.chunk.first_token_index, shown.chunk.text, shown.chunk.choice = (
        chunk.first_index,
        chunk.text,
        chunk.choice,
    )
    if chunk.finish_reason:
        shown.chunk.finish_reason = _finish_reason(chunk.finish_reason)
    if chunk.logprobs is not None:
        shown.chunk.logprobs.extend(token_logprobs(chunk.token_ids, chunk.logprobs))
    if chunk.prompt_logprobs is not None:
        shown.chunk.prompt_logprobs.extend(token_logprobs(prompt_token_ids, chunk.prompt_logprobs))


def snapshot(shot: Snapshot, queued_jobs: int) -> admin_pb2.BatchSnapshot:
    """Describe the batch.

    Args:
        shot: The engine's snapshot; its query ids are the references of jobs.
        queued_jobs: Jobs that no engine has taken.
    """
    batch = admin_pb2.BatchSnapshot(
        step=shot.step,
        columns=shot.columns,
        host_pool_used_bytes=shot.host_pool_used_bytes,
        host_pool_bytes=shot.host_pool_bytes,
        queued_jobs=queued_jobs,
        counters=shot.counters,
    )
    batch.time.GetCurrentTime()
    batch.memory.CopyFrom(_memory(shot.memory))
    for row in shot.rows:
        entry = batch.rows.add(row=row.row)
        if row.query_id:
            entry.job_id, entry.choice = job_of(row.query_id)[1], choice_of(row.query_id)
            entry.tenant, entry.sla_class = row.tenant, row.sla_class
            entry.cached_tokens, entry.output_tokens = row.tokens, row.output_tokens
            entry.max_tokens = row.max_tokens
    for query in shot.queries:
        if query.state not in _QUERY_STATES:
            continue  # It has just ended.
        batch.queries.add(
            job_id=job_of(query.query_id)[1],
            choice=choice_of(query.query_id),
            tenant=query.tenant,
            sla_class=query.sla_class,
            state=_QUERY_STATES[query.state],
            prompt_tokens=query.prompt_tokens,
            prefilled_tokens=query.prefilled_tokens,
            output_tokens=query.output_tokens,
            max_tokens=query.max_tokens,
            parks=query.parks,
            parked_bytes=query.parked_bytes,
            held=query.held,
        )
    return batch


def _memory(memory: MemorySnapshot) -> admin_pb2.MemorySnapshot:
    return admin_pb2.MemorySnapshot(
        committed_bytes=memory.committed_bytes,
        pooled_bytes=memory.pooled_bytes,
        reserved_bytes=memory.reserved_bytes,
        parked_bytes=memory.parked_bytes,
        spilled_bytes=memory.spilled_bytes,
        kv_budget_bytes=memory.kv_budget_bytes,
        row_limit=memory.row_limit,
        governor=_GOVERNOR_STATES[memory.governor],
        reason=memory.reason,
        total_bytes=memory.total_bytes,
        free_bytes=memory.free_bytes,
        own_bytes=memory.own_bytes,
    )


def class_snapshot(sla: SlaClass, recent: Recent) -> admin_pb2.ClassSnapshot:
    """Describe how a class fares."""
    now_s = time.monotonic()
    shown = admin_pb2.ClassSnapshot(sla_class=sla.name)
    _times(shown.first_token, recent.first_tokens(sla.name, now_s), sla.ttft_target_s)
    _times(shown.output_token, recent.output_tokens(sla.name, now_s), sla.tpot_target_s)
    return shown


def _times(shown: admin_pb2.RecentTimes, times: Times, target_s: float) -> None:
    shown.samples = times.samples
    for duration, value_s in ((shown.p50, times.p50_s), (shown.p95, times.p95_s), (shown.target, target_s)):
        if value_s is not None:
            duration.FromNanoseconds(round(value_s * 1e9))


def dead_job(letter: DeadLetter) -> admin_pb2.DeadJob:
    """Describe what was given up for good."""
    shown = admin_pb2.DeadJob(
        name=letter.name,
        tenant=letter.tenant,
        job_id=letter.job_id,
        sla_class=letter.sla_class,
        reason=letter.reason,
        message=letter.message,
        attempts=letter.attempts,
        evidence=letter.history.splitlines(),
        can_retry=not letter.obstacle,
        obstacle=letter.obstacle,
    )
    if letter.died_ms:
        shown.died_time.CopyFrom(timestamp(letter.died_ms))
    return shown
