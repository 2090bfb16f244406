"""What the queue's scripts take and give, in Python's terms."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import msgspec

from batond.daemon.errors import BatondError, DeadlineError, ExhaustedError, NotFoundError, StateError
from batond.daemon.queue.keys import job_ref, split_ref
from batond.daemon.queue.records import (
    ClaimedJob,
    CommittedChoice,
    GarbageError,
    JobState,
    Renewal,
    StepCommit,
    decode_chunk,
    decode_record,
    decode_spec,
    encode_chunk,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batond.daemon.queue.calls import Argument
    from batond.daemon.queue.limits import TenantLimits

_PACK: Final = msgspec.msgpack.Encoder()
_TEXT_HEADER: Final = struct.Struct(">BI")
_TEXT32: Final = 0xDB
#: Verdicts of `submit.lua` that made no job.
REFUSALS: Final = frozenset({b"full", b"quota", b"late"})
COMMITTABLE: Final = frozenset(
    {JobState.RUNNING, JobState.PARKED, JobState.SUCCEEDED, JobState.CANCELLED, JobState.FAILED}
)


def refused_submit(
    verdict: bytes, number: int, retry_ms: int, max_queued: int, limits: TenantLimits
) -> BatondError:
    """The error for a refused submit; `number` is waiting jobs, or for a late one the ms it is late."""
    if verdict == b"late":
        return DeadlineError(
            f"the deadline passed {number} ms ago, by the clock of Redis: the job was not queued",
            late_ms=number,
            queue_ms=0,
        )
    if verdict == b"quota":
        return ExhaustedError(
            f"this tenant has {number} waiting jobs, its limit is {limits.queued}: retry later",
            reason="TENANT_QUEUE_FULL",
            quota="max_queued",
            waiting=number,
            limit=limits.queued,
            retry_ms=retry_ms,
        )
    return ExhaustedError(
        f"the queue holds {number} waiting jobs, its limit is {max_queued}: retry later",
        reason="QUEUE_FULL",
        waiting=number,
        limit=max_queued,
        retry_ms=retry_ms,
    )


def refused_update(verdict: bytes, job_id: str, answer: Any) -> BatondError:
    """The error for a refused update; `answer` is the record, or for a late one the ms it is late."""
    if verdict == b"missing":
        return NotFoundError(f"there is no job {job_id!r} of this tenant", job_id=job_id)
    if verdict == b"late":
        return DeadlineError(
            f"the deadline passed {answer} ms ago, by the clock of Redis: nothing was changed", late_ms=answer
        )
    if verdict == b"moved":
        return StateError(
            f"job {job_id!r} is being changed by somebody else: look, then decide", job_id=job_id
        )
    state = dict(zip(answer[::2], answer[1::2], strict=True)).get(b"state", b"").decode(errors="replace")
    return StateError(
        f"job {job_id!r} is {state}: only a job that has not ended can be updated", job_id=job_id, state=state
    )


def encode_limits(tenants: Mapping[str, TenantLimits]) -> bytes:
    """What `claim.lua` has to know of tenants: quoted name -> weight, running, tokens per minute."""
    if not tenants:
        return b""
    return msgspec.json.encode(
        {
            quote(name, safe=""): (one.weight, one.running, one.tokens_per_minute)
            for name, one in tenants.items()
        }
    )


def renew_args(owner: str, held: Sequence[tuple[str, str, int]], lease_ms: int) -> list[Argument]:
    """Arguments of `renew.lua`."""
    args: list[Argument] = [owner, lease_ms]
    for tenant, job_id, epoch in held:
        args += [job_ref(tenant, job_id), epoch]
    return args


def parse_renewal(reply: list[list[bytes]]) -> Renewal:
    """Answer of `renew.lua`."""
    lost, cancel, updated = ([split_ref(ref.decode()) for ref in refs] for refs in reply)
    return Renewal(lost=lost, cancel=cancel, updated=updated)


def encode_commits(commits: Sequence[StepCommit]) -> bytes:
    """What `commit_step.lua` takes: one argument, however many jobs; a client packs arguments one by one."""
    return _PACK.encode([_commit(commit) for commit in commits])


def _commit(commit: StepCommit) -> tuple[object, ...]:
    if commit.state is not None and commit.state not in COMMITTABLE:
        raise BatondError(f"a step can't make a job {commit.state}", reason="WRONG_STATE")
    return (
        job_ref(commit.tenant, commit.job_id),
        str(commit.epoch),
        commit.state or "",
        # As text, as they stand in the record: nothing is written that is there already.
        str(commit.prompt_tokens),
        str(commit.preemptions),
        str(commit.recomputed_tokens),
        str(commit.cached_prompt_tokens),
        commit.finish_reason,
        commit.error_reason,
        commit.error_message,
        [
            (
                chunk.choice,
                chunk.first_index,
                len(chunk.token_ids),
                chunk.finish_reason != "",
                _raw(encode_chunk(chunk)),
            )
            for chunk in commit.chunks
        ],
    )


def _raw(data: bytes) -> msgspec.Raw:
    """Bytes as MessagePack's text: every server's Lua reads that, and to Lua it is the same."""
    return msgspec.Raw(_TEXT_HEADER.pack(_TEXT32, len(data)) + data)


def decode_claimed(
    raw_ref: bytes,
    flat: list[bytes],
    spec: bytes | None,
    outputs: list[list[tuple[bytes, list[bytes]]]],
    now_ms: int,
) -> ClaimedJob:
    """Reads one job of a claim's reply, trusting nothing.

    Raises:
        GarbageError: Something in it is not ours.
    """
    record = decode_record(flat)
    try:
        named = job_ref(record.tenant, record.job_id).encode()
    except BatondError as error:
        raise GarbageError(f"record: {error}") from error
    if named != raw_ref:
        raise GarbageError("record: it names another job")
    job = ClaimedJob(
        record=record,
        spec=decode_spec(spec),
        choices=[_committed(output) for output in outputs],
        now_ms=now_ms,
    )
    if not len(outputs) == record.choices == job.spec.sampling.n:
        raise GarbageError(f"record: {record.choices} choices, the spec says {job.spec.sampling.n}")
    for index, choice in enumerate(job.choices):
        said = record.choice_tokens.get(index, 0) if index else record.output_tokens
        if len(choice.token_ids) != said:
            raise GarbageError(f"output: {len(choice.token_ids)} tokens, the record says {said}")
    return job


def _committed(output: list[tuple[bytes, list[bytes]]]) -> CommittedChoice:
    """Reads the output of one choice."""
    token_ids: list[int] = []
    text: list[str] = []
    finish_reason = ""
    for _, pairs in output:
        chunk = decode_chunk(pairs[1])
        if chunk.first_index != len(token_ids):
            raise GarbageError(f"output: a chunk at {chunk.first_index} follows {len(token_ids)} tokens")
        token_ids += chunk.token_ids
        text.append(chunk.text)
        finish_reason = chunk.finish_reason
    return CommittedChoice(token_ids=token_ids, text="".join(text), finish_reason=finish_reason)
