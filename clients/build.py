"""From a caller's arguments to the contract's requests; what can't be sent is refused before any network."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, TypeVar

from google.protobuf.message import Message

from batond.clients.errors import InvalidRequestError
from batond.v1 import admin_pb2, jobs_pb2, types_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from datetime import datetime

    from batond.clients.model import JobState


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str


#: A turn as `ChatMessage`, or as the mapping {"role": ..., "content": ...} that chat libraries use.
Turn: TypeAlias = ChatMessage | Mapping[str, str]


Named = TypeVar("Named", bound=Message)


class JobOptions(TypedDict, total=False):
    """What may be asked of a job beside its prompt; what is left out takes the daemon's default.

    Attributes:
        messages: A conversation, instead of a prompt.
        token_ids: A tokenized prompt, instead of a prompt.
        model: The model; the one served if left out.
        sla_class: Name of a class that `server_info()` lists.
        max_tokens: Most tokens to emit, at least 1.
        temperature: 0 is greedy.
        top_k: Keep the k likeliest tokens; 0 keeps all.
        top_p: Keep the smallest set whose probability reaches this, in (0, 1].
        min_p: Drop tokens whose probability is below this share of the likeliest one's.
        repetition_penalty: Above 1 discourages tokens of prompt and output, below 1 encourages them.
        presence_penalty: Subtracted from the logits of every token of the output, from -2 to 2.
        frequency_penalty: Subtracted once for each time the token stands in the output, from -2 to 2.
        logit_bias: Added to the logits, by token id, each from -100 to 100.
        min_tokens: Tokens before the first that may end the generation.
        json_schema: The output must be JSON that follows this schema, given as JSON text or as a mapping.
        regex: The output must match this regular expression.
        grammar: The output must match this grammar (GBNF, start rule `root`); one of these three at most.
        seed: Makes sampling reproducible.
        n: Generations wanted of the same prompt; see `JobInfo.choices` and `Chunk.choice`.
        logprobs: Report each emitted token's log-probability and so many of the likeliest tokens', 0 to 20.
        prompt_logprobs: The same for every token of the prompt but the first.
        ignore_eos: Don't end at the model's end-of-sequence ids.
        stop_token_ids: Further ids that end the generation.
        stop: Strings that end the generation.
        labels: Free text given back with the job.
        session_id: Names a conversation; the next turn need not compute again what this one has.
        deadline: When the job must have ended, with a time zone; it then fails with DEADLINE_EXCEEDED.
        time_limit_s: The same, as time from being accepted; one of both at most.
        job_id: The caller's own id, which makes the submission idempotent; one is made if left out.
    """

    messages: Sequence[Turn]
    token_ids: Sequence[int]
    model: str
    sla_class: str
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    min_tokens: int
    json_schema: str | Mapping[str, object]
    regex: str
    grammar: str
    seed: int
    n: int
    logprobs: int
    prompt_logprobs: int
    ignore_eos: bool
    stop_token_ids: Sequence[int]
    stop: str | Sequence[str]
    labels: Mapping[str, str]
    session_id: str
    deadline: datetime
    time_limit_s: float
    job_id: str


SAMPLING_FIELDS = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
    "regex",
    "grammar",
    "seed",
    "n",
    "logprobs",
    "prompt_logprobs",
    "ignore_eos",
    "stop_token_ids",
)
SPEC_FIELDS = ("model", "sla_class", "labels", "session_id")


def submit(prompt: str | None, options: JobOptions) -> jobs_pb2.SubmitJobRequest:
    """Makes the request of a submission; it always has an id, so it can be repeated.

    Raises:
        InvalidRequestError: Not exactly one kind of prompt, or a value that its field can't hold.
    """
    return jobs_pb2.SubmitJobRequest(job_id=job_id_of(options), spec=spec(prompt, options))


def generate(prompt: str | None, options: JobOptions, *, detached: bool) -> jobs_pb2.GenerateStreamRequest:
    """Makes the request of a generation that is followed at once; see `submit`."""
    return jobs_pb2.GenerateStreamRequest(
        job_id=job_id_of(options), spec=spec(prompt, options), detached=detached
    )


def job_id_of(options: JobOptions) -> str:
    """Gives the caller's id, or a new one: a job that is submitted again must be known as the same."""
    return options.get("job_id") or str(uuid.uuid4())


def spec(prompt: str | None, options: JobOptions) -> types_pb2.JobSpec:
    """Makes the body of a job.

    Raises:
        InvalidRequestError: Not exactly one kind of prompt, or a value that its field can't hold.
        TypeError: An option that does not exist.
    """
    _refuse_unknown(options)
    messages, token_ids = options.get("messages"), options.get("token_ids")
    given = {"prompt": prompt, "messages": messages, "token_ids": token_ids}
    kinds = [name for name, value in given.items() if value is not None]
    if len(kinds) != 1:
        raise InvalidRequestError(
            f"give exactly one of prompt, messages and token_ids, not {' and '.join(kinds) or 'none'}"
        )
    message = types_pb2.JobSpec()
    with _field(kinds[0]):
        if messages is not None:
            message.chat.CopyFrom(types_pb2.ChatInput(messages=[_turn(turn) for turn in messages]))
        elif token_ids is not None:
            message.tokens.CopyFrom(types_pb2.TokenInput(token_ids=token_ids))
        else:
            message.text.CopyFrom(types_pb2.TextInput(text=prompt))
    for name in SPEC_FIELDS:
        _set(message, name, options.get(name))
    for name in SAMPLING_FIELDS:
        _set(message.sampling, name, options.get(name))
    stop = options.get("stop")
    _set(message.sampling, "stop", [stop] if isinstance(stop, str) else stop)
    _set(message.sampling, "json_schema", _schema(options.get("json_schema")))
    if options.get("deadline") is not None and options.get("time_limit_s") is not None:
        raise InvalidRequestError("give one of deadline and time_limit_s, not both")
    _set_time(message, "deadline", options.get("deadline"))
    _set_duration(message, "timeout", options.get("time_limit_s"))
    return message


def update_job(job_id: str, sla_class: str | None, deadline: datetime | None) -> jobs_pb2.UpdateJobRequest:
    """Makes the request to change a waiting job."""
    message = named(jobs_pb2.UpdateJobRequest, job_id=job_id)
    _set(message, "sla_class", sla_class)
    _set_time(message, "deadline", deadline)
    return message


def named(kind: type[Named], **fields: str) -> Named:
    """Makes a request that says which job, and whose.

    Raises:
        InvalidRequestError: A value that its field can't hold.
    """
    message = kind()
    for name, value in fields.items():
        _set(message, name, value)
    return message


def watch(
    job_id: str, from_token_index: int, choice_from_token_indexes: Mapping[int, int] | None = None
) -> jobs_pb2.WatchJobRequest:
    """Makes the request to follow a job from a token on, or from one for each of its choices."""
    message = jobs_pb2.WatchJobRequest()
    _set(message, "job_id", job_id)
    _set(message, "from_token_index", from_token_index)
    _set(message, "choice_from_token_indexes", choice_from_token_indexes)
    return message


def token_texts(token_ids: Sequence[int], model: str) -> jobs_pb2.GetTokenTextsRequest:
    """Makes the request for what tokens stand for."""
    message = jobs_pb2.GetTokenTextsRequest()
    _set(message, "token_ids", token_ids)
    _set(message, "model", model)
    return message


def list_jobs(states: Iterable[JobState], page_size: int, page_token: str) -> jobs_pb2.ListJobsRequest:
    """Makes the request for one page of a listing."""
    message = jobs_pb2.ListJobsRequest()
    _set(message, "states", [_state_number(state) for state in states])
    _set(message, "page_size", page_size)
    _set(message, "page_token", page_token)
    return message


def list_dead_jobs(page_size: int, page_token: str) -> admin_pb2.ListDeadJobsRequest:
    """Makes the request for one page of dead jobs."""
    message = admin_pb2.ListDeadJobsRequest()
    _set(message, "page_size", page_size)
    _set(message, "page_token", page_token)
    return message


def watch_batch(min_interval_s: float | None) -> admin_pb2.WatchBatchRequest:
    """Makes the request to watch the batch."""
    message = admin_pb2.WatchBatchRequest()
    _set_duration(message, "min_interval", min_interval_s)
    return message


def drain(drain_timeout_s: float | None) -> admin_pb2.DrainRequest:
    """Makes the request to drain; None leaves the time-out to the daemon."""
    message = admin_pb2.DrainRequest()
    _set_duration(message, "timeout", drain_timeout_s)
    return message


@contextlib.contextmanager
def _field(name: str) -> Iterator[None]:
    """Turns protobuf's refusal of a value into an error that names the field."""
    try:
        yield
    except InvalidRequestError:
        raise
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        # AttributeError: one value where a field holds many.
        raise InvalidRequestError(f"{name} can't be sent: {error}", fields={name: str(error)}) from error


def _set(message: Any, name: str, value: object) -> None:
    if value is None:
        return
    with _field(name):
        # MergeFrom of a fresh message takes scalars, lists and mappings alike.
        message.MergeFrom(type(message)(**{name: value}))


def _set_duration(message: Any, name: str, seconds: float | None) -> None:
    if seconds is None:
        return
    with _field(name):
        getattr(message, name).FromNanoseconds(round(seconds * 1e9))


def _set_time(message: Any, name: str, time: datetime | None) -> None:
    if time is None:
        return
    if time.tzinfo is None:
        raise InvalidRequestError(f"{name} needs a time zone", fields={name: "a time without a time zone"})
    with _field(name):
        getattr(message, name).FromDatetime(time)


def _schema(schema: str | Mapping[str, object] | None) -> str | None:
    """The schema as JSON text, in the mapping's own order: it is the order of the output's properties."""
    if schema is None or not isinstance(schema, Mapping):
        return schema
    with _field("json_schema"):
        return json.dumps(schema, allow_nan=False)


def _turn(turn: Turn) -> types_pb2.ChatMessage:
    if isinstance(turn, ChatMessage):
        return types_pb2.ChatMessage(role=turn.role, content=turn.content)
    if not _is_turn(turn):
        raise InvalidRequestError(
            "each message needs a role and a content, and nothing else",
            fields={"messages": "role and content"},
        )
    return types_pb2.ChatMessage(role=turn["role"], content=turn["content"])


def _is_turn(value: object) -> bool:
    return isinstance(value, Mapping) and set(value) == {"role", "content"}


def _state_number(state: JobState) -> int:
    try:
        return types_pb2.JobState.Value(f"JOB_STATE_{state.upper()}")
    except ValueError as error:
        raise InvalidRequestError(f"no such state: {state}", fields={"states": str(state)}) from error


def _refuse_unknown(options: JobOptions) -> None:
    unknown = sorted(set(options) - set(JobOptions.__annotations__))
    if unknown:
        # Python itself would raise TypeError for a keyword that a function doesn't have.
        raise TypeError(f"no such option: {', '.join(unknown)}")
