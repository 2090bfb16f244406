"""From the contract's messages to the values of `model`. Unknown enum values and events are tolerated."""

from __future__ import annotations

from datetime import UTC
from typing import TYPE_CHECKING, TypeVar

from batond.clients import batch, model
from batond.v1 import admin_pb2, types_pb2

if TYPE_CHECKING:
    import enum
    from collections.abc import Iterable
    from datetime import datetime

    from google.protobuf.duration_pb2 import Duration
    from google.protobuf.message import Message
    from google.protobuf.timestamp_pb2 import Timestamp

State = TypeVar("State", bound="enum.StrEnum")


def job(message: types_pb2.Job) -> model.JobInfo:
    """Gives a job."""
    return model.JobInfo(
        job_id=message.job_id,
        tenant=message.tenant,
        model=message.model,
        state=_enum(model.JobState, types_pb2.JobState.items(), message.state),
        sla_class=message.sla_class,
        effective_sla_class=message.effective_sla_class,
        labels=dict(message.labels),
        created_time=_time(message, "created_time"),
        started_time=_time(message, "started_time"),
        finished_time=_time(message, "finished_time"),
        deadline=_time(message, "deadline"),
        queue_time_s=_seconds(message.queue_time),
        queue_position=message.queue_position,
        estimated_start_time=_time(message, "estimated_start_time"),
        preemptions=message.preemptions,
        recomputed_tokens=message.recomputed_tokens,
        prompt_tokens=message.prompt_tokens,
        cached_prompt_tokens=message.cached_prompt_tokens,
        output_tokens=message.output_tokens,
        output_token_ids=tuple(message.output_token_ids),
        text=message.text,
        finish_reason=_finish_reason(message.finish_reason),
        logprobs=_logprobs(message.logprobs),
        prompt_logprobs=_logprobs(message.prompt_logprobs),
        choices=tuple(_choice(one) for one in message.choices),
        error_code=message.error.code,
        error_reason=message.error.reason,
        error_message=message.error.message,
        attempts=message.attempts,
    )


def event(message: types_pb2.StreamEvent) -> model.Event | None:
    """Gives an event; None for one this client is too old to know."""
    found: model.Event | None = None
    match message.WhichOneof("event"):
        case "queued":
            queued = message.queued
            found = model.Queued(
                queued.job_id,
                queued.position,
                queued.effective_sla_class,
                _time(queued, "estimated_start_time"),
            )
        case "started":
            found = model.Started(_seconds(message.started.queue_time), message.started.reason)
        case "chunk":
            found = _chunk(message.chunk)
        case "preempted":
            found = model.Preempted(
                message.preempted.reason, message.preempted.kept, message.preempted.choice
            )
        case "resumed":
            found = model.Resumed(message.resumed.choice, message.resumed.reason)
        case "finished":
            found = model.Finished(job(message.finished.job))
    return found


def server_info(message: admin_pb2.GetServerInfoResponse) -> model.ServerInfo:
    """Gives what the daemon says of itself."""
    return model.ServerInfo(
        version=message.version,
        library_versions=dict(message.library_versions),
        state=_enum(model.ServerState, admin_pb2.ServerState.items(), message.state),
        state_message=message.state_message,
        model=message.model,
        device=message.device,
        rows=message.rows,
        max_query_tokens=message.max_query_tokens,
        vocab_size=message.vocab_size,
        eos_token_ids=tuple(message.eos_token_ids),
        batch_kind=message.batch_kind,
        batch_reason=message.batch_reason,
        preemption_mode=message.preemption_mode,
        policy=message.policy,
        sla_classes=tuple(
            model.SlaClass(one.name, one.order, one.preemptible) for one in message.sla_classes
        ),
        default_sla_class=message.default_sla_class,
        kv_bytes_per_token=message.kv_bytes_per_token,
        host_pool_bytes=message.host_pool_bytes,
        max_message_bytes=message.max_message_bytes,
        start_time=_time(message, "start_time"),
        uptime_s=_seconds(message.uptime),
        tenant=message.tenant,
        max_choices=message.max_choices,
        max_choice_tokens=message.max_choice_tokens,
        daemon_id=message.daemon_id,
    )


def snapshot(message: admin_pb2.BatchSnapshot) -> batch.BatchSnapshot:
    """Gives a snapshot of the batch."""
    rows = tuple(
        batch.RowSnapshot(
            row=row.row,
            job_id=row.job_id,
            tenant=row.tenant,
            sla_class=row.sla_class,
            cached_tokens=row.cached_tokens,
            output_tokens=row.output_tokens,
            max_tokens=row.max_tokens,
            choice=row.choice,
        )
        for row in message.rows
    )
    queries = tuple(
        batch.QuerySnapshot(
            job_id=query.job_id,
            tenant=query.tenant,
            sla_class=query.sla_class,
            state=_enum(batch.QueryState, admin_pb2.QueryState.items(), query.state),
            prompt_tokens=query.prompt_tokens,
            prefilled_tokens=query.prefilled_tokens,
            output_tokens=query.output_tokens,
            max_tokens=query.max_tokens,
            parks=query.parks,
            parked_bytes=query.parked_bytes,
            held=query.held,
            choice=query.choice,
        )
        for query in message.queries
    )
    return batch.BatchSnapshot(
        step=message.step,
        time=_time(message, "time"),
        rows=rows,
        queries=queries,
        columns=message.columns,
        host_pool_used_bytes=message.host_pool_used_bytes,
        host_pool_bytes=message.host_pool_bytes,
        queued_jobs=message.queued_jobs,
        counters=dict(message.counters),
        memory=_memory(message.memory) if message.HasField("memory") else None,
        classes=tuple(
            batch.ClassSnapshot(
                sla_class=one.sla_class,
                first_token=_times(one.first_token),
                output_token=_times(one.output_token),
            )
            for one in message.classes
        ),
    )


def _times(message: admin_pb2.RecentTimes) -> batch.RecentTimes:
    known = {
        f"{name}_s": _seconds(getattr(message, name))
        for name in ("p50", "p95", "target")
        if message.HasField(name)
    }
    return batch.RecentTimes(samples=message.samples, **known)


def _memory(message: admin_pb2.MemorySnapshot) -> batch.MemorySnapshot:
    return batch.MemorySnapshot(
        committed_bytes=message.committed_bytes,
        pooled_bytes=message.pooled_bytes,
        reserved_bytes=message.reserved_bytes,
        parked_bytes=message.parked_bytes,
        spilled_bytes=message.spilled_bytes,
        kv_budget_bytes=message.kv_budget_bytes if message.HasField("kv_budget_bytes") else None,
        row_limit=message.row_limit,
        governor=_enum(batch.GovernorState, admin_pb2.GovernorState.items(), message.governor),
        reason=message.reason,
        total_bytes=message.total_bytes,
        free_bytes=message.free_bytes,
        own_bytes=message.own_bytes,
    )


def _chunk(message: types_pb2.TokenChunk) -> model.Chunk:
    return model.Chunk(
        message.first_token_index,
        tuple(message.token_ids),
        message.text,
        choice=message.choice,
        logprobs=_logprobs(message.logprobs),
        prompt_logprobs=_logprobs(message.prompt_logprobs),
        finish_reason=_finish_reason(message.finish_reason),
    )


def _choice(message: types_pb2.Choice) -> model.Choice:
    return model.Choice(
        index=message.index,
        token_ids=tuple(message.token_ids),
        text=message.text,
        finish_reason=_finish_reason(message.finish_reason),
        logprobs=_logprobs(message.logprobs),
    )


def _logprobs(messages: Iterable[types_pb2.TokenLogprobs]) -> tuple[model.TokenLogprobs, ...]:
    return tuple(
        model.TokenLogprobs(
            one.token_id,
            one.logprob if one.HasField("logprob") else None,
            tuple(model.TopLogprob(top.token_id, top.logprob) for top in one.top),
        )
        for one in messages
    )


def _finish_reason(number: int) -> model.FinishReason:
    return _enum(model.FinishReason, types_pb2.FinishReason.items(), number)


def _enum(kind: type[State], items: list[tuple[str, int]], number: int) -> State:
    """Finds the member whose value is the contract's name without its prefix, in lower case."""
    names = {value: name for name, value in items}
    # The zero value is <PREFIX>_UNSPECIFIED by the contract's rules: it tells the prefix.
    prefix = names[0].removesuffix("UNSPECIFIED")
    value = names.get(number, names[0]).removeprefix(prefix).lower()
    return kind("unknown" if value == "unspecified" else value)


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def _time(message: Message, name: str) -> datetime | None:
    if not message.HasField(name):
        return None
    stamp: Timestamp = getattr(message, name)
    return stamp.ToDatetime(tzinfo=UTC)
