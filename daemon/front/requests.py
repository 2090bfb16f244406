"""From what a client sent to what the queue stores: everything is checked here, once."""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from batond.daemon.errors import InvalidRequestError, NotFoundError, RequestTooLargeError
from batond.daemon.front.ranks import TimeLimit, choose_class, time_limit
from batond.daemon.queue.records import JobSpec
from batond.daemon.requests.params import MAX_CLIENT_ID_CHARS, MAX_PROMPT_LOGPROBS, SamplingParams
from batond.daemon.requests.structure import check_structure

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from batond.daemon.front.identity import Tenant
    from batond.daemon.front.text import Tokenizer
    from batond.policies.classes import SlaClasses
    from batond.v1 import types_pb2

KNOWN_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})
_ID: Final = re.compile(rf"[A-Za-z0-9._:-]{{1,{MAX_CLIENT_ID_CHARS}}}")
_ID_RULE: Final = f"must be 1 to {MAX_CLIENT_ID_CHARS} of A-Z a-z 0-9 . _ : -"
_OPTIONAL_SAMPLING: Final = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "n",
    "logprobs",
    "prompt_logprobs",
    "json_schema",
    "regex",
    "grammar",
)
_MOST_LABELS: Final = 16
_LONGEST_LABEL_KEY_CHARS: Final = 63
_LONGEST_LABEL_VALUE_CHARS: Final = 256
#: A request of a thousand tokens or two: read in a tenth of a millisecond.
QUICK_BYTES: Final = 4096
MOST_TOKEN_TEXTS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine enforces, as its Ready message said.

    Attributes:
        model: The served name.
        max_query_tokens: Most prompt + max_tokens.
        vocab_size: Token ids lie below.
        default_max_tokens: Where a request names none.
        prompt_logprobs: Whether the engine can report the prompt's log-probabilities.
        max_choices: Most choices of one job.
        max_choice_tokens: Most tokens of all choices together, of a job that has several.
    """

    model: str
    max_query_tokens: int
    vocab_size: int
    default_max_tokens: int
    prompt_logprobs: bool = True
    max_choices: int = 1
    max_choice_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CheckedJob:
    """A request that can be accepted.

    Attributes:
        spec: What to run.
        sla_class: Effective class.
        body_hash: SHA-256 (hex) of what the client sent, before anything was drawn for it.
        limit: When it must have ended.
    """

    spec: JobSpec
    sla_class: str
    body_hash: str
    limit: TimeLimit


def check_job_id(job_id: str) -> str:
    """Return the client's id, or a new one if it gave none.

    Raises:
        InvalidRequestError: The id has other characters or another length than allowed.
    """
    if not job_id:
        return uuid.uuid4().hex
    if not _ID.fullmatch(job_id):
        raise InvalidRequestError(f"job_id {_ID_RULE}", field="job_id")
    return job_id


class RequestReader:
    """Checks specs and turns prompts into tokens. Works on a thread: tokenizing may take seconds.

    Args:
        tokenizer: The model's.
        classes: All classes.
        limits: The engine's.
    """

    def __init__(self, tokenizer: Tokenizer, classes: SlaClasses, limits: Limits) -> None:
        self._tokenizer = tokenizer
        self._classes = classes
        self._limits = limits

    @staticmethod
    def is_quick(spec: types_pb2.JobSpec) -> bool:
        """Whether to read it takes less than to hand it to a thread: few tokens, nothing to parse."""
        sampling = spec.sampling
        structured = sampling.json_schema or sampling.regex or sampling.grammar
        return spec.WhichOneof("input") == "tokens" and not structured and spec.ByteSize() <= QUICK_BYTES

    def read(self, spec: types_pb2.JobSpec, tenant: Tenant) -> CheckedJob:
        """Check everything about a job.

        Raises:
            NotFoundError: Another model.
            PermissionDeniedError: A class the tenant may not use.
            InvalidRequestError: Anything else; the details name the field.
        """
        self._check_model(spec.model, "spec.model")
        sla_class = choose_class(spec.sla_class, tenant, self._classes)
        labels = _labels(spec)
        # Cheap checks come first: tokenizing and parsing a grammar may take seconds.
        limit = time_limit(spec)
        sampling = _sampling(spec.sampling, self._limits.default_max_tokens)
        self._check_sampled_ids(sampling)
        _check_session(spec.session_id, sampling)
        sampling = self._check_choices(sampling, given=spec.sampling.HasField("max_tokens"))
        prompt = self._prompt(spec, tenant)
        self._check_prompt_logprobs(sampling, len(prompt))
        sampling = self._fit(sampling, len(prompt), given=spec.sampling.HasField("max_tokens"))
        _check_structure(sampling)
        job = JobSpec(
            prompt_token_ids=prompt,
            sampling=sampling,
            seed=spec.sampling.seed if spec.sampling.HasField("seed") else secrets.randbits(63),
            labels=labels,
            asked_class=spec.sla_class,
            session_id=spec.session_id,
        )
        body = spec.SerializeToString(deterministic=True)
        digest = hashlib.sha256(body).hexdigest()
        return CheckedJob(spec=job, sla_class=sla_class, body_hash=digest, limit=limit)

    def token_texts(self, token_ids: Sequence[int], model: str) -> list[bytes]:
        """What tokens stand for, each by itself.

        Raises:
            NotFoundError: Another model.
            InvalidRequestError: Too many, or one that the vocabulary does not have.
        """
        self._check_model(model, "model")
        many = f"at most {MOST_TOKEN_TEXTS} token_ids a call"
        _refuse(len(token_ids) > MOST_TOKEN_TEXTS, many, "token_ids", "INVALID_REQUEST")
        self._check_ids(token_ids, "token_ids")
        return [self._tokenizer.token_bytes(token_id) for token_id in token_ids]

    def _check_model(self, model: str, field: str) -> None:
        if model and model != self._limits.model:
            raise NotFoundError(
                f"model {model[:100]!r} is not served here; {self._limits.model} is",
                reason="MODEL_NOT_SERVED",
                field=field,
                model=model[:100],
                served=self._limits.model,
            )

    def _check_ids(self, token_ids: Sequence[int], field: str) -> None:
        bad = next((id_ for id_ in token_ids if id_ >= self._limits.vocab_size), None)
        below = f"token ids must be below {self._limits.vocab_size}, the vocabulary's size"
        _refuse(bad is not None, f"{below}, not {bad}", field, "BAD_TOKEN_ID")

    def _prompt(self, spec: types_pb2.JobSpec, tenant: Tenant) -> list[int]:
        match spec.WhichOneof("input"):
            case "text":
                field = "spec.text.text"
                _refuse(not spec.text.text, "the prompt is empty", field, "EMPTY_PROMPT")
                self._check_chars(len(spec.text.text), field)
                prompt = self._tokenizer.encode_text(spec.text.text)
            case "chat":
                field = "spec.chat.messages"
                messages = _messages(spec.chat)
                self._check_chars(sum(len(content) for _, content in messages), field)
                prompt = self._tokenizer.encode_chat(messages)
            case "tokens":
                field = "spec.tokens.token_ids"
                prompt = list(spec.tokens.token_ids)
                self._check_ids(prompt, field)
            case _:
                raise InvalidRequestError(
                    "one of text, chat and tokens must be set", field="spec.input", reason="EMPTY_PROMPT"
                )
        _refuse(not prompt, "the prompt has no tokens", field, "EMPTY_PROMPT")
        longest = tenant.longest_prompt_tokens
        if longest and len(prompt) > longest:
            raise RequestTooLargeError(
                f"the prompt has {len(prompt)} tokens; tenant {tenant.name} may send {longest}",
                reason="PROMPT_TOO_LONG",
                field=field,
                quota="longest_prompt_tokens",
                limit=longest,
                prompt_tokens=len(prompt),
            )
        return prompt

    def _check_chars(self, chars: int, field: str) -> None:
        """Refuse a text that can't fit before it is tokenized: megabytes take seconds (M7)."""
        limit = self._limits.max_query_tokens
        most_chars = limit * self._tokenizer.longest_token_chars
        if chars > most_chars:
            raise RequestTooLargeError(
                f"the prompt has {chars} characters; no text above {most_chars} fits in the limit of {limit}"
                " tokens: shorten it",
                reason="PROMPT_TOO_LONG",
                field=field,
                limit=limit,
                prompt_chars=chars,
            )

    def _check_choices(self, sampling: SamplingParams, *, given: bool) -> SamplingParams:
        """Bound what several choices cost together; a default of max_tokens gives way to it."""
        if sampling.n == 1:
            return sampling
        most, tokens = self._limits.max_choices, self._limits.max_choice_tokens
        many = f"n must be from 1 to {most}, not {sampling.n}"
        _refuse(sampling.n > most, many, "spec.sampling.n", "BAD_SAMPLING")
        each = tokens // sampling.n
        if not given and each >= 1:
            return msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, each))
        if sampling.max_tokens > each:
            raise RequestTooLargeError(
                f"n ({sampling.n}) * max_tokens ({sampling.max_tokens}) exceed the limit of {tokens} tokens:"
                " ask for fewer or shorter choices",
                field="spec.sampling.n",
                limit=tokens,
                n=sampling.n,
                max_tokens=sampling.max_tokens,
            )
        return sampling

    def _check_prompt_logprobs(self, sampling: SamplingParams, prompt_tokens: int) -> None:
        if sampling.prompt_logprobs is None:
            return
        field = "spec.sampling.prompt_logprobs"
        inline = "prompt_logprobs can't be reported here: this daemon computes prompts inside the batch step"
        _refuse(not self._limits.prompt_logprobs, inline, field, "NO_PROMPT_LOGPROBS")
        values = prompt_tokens * (1 + sampling.prompt_logprobs)
        if values > MAX_PROMPT_LOGPROBS:
            raise RequestTooLargeError(
                f"prompt_logprobs would report {values} numbers; the limit is {MAX_PROMPT_LOGPROBS}:"
                " ask for fewer, or shorten the prompt",
                field=field,
                limit=MAX_PROMPT_LOGPROBS,
                prompt_tokens=prompt_tokens,
            )

    def _check_sampled_ids(self, sampling: SamplingParams) -> None:
        """Ids that the sampling names are of the vocabulary, like those of a prompt."""
        size = self._limits.vocab_size
        for field, ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
            beyond = next((token for token in ids if token >= size), None)
            message = f"token id {beyond} in {field}: ids must be below {size}, the vocabulary's size"
            _refuse(beyond is not None, message, f"spec.sampling.{field}", "BAD_SAMPLING")

    def _fit(self, sampling: SamplingParams, prompt_tokens: int, *, given: bool) -> SamplingParams:
        """Hold prompt + output within the limit; a default gives way, a given number does not."""
        limit = self._limits.max_query_tokens
        room = limit - prompt_tokens
        if not given and room >= max(1, sampling.min_tokens):
            return msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, room))
        if sampling.max_tokens > room:
            wanted = sampling.max_tokens if given else max(1, sampling.min_tokens)
            name = "min_tokens" if not given and sampling.min_tokens > 1 else "max_tokens"
            raise RequestTooLargeError(
                f"prompt ({prompt_tokens} tokens) + {name} ({wanted}) exceed the limit of {limit} tokens:"
                " shorten one of them",
                field=f"spec.sampling.{name}" if room >= 1 else "spec.input",
                limit=limit,
                prompt_tokens=prompt_tokens,
                max_tokens=wanted,
            )
        return sampling


def _refuse(wrong: bool, message: str, field: str, reason: str) -> None:  # noqa: FBT001 - reads as a sentence
    if wrong:
        raise InvalidRequestError(message, field=field, reason=reason)


def _messages(chat: types_pb2.ChatInput) -> list[tuple[str, str]]:
    _refuse(
        not chat.messages, "a conversation needs at least one message", "spec.chat.messages", "EMPTY_PROMPT"
    )
    for i, message in enumerate(chat.messages):
        place = f"spec.chat.messages[{i}]"
        known = ", ".join(sorted(KNOWN_ROLES))
        unknown = f"unknown role {message.role[:50]!r}; known are {known}"
        _refuse(message.role not in KNOWN_ROLES, unknown, f"{place}.role", "BAD_CHAT")
        _refuse(not message.content, "the content is empty", f"{place}.content", "BAD_CHAT")
    return [(message.role, message.content) for message in chat.messages]


def _sampling(given: types_pb2.SamplingParams, default_max_tokens: int) -> SamplingParams:
    values: dict[str, Any] = {"max_tokens": default_max_tokens}
    for name in _OPTIONAL_SAMPLING:
        if given.HasField(name):
            values[name] = getattr(given, name)
    with _sampling_fields():
        return SamplingParams(
            **values,
            ignore_eos=given.ignore_eos,
            logit_bias=dict(given.logit_bias),
            stop_token_ids=tuple(given.stop_token_ids),
            stop=tuple(given.stop),
        )


def _check_structure(sampling: SamplingParams) -> None:
    with _sampling_fields():
        check_structure(sampling)


@contextlib.contextmanager
def _sampling_fields() -> Iterator[None]:
    """Name a field that is refused as the client knows it."""
    try:
        yield
    except InvalidRequestError as error:
        field = error.details.pop("field", "")
        raise InvalidRequestError(
            error.message,
            reason="BAD_SAMPLING" if error.reason == InvalidRequestError.reason else error.reason,
            field=f"spec.sampling.{field}".rstrip("."),
            **error.details,
        ) from error


def _check_session(session_id: str, sampling: SamplingParams) -> None:
    if not session_id:
        return
    field = "spec.session_id"
    wrong = not _ID.fullmatch(session_id)
    _refuse(wrong, f"session_id {_ID_RULE}", field, "BAD_SESSION")
    several = "session_id and n above 1 exclude each other: a conversation goes on after one answer"
    _refuse(sampling.n > 1, several, field, "BAD_SESSION")
    cached = "session_id and prompt_logprobs exclude each other: what a session keeps is not computed again"
    _refuse(sampling.prompt_logprobs is not None, cached, field, "BAD_SESSION")


def _labels(spec: types_pb2.JobSpec) -> dict[str, str]:
    labels = dict(spec.labels)
    _refuse(len(labels) > _MOST_LABELS, f"at most {_MOST_LABELS} labels", "spec.labels", "BAD_LABELS")
    for key, value in labels.items():
        good = 1 <= len(key) <= _LONGEST_LABEL_KEY_CHARS and len(value) <= _LONGEST_LABEL_VALUE_CHARS
        keys = f"keys have 1 to {_LONGEST_LABEL_KEY_CHARS} characters"
        values = f"values at most {_LONGEST_LABEL_VALUE_CHARS}"
        _refuse(not good, f"label {key[:80]!r}: {keys}, {values}", "spec.labels", "BAD_LABELS")
    return labels
