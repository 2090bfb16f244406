"""What the clients give back: plain frozen values, free of protobuf."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime


class JobState(enum.StrEnum):
    """Where a job stands."""

    UNKNOWN = "unknown"  # A state this client is too old to know.
    QUEUED = "queued"
    RUNNING = "running"
    PARKED = "parked"
    SUCCEEDED = "succeeded"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def final(self) -> bool:
        """Whether the job will never change again."""
        return self in {JobState.SUCCEEDED, JobState.CANCELLED, JobState.FAILED}


class FinishReason(enum.StrEnum):
    """Why a generation ended."""

    UNKNOWN = "unknown"  # Not ended yet, or a reason this client is too old to know.
    LENGTH = "length"
    STOP = "stop"
    CANCELLED = "cancelled"
    ERROR = "error"


class ServerState(enum.StrEnum):
    """How far the daemon can serve."""

    UNKNOWN = "unknown"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEGRADED = "degraded"


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """A token and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of a token in its place, and the likeliest tokens there, likeliest first.

    `logprob` is None for the first token of a prompt, before which nothing stands.
    """

    token_id: int
    logprob: float | None
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of a job's several generations.

    Attributes:
        index: Which one, from 0.
        token_ids: The tokens emitted so far.
        text: Their text; may lag behind until the choice has ended.
        finish_reason: Why it ended.
        logprobs: One per token, if asked for.
    """

    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason = FinishReason.UNKNOWN
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInfo:
    """A job as the daemon described it.

    Attributes:
        job_id: Unique for the tenant.
        tenant: Who owns it.
        model: The model that serves it.
        state: Where it stands.
        sla_class: The class asked for; empty if none was.
        effective_sla_class: The class it is served as.
        labels: As submitted.
        created_time: When it was accepted (UTC).
        started_time: When it first got a row.
        finished_time: When it became final.
        deadline: When it must have ended; None is never.
        queue_time_s: How long it waited for its first row, or has waited until now.
        queue_position: Place in line, 1 is next; 0 if it isn't queued or that isn't known, and in listings.
        estimated_start_time: When it is expected to get its row, if enough is known: an estimate that moves
            with what comes and with how fast jobs are started. Left out of listings.
        preemptions: How often it lost its row.
        recomputed_tokens: Tokens whose KV had to be computed again.
        prompt_tokens: Length of the tokenized prompt.
        cached_prompt_tokens: Of these, how many the session's kept state saved from being computed.
        output_tokens: How many tokens were emitted so far, by all choices.
        output_token_ids: Those tokens (choice 0's), without the prompt; empty in listings.
        text: Their text; may lag behind until the job is final; empty in listings.
        finish_reason: Why it ended (choice 0).
        logprobs: One per output token (choice 0's), if asked for; empty in listings.
        prompt_logprobs: One per prompt token, if asked for; empty in listings.
        choices: All choices in order, if more than one was asked for; empty in listings.
        error_code: The number of the gRPC status that stands for the failure; 0 if it didn't fail.
        error_reason: Machine-readable constant; empty if it didn't fail.
        error_message: For people; empty if it didn't fail.
        attempts: How many daemons have begun to run it, without those that gave it back in order.
    """

    job_id: str
    tenant: str = ""
    model: str = ""
    state: JobState = JobState.UNKNOWN
    sla_class: str = ""
    effective_sla_class: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    created_time: datetime | None = None
    started_time: datetime | None = None
    finished_time: datetime | None = None
    deadline: datetime | None = None
    queue_time_s: float = 0.0
    queue_position: int = 0
    estimated_start_time: datetime | None = None
    preemptions: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    output_token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason = FinishReason.UNKNOWN
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    choices: tuple[Choice, ...] = ()
    error_code: int = 0
    error_reason: str = ""
    error_message: str = ""
    attempts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPage:
    """One page of a listing; an empty `next_page_token` says that it is the last."""

    jobs: tuple[JobInfo, ...]
    next_page_token: str


@dataclass(frozen=True, slots=True)
class Queued:
    """The job waits for its turn; `position` 1 is next, 0 is not known; the start is an estimate."""

    job_id: str
    position: int
    effective_sla_class: str
    estimated_start_time: datetime | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """The job got its first row.

    Attributes:
        queue_time_s: How long it waited from being accepted.
        reason: Why it got the row now: "row_free", "row_taken" (from a less urgent job), "batch".
            Daemons newer than this client may know others; empty is not known.
    """

    queue_time_s: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens and the text that became certain with them; the texts of all chunks are the choice's text.

    Attributes:
        first_token_index: Of the first of the tokens, in its choice.
        token_ids: The tokens; none where only text is flushed.
        text: May lag behind the tokens.
        choice: Which of the job's choices they belong to.
        logprobs: One per token, if asked for.
        prompt_logprobs: One per prompt token, if asked for; with the first chunk of choice 0 alone.
        finish_reason: Known on the last chunk of a choice, if the job has several.
    """

    first_token_index: int
    token_ids: tuple[int, ...]
    text: str
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason = FinishReason.UNKNOWN


@dataclass(frozen=True, slots=True)
class Preempted:
    """The job lost its row.

    Attributes:
        reason: Why: "row" or "kv_bytes" (what a more urgent job needed), "row_limit", "kv_limit" (the
            batch may hold less KV), "out_of_memory" (a computation found none), "manual" (an operator),
            "engine_restart". Daemons newer than this client may know others.
        kept: Whether its KV was kept; if not, it is computed again.
        choice: Which of its choices.
    """

    reason: str
    kept: bool
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Resumed:
    """The job has a row again; `reason` as in Started."""

    choice: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Finished:
    """The job is final; the last event of a stream."""

    job: JobInfo


Event: TypeAlias = Queued | Started | Chunk | Preempted | Resumed | Finished


@dataclass(frozen=True, slots=True)
class SlaClass:
    """A class of service; `order` 0 is the most urgent."""

    name: str
    order: int
    preemptible: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """The daemon as it is configured and as it stands.

    Attributes:
        version: batond's own version.
        library_versions: Versions of what results depend on.
        state: How far it can serve.
        state_message: Why it isn't ready; empty if it is.
        model: The model served.
        device: Where it runs.
        rows: How many queries decode at once.
        max_query_tokens: Most tokens of prompt + max_tokens of one query.
        vocab_size: Token ids must be below it.
        eos_token_ids: Ids that end a generation.
        batch_kind: Which batch serves.
        batch_reason: Why this one.
        preemption_mode: "offload" or "recompute".
        policy: The active scheduling policy.
        sla_classes: Most urgent first.
        default_sla_class: The class of a job that names none.
        kv_bytes_per_token: Bytes of KV per token of one query.
        host_pool_bytes: Size of the host pool for parked KV.
        max_message_bytes: Largest request accepted.
        start_time: When the daemon was started (UTC).
        uptime_s: How long it has been up.
        tenant: Who the daemon thinks the caller is.
        max_choices: Most choices (n) of one job.
        max_choice_tokens: Most tokens that all choices of a job of several may emit together.
        daemon_id: Names this run of the daemon.
    """

    version: str
    library_versions: Mapping[str, str]
    state: ServerState
    state_message: str
    model: str
    device: str
    rows: int
    max_query_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    batch_kind: str
    batch_reason: str
    preemption_mode: str
    policy: str
    sla_classes: tuple[SlaClass, ...]
    default_sla_class: str
    kv_bytes_per_token: int
    host_pool_bytes: int
    max_message_bytes: int
    start_time: datetime | None
    uptime_s: float
    tenant: str
    max_choices: int = 1
    max_choice_tokens: int = 0
    daemon_id: str = ""
