"""What the queue stores and hands out. JSON or plain hash fields, checked when read; never pickled.

Some lines above 400: it is a list of records and is looked up, not read.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, Final

import msgspec

from batond.daemon.requests.params import MAX_N, SamplingParams
from batond.daemon.wire.messages import TokenLogprobs

#: What Lua's numbers hold exactly.
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]

#: What the contract and the wire have room for.
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
MOST_SEED: Final = (1 << 64) - 1


class JobState(enum.StrEnum):
    """Where a job stands. `scripts/common.lua` holds the moves; the last four states are final."""

    QUEUED = "queued"  # waits in its class's queue
    CLAIMED = "claimed"  # a daemon holds it, nothing came out under this claim yet
    RUNNING = "running"
    PARKED = "parked"  # pre-empted inside its daemon; for information
    SUCCEEDED = "succeeded"
    CANCELLED = "cancelled"
    FAILED = "failed"
    DEAD = "dead"  # took its daemon down too often, or unreadable: see its dead letter

    @property
    def final(self) -> bool:
        """Whether the job has ended."""
        return self in FINAL_STATES


FINAL_STATES: Final = frozenset({JobState.SUCCEEDED, JobState.CANCELLED, JobState.FAILED, JobState.DEAD})


class GarbageError(ValueError):
    """What lies in Redis is not what we store there. Internal: turned into a dead letter."""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to run, as the accepting front resolved it: any daemon gets the same tokens from it.

    Attributes:
        prompt_token_ids: At least one.
        sampling: As asked, checked.
        seed: Resolved at submit, so that a continuation draws as the first run would have.
        prompt_text: The rendered prompt, for display; empty if tokens were given.
        labels: The tenant's own annotations.
        asked_class: The class the client named; empty if it named none.
        session_id: The tenant's conversation that it is a turn of; empty is none.
    """

    prompt_token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    sampling: SamplingParams
    seed: int
    prompt_text: str = ""
    labels: dict[str, str] = {}
    asked_class: str = ""
    session_id: str = ""


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A job's hash in Redis. Times are milliseconds of the Redis clock; 0 is never.

    Attributes:
        tenant: Who pays.
        job_id: Unique inside the tenant.
        model: Whose queue it is in.
        sla_class: Name of the class, effective.
        state: See JobState.
        body_hash: Hash of the request; tells an attach from a conflict.
        arrival_us: Place in the queue, kept over hand-backs; unique in the model.
        epoch: Fencing token: grows with each claim, every write is checked against it.
        owner: Daemon that holds it, or empty.
        attempts: Claims that ended with the death of an engine, or of a daemon, that had no other job in it.
        handed_back: Claims that were given back in order, as by a drain.
        lapses: Claims whose lease ran out among others: its daemon died or was paused, nobody knows why.
        choices: Generations wanted, each with an output of its own.
        output_tokens: Committed tokens of choice 0.
        choice_tokens: Those of the other choices that have any, by their index.
        prompt_tokens: Tokens of the prompt, as counted at submit or by the engine.
        preemptions: Parks over all claims.
        recomputed_tokens: Tokens computed again after a park, over all claims.
        cached_prompt_tokens: Prompt tokens that a session's kept slice saved, in the last claim.
        cancel_requested: Somebody asked; the daemon that holds it ends it.
        finish_reason: `FinishReason` of a job that ended well, or "cancelled".
        error_reason: As in errors.py, if it failed or is dead.
        error_message: For the tenant.
        ttl_ms: How long the result is kept from the end.
        created_ms: Accepted.
        queued_ms: Entered the queue last.
        claimed_ms: Claimed last.
        started_ms: First row, or first output.
        first_token_ms: First committed token.
        finished_ms: Ended.
        expires_ms: The result goes away.
        waited_ms: Spent in the queue, over all stays, up to the last claim or the end.
        deadline_ms: When its last token must be out; a job that waits or runs then fails DEADLINE_EXCEEDED.
        start_by_ms: When it must have got its first row: else the same.
        trace: Its place in its caller's trace (telemetry/trace_context.py); empty if it is not traced.
    """

    tenant: str
    job_id: str
    model: str
    sla_class: str
    state: JobState
    body_hash: str
    arrival_us: Count
    epoch: Count = 0
    owner: str = ""
    attempts: Count = 0
    handed_back: Count = 0
    lapses: Count = 0
    choices: Annotated[int, msgspec.Meta(ge=1, le=MAX_N)] = 1
    output_tokens: Count = 0
    choice_tokens: dict[Count, Count] = {}
    prompt_tokens: Count = 0
    preemptions: Count = 0
    recomputed_tokens: Count = 0
    cached_prompt_tokens: Count = 0
    cancel_requested: bool = False
    finish_reason: str = ""
    error_reason: str = ""
    error_message: str = ""
    ttl_ms: Count
    created_ms: Count
    queued_ms: Count = 0
    claimed_ms: Count = 0
    started_ms: Count = 0
    first_token_ms: Count = 0
    finished_ms: Count = 0
    expires_ms: Count = 0
    waited_ms: Count = 0
    deadline_ms: Count = 0
    start_by_ms: Count = 0
    trace: str = ""

    @property
    def total_output_tokens(self) -> int:
        """Committed tokens of all choices."""
        return self.output_tokens + sum(self.choice_tokens.values())


class Chunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Output committed at once. What a job did not ask for takes no room.

    Attributes:
        first_index: Counts from the first output token of its choice.
        token_ids: The tokens; none where the chunk flushes text.
        text: May lag behind the tokens (UTF-8 and stop-string hold-back); the concatenation over all chunks
            is the choice's text.
        choice: Which of the job's choices it belongs to.
        logprobs: One per token, if the job wants them.
        prompt_logprobs: One per prompt token, None for the first; with the first tokens of choice 0 alone.
        finish_reason: Set with the last chunk of a choice of several: why it ended.
    """

    first_index: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    token_ids: list[TokenId]
    text: str = ""
    choice: Annotated[int, msgspec.Meta(ge=0, lt=MAX_N)] = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str = ""


class CommittedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What earlier claims committed of one choice.

    Attributes:
        token_ids: The engine continues after them.
        text: The continuation's text follows it.
        finish_reason: Set if the choice has ended, while others of its job have not.
    """

    token_ids: list[int] = []
    text: str = ""
    finish_reason: str = ""


class ClaimedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job this daemon holds now, with what earlier claims committed.

    Attributes:
        record: As it stands after the claim; `record.epoch` must come with every write.
        spec: What to run.
        choices: What is committed, of each choice.
        now_ms: Redis clock at the claim: what is left to the record's deadlines is counted from it.
    """

    record: JobRecord
    spec: JobSpec
    choices: list[CommittedChoice]
    now_ms: int = 0

    @property
    def deadline_in_ms(self) -> int | None:
        """Left to its deadline at the claim; None if it has none."""
        return self.record.deadline_ms - self.now_ms if self.record.deadline_ms else None

    @property
    def start_in_ms(self) -> int | None:
        """Left at the claim to get its first row; None if it may wait, or had one."""
        if not self.record.start_by_ms or self.record.started_ms:
            return None
        return self.record.start_by_ms - self.now_ms

    @property
    def token_ids(self) -> list[int]:
        """Committed tokens of choice 0."""
        return self.choices[0].token_ids

    @property
    def text(self) -> str:
        """Committed text of choice 0."""
        return self.choices[0].text


class StepCommit(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one step did to one job. Empty strings and -1 leave a field as it is.

    Attributes:
        tenant: With `job_id`, whose it is.
        job_id: See `tenant`.
        epoch: Of the claim under which this was computed.
        chunks: Output, at most one a choice, each at its index: a replay does nothing; all go in or none.
        state: RUNNING or PARKED, or SUCCEEDED, CANCELLED, FAILED: then the chunks and the end are one.
        prompt_tokens: As counted by the engine.
        preemptions: Over all claims: those of `ClaimedJob.record` plus this claim's.
        recomputed_tokens: Over all claims, like `preemptions`.
        cached_prompt_tokens: In this claim.
        finish_reason: With SUCCEEDED or CANCELLED.
        error_reason: With FAILED, as in errors.py.
        error_message: With FAILED, for the tenant.
    """

    tenant: str
    job_id: str
    epoch: int
    chunks: tuple[Chunk, ...] = ()
    state: JobState | None = None
    prompt_tokens: int = -1
    preemptions: int = -1
    recomputed_tokens: int = -1
    cached_prompt_tokens: int = -1
    finish_reason: str = ""
    error_reason: str = ""
    error_message: str = ""


class Why(enum.StrEnum):
    """Why a write was refused."""

    MISSING = "missing"  # no such job, or it expired: forget it
    FINAL = "final"  # ended already: forget it
    FENCED = "fenced"  # another claim is or was made since: forget it, another daemon has it
    GAP = "gap"  # the chunk starts after the committed tokens: commit what is between first
    OVERLAP = "overlap"  # the chunk starts inside and ends after the committed tokens: cut it


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A write that changed nothing. `output_tokens` is what its choice has committed, where that matters."""

    tenant: str
    job_id: str
    why: Why
    output_tokens: int


class CommitResult(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a step's commit.

    Attributes:
        refused: Writes that changed nothing; the others are durable as the server's configuration says.
        cancel: (tenant, job id) of committed, live jobs that somebody asked to cancel.
    """

    refused: list[Refusal]
    cancel: list[tuple[str, str]]


class Renewal(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a renewal, as (tenant, job id): jobs no longer ours, to cancel, updated since the claim."""

    lost: list[tuple[str, str]]
    cancel: list[tuple[str, str]]
    updated: list[tuple[str, str]] = []


class HandBackOutcome(enum.StrEnum):
    """What became of a job that was given up."""

    QUEUED = "queued"
    CANCELLED = "cancelled"  # a cancel was waiting for it
    DEAD = "dead"  # attempts used up
    REFUSED = "refused"  # not ours any more: nothing happened


class Reaped(msgspec.Struct, frozen=True, kw_only=True):
    """What a reap did; jobs as (tenant, job id)."""

    requeued: list[tuple[str, str]]
    cancelled: list[tuple[str, str]]
    dead: list[tuple[str, str]]
    late: list[tuple[str, str]]  # Failed DEADLINE_EXCEEDED.
    swept: int  # Expired jobs and dead letters removed.


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs of a tenant, newest first. An empty `next_cursor` ends the list; a short page does not."""

    jobs: list[JobRecord]
    next_cursor: str


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a waiting job stands.

    Attributes:
        ahead: Jobs that will be claimed before it, those of more urgent classes included.
        start_ms: When it is expected to get its row, by the Redis clock; 0 if too little is known.
        left_ms: The same from when it was asked.
    """

    ahead: int
    start_ms: int = 0
    left_ms: int = 0


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """Evidence of something that must not be tried again by itself. Fit to be shown, whatever lay in Redis.

    Attributes:
        name: Reference of the job; `garbage:...` with what was found, made printable; or `raw:...`, bytes
            percent-encoded, where somebody wrote into the list by hand.
        reason: `ATTEMPTS`, `BAD_RECORD` or `GARBAGE`.
        message: For the operator.
        died_ms: Redis clock; 0 if that isn't known.
        history: One line a claim that ended badly: when (ms), epoch, owner, why.
        tenant: As the name says; empty if there is no job.
        job_id: As `tenant`.
        sla_class: Of the job's record; empty if that says none.
        attempts: Of the job's record; 0 if that says none.
        obstacle: Why it can't be retried; empty if it can.
    """

    name: str
    reason: str
    message: str
    died_ms: int
    history: str = ""
    tenant: str = ""
    job_id: str = ""
    sla_class: str = ""
    attempts: int = 0
    obstacle: str = ""

    @property
    def is_job(self) -> bool:
        """Whether it names a job."""
        return bool(self.job_id)


class DeadPage(msgspec.Struct, frozen=True, kw_only=True):
    """Dead letters of all tenants, newest first. An empty `next_cursor` ends the list."""

    letters: list[DeadLetter]
    next_cursor: str


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Figures for metrics.

    Attributes:
        queued: Waiting jobs by class.
        oldest_wait_ms: Time for which each class's first waiting job has waited, over all its stays.
        held: Jobs under lease, all daemons.
        dead: Dead letters.
        totals: Monotonic: submitted, claimed, succeeded, cancelled, failed, dead, handed_back, reaped,
            late, garbage, reaps.
    """

    queued: dict[str, int]
    oldest_wait_ms: dict[str, int]
    held: int
    dead: int
    totals: dict[str, int]


class NoticeKind(enum.StrEnum):
    """What a daemon is told."""

    SYNC = "sync"  # (re)connected: notices may have been lost, look for yourself
    WAKE = "wake"  # a job waits in class `sla_class`
    CANCEL = "cancel"  # cancel `tenant`, `job_id`
    UPDATE = "update"  # class or deadline of `tenant`, `job_id` has changed


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """One message to a daemon."""

    kind: NoticeKind
    sla_class: str = ""
    tenant: str = ""
    job_id: str = ""


def decode_spec(raw: bytes | None) -> JobSpec:
    """Reads a spec.

    Raises:
        GarbageError: It is none; the message says where.
    """
    if raw is None:
        raise GarbageError("the spec is missing")
    try:
        spec = msgspec.json.decode(raw, type=JobSpec)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise GarbageError(f"spec: {error}") from error
    if not 0 <= spec.seed <= MOST_SEED:
        raise GarbageError("spec: the seed is no number of 64 bits")
    return spec


def decode_record(flat: list[bytes]) -> JobRecord:
    """Reads a hash as HGETALL gives it inside a script: name, value, name, value ...

    Raises:
        GarbageError: It is no job record; the message says where.
    """
    try:
        text = [item.decode() for item in flat]
        fields: dict[str, Any] = dict(zip(text[::2], text[1::2], strict=True))
        fields["choice_tokens"] = {
            name.partition("#")[2]: value
            for name, value in fields.items()
            if name.startswith("output_tokens#")
        }
        return msgspec.convert(fields, JobRecord, strict=False, str_keys=True)
    except (msgspec.ValidationError, ValueError) as error:
        raise GarbageError(f"record: {error}") from error


def encode_chunk(chunk: Chunk) -> bytes:
    """Writes a chunk as stored: MessagePack, since numbers of log-probabilities are twice as long in JSON."""
    return msgspec.msgpack.encode(chunk)


def decode_chunk(raw: bytes) -> Chunk:
    """Reads a chunk.

    Raises:
        GarbageError: It is none.
    """
    try:
        chunk = msgspec.msgpack.decode(raw, type=Chunk)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise GarbageError(f"output: {error}") from error
    if chunk.logprobs is not None and len(chunk.logprobs) != len(chunk.token_ids):
        raise GarbageError(
            f"output: {len(chunk.logprobs)} log-probabilities of {len(chunk.token_ids)} tokens"
        )
    return chunk
