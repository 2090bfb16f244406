"""The words front and engine exchange. Commands go to the engine, events come back.

Every message is a msgspec struct with a tag; a frame on the socket is one msgpack-encoded message
behind a 4-byte little-endian length. Nothing here imports torch, and nothing is pickled.
"""

from __future__ import annotations

import enum
import math

import msgspec

from batond.daemon.requests.params import SamplingParams


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages: immutable, tagged by class name."""


class FinishReason(enum.StrEnum):
    """Why a query ended."""

    LENGTH = "length"  # max_tokens reached
    STOP = "stop"  # an end-of-sequence id, a stop id or a stop string
    CANCELLED = "cancelled"  # somebody asked
    ERROR = "error"  # see QueryFailed


class QueryState(enum.StrEnum):
    """Where a query stands inside the engine; the engine's `query.py` holds the table of allowed moves."""

    WAITING = "waiting"  # nothing computed yet
    PREFILLING = "prefilling"  # part of the prompt is in a slice on the device
    READY = "ready"  # prompt prefilled, first token emitted, no row yet
    RUNNING = "running"  # owns a row of the batch
    PARKED = "parked"  # KV in host RAM (or dropped: recompute), row given away
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


class RowReason(enum.StrEnum):
    """Why a query got a row, from `Plan.reasons`; the contract's `Started.reason`, `Resumed.reason`."""

    ROW_FREE = "row_free"  # a row was idle
    ROW_TAKEN = "row_taken"  # a less urgent query gave one away
    BATCH = "batch"  # all rows were free: run-to-completion


class ParkCause(enum.StrEnum):
    """Why a query lost its row; the contract's `Preempted.reason`."""

    ROW = "row"  # a more urgent query needed a row
    KV_BYTES = "kv_bytes"  # a more urgent query needed memory of the batch
    ROW_LIMIT = "row_limit"  # fewer rows may be used
    KV_LIMIT = "kv_limit"  # the batch may hold less KV than it does
    OUT_OF_MEMORY = "out_of_memory"  # a computation found no memory, and had to be repeated with more
    MANUAL = "manual"  # an operator asked
    ENGINE_RESTART = "engine_restart"  # the engine died; said by the front


# -- commands: front -> engine ----------------------------------------------------------------------------


class Submit(Message, frozen=True):
    """Run a query. With `emitted_token_ids`, continue after them as if they had been produced here."""

    query_id: str
    tenant: str
    sla_class: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    seed: int
    waited_s: float = 0.0  # Time already spent in the queue, for ageing.
    emitted_token_ids: list[int] = []
    session_id: str = ""  # Names a chat session of the tenant's; empty is none.
    deadline_s: float = math.inf  # Left until the tenant needs the last token; may be below 0.
    tenant_weight: float = 1.0  # Share of the tenant among tenants, relative, above 0.


class Cancel(Message, frozen=True):
    """End a query as cancelled; unknown ids are ignored and counted."""

    query_id: str


class Update(Message, frozen=True):
    """Give a query another class and deadline; it is ranked anew. Unknown ids are ignored."""

    query_id: str
    sla_class: str
    deadline_s: float = math.inf  # Left until the tenant needs the last token.


class HandBack(Message, frozen=True):
    """Forget a query without ending it: its job goes back to the queue. Unknown ids are ignored."""

    query_id: str


class Park(Message, frozen=True):
    """Park a query by hand and hold it until Resume. Answered by CommandResult."""

    query_id: str
    request_id: int


class Resume(Message, frozen=True):
    """Let a parked query compete for a row again. Answered by CommandResult."""

    query_id: str
    request_id: int


class SetPolicy(Message, frozen=True):
    """Exchange the scheduling policy; no query is lost. Answered by CommandResult, and by later snapshots."""

    name: str  # A registered policy; BAD_CONFIG and no change otherwise.
    request_id: int


class Stop(Message, frozen=True):
    """Leave the process after the current step."""


Command = Submit | Cancel | Update | HandBack | Park | Resume | SetPolicy | Stop


# -- events: engine -> front ------------------------------------------------------------------------------


class Loading(Message, frozen=True):
    """Progress while the model loads; sent at least every few seconds."""

    note: str


class Ready(Message, frozen=True):
    """The self-test token was produced; the engine takes queries."""

    model: str
    device: str
    rows: int
    max_query_tokens: int  # The one limit on prompt + max_tokens.
    vocab_size: int
    eos_token_ids: list[int]
    batch_kind: str
    batch_reason: str
    preemption_mode: str
    kv_bytes_per_token: int
    host_pool_bytes: int
    policy: str
    load_s: float


class LoadFailed(Message, frozen=True):
    """The engine can't serve; `reason` as in errors.py. The process exits after this."""

    reason: str
    message: str


class Started(Message, frozen=True):
    """The query got its first row."""

    query_id: str
    row: int
    reason: str = ""  # A RowReason.


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """A token's log-probability under the model's own distribution, and the likeliest tokens at its place."""

    logprob: float
    top: list[tuple[int, float]]  # (token id, log-probability), likeliest first; as many as were asked for.


class Tokens(Message, frozen=True):
    """Newly emitted tokens; `first_index` counts from the first output token of the query."""

    query_id: str
    first_index: int
    token_ids: list[int]
    text: str  # May lag behind the tokens (UTF-8 and stop-string hold-back); the last event flushes.
    logprobs: list[TokenLogprobs] | None = None  # One per token, if the query wants them.
    # One per prompt token, None for the first; with the query's first event alone.
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class Preempted(Message, frozen=True):
    """The query lost its row, its work is kept (`kept`), or will be recomputed."""

    query_id: str
    cause: str  # A ParkCause.
    kept: bool
    parked_bytes: int
    for_query_id: str = ""  # Whose need caused it, if anybody's.


class Resumed(Message, frozen=True):
    """The query is back in the batch."""

    query_id: str
    row: int
    reason: str = ""  # As in Started.


class Usage(Message, frozen=True):
    """What a query cost."""

    prompt_tokens: int
    output_tokens: int
    parks: int
    recomputed_tokens: int
    waited_s: float  # Arrival at the engine to first token.
    parked_s: float
    cached_prompt_tokens: int = 0  # Of the prompt: not computed, because the session's slice held them.


class Finished(Message, frozen=True):
    """The query ended; its last Tokens event came before."""

    query_id: str
    finish_reason: FinishReason
    usage: Usage


class QueryFailed(Message, frozen=True):
    """The query can't be finished. `reason` as in errors.py; never contains another tenant's data."""

    query_id: str
    reason: str
    message: str
    usage: Usage


class CommandResult(Message, frozen=True):
    """The answer to Park, Resume and SetPolicy. An empty `reason` is success."""

    request_id: int
    reason: str = ""
    message: str = ""


class RowSnapshot(Message, frozen=True):
    """One row of the batch; an idle row has an empty `query_id`."""

    row: int
    query_id: str = ""
    tenant: str = ""
    sla_class: str = ""
    tokens: int = 0  # Cached tokens of the row.
    output_tokens: int = 0
    max_tokens: int = 0


class QuerySnapshot(Message, frozen=True):
    """A query of the engine that owns no row."""

    query_id: str
    tenant: str
    sla_class: str
    state: QueryState
    prompt_tokens: int
    prefilled_tokens: int
    output_tokens: int
    max_tokens: int
    parks: int
    parked_bytes: int
    held: bool  # Parked by hand.


class GovernorState(enum.StrEnum):
    """What the memory governor does; the contract's `GovernorState`."""

    OFF = "off"  # there is none: the batch has what it was given at its start
    STEADY = "steady"  # within the watermarks
    SHRINKING = "shrinking"  # above high: the budget was lowered, and not all is given back yet
    CRITICAL = "critical"  # above critical: nothing new begins
    GROWING = "growing"  # below low: the budget is raised step by step
    LOST = "lost"  # no reading: limits may fall, never rise


class MemorySnapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where KV lies, and what the batch may hold."""

    committed_bytes: int = 0  # Of KV in pages of rows.
    pooled_bytes: int = 0  # Of pages that no row owns, kept for the next one.
    reserved_bytes: int = 0  # Of addresses: what the batch could ever hold.
    parked_bytes: int = 0  # In host RAM, sessions not included.
    spilled_bytes: int = 0  # On disk.
    kv_budget_bytes: int | None = None  # None is no bound.
    row_limit: int = 0
    governor: GovernorState = GovernorState.OFF
    reason: str = ""  # Why, in words.
    total_bytes: int = 0  # Of the memory that the batch lives in; 0 without a governor.
    free_bytes: int = 0
    own_bytes: int = 0  # That this engine holds of it.


class Snapshot(Message, frozen=True):
    """The batch as it stands after a step."""

    step: int
    rows: list[RowSnapshot]
    queries: list[QuerySnapshot]  # Those without a row.
    columns: int  # Length of the shared time axis now.
    host_pool_used_bytes: int
    host_pool_bytes: int
    counters: dict[
        str, float
    ]  # Monotonic: decode_steps, idle_row_steps, parks, resumes, recomputed_tokens, ...
    sessions: int = 0  # Finished turns whose slices are kept in the host pool.
    session_bytes: int = 0  # Part of the used bytes: a parked query gets them if it needs them.
    policy: str = ""  # Name of the active policy.
    memory: MemorySnapshot = MemorySnapshot()


class Begins(Message, frozen=True):
    """The next step computes these queries for the first time. Sent before it: a death has suspects."""

    query_ids: list[str]


class EngineFailed(Message, frozen=True):
    """A step failed as a whole; the process exits after this, for its device may be past use."""

    reason: str  # The exception's class.
    message: str
    step: int


class StepEvents(Message, frozen=True):
    """All events of one step, in order, in one frame. Sent at least once a second: the heartbeat."""

    step: int
    events: list[Tokens | Started | Preempted | Resumed | Finished | QueryFailed | CommandResult]
    snapshot: Snapshot | None = None  # At most every 50 ms.
    busy: bool = False  # Whether any query is alive.


Event = Loading | Ready | LoadFailed | Begins | StepEvents | EngineFailed
QueryEvent = Tokens | Started | Preempted | Resumed | Finished | QueryFailed | CommandResult
