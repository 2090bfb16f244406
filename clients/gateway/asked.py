"""What a request asks for, read from its body: `/v1/chat/completions` and `/v1/completions`. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from batond.clients.gateway import sampling
from batond.clients.gateway.fields import Fields, unsupported
from batond.clients.gateway.problems import ApiError, invalid

if TYPE_CHECKING:
    from batond.clients.build import JobOptions
    from batond.clients.gateway.settings import GatewaySettings

CHAT_PATH: Final = "/v1/chat/completions"
COMPLETIONS_PATH: Final = "/v1/completions"
#: OpenAI's own default of plain completions; that of chat is the daemon's `model.default_max_tokens`.
DEFAULT_COMPLETION_TOKENS: Final = 16
MOST_PROMPTS: Final = 128
_ROLES: Final = frozenset({"system", "developer", "user", "assistant"})
_NO_EFFECT: Final = (
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "prediction",
    "parallel_tool_calls",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request, as one job a prompt.

    Attributes:
        chat: Whether it is a conversation.
        prompts: Texts or token ids; one None for a conversation, which is in the options.
        options: Of each job.
        stream: Whether the answer comes in pieces.
        include_usage: Whether a stream ends with the usage.
        tier: The service tier asked for; empty if none was.
        logprobs: Whether log-probabilities are shown.
        echo: Whether the prompt is part of the text.
    """

    chat: bool
    prompts: tuple[str | list[int] | None, ...]
    options: JobOptions
    stream: bool = False
    include_usage: bool = False
    tier: str = ""
    logprobs: bool = False
    echo: bool = False

    @property
    def model(self) -> str:
        """Which model."""
        return self.options.get("model", "")

    @property
    def n(self) -> int:
        """Choices of each prompt."""
        return self.options.get("n", 1)


def read(path: str, body: dict[str, Any], settings: GatewaySettings) -> Asked:
    """Read the body of a request to one of both paths."""
    return read_chat(body, settings) if path == CHAT_PATH else read_completion(body, settings)


def read_chat(body: dict[str, Any], settings: GatewaySettings) -> Asked:
    """Read the body of a chat completion.

    Raises:
        ApiError: Something in it can't be, or isn't supported.
    """
    fields = Fields(body)
    options = sampling.take_options(fields, settings)
    options["messages"] = _messages(fields.raw("messages"))
    sampling.take_format(fields, options)
    tier = sampling.take_tier(fields, settings, options)
    most, older = fields.take("max_completion_tokens", int), fields.take("max_tokens", int)
    if most is not None and older is not None and most != older:
        raise invalid("max_tokens and max_completion_tokens contradict each other", "max_tokens")
    _set_max_tokens(options, most if most is not None else older)
    logprobs, top = fields.flag("logprobs"), fields.take("top_logprobs", int)
    if top is not None and not logprobs:
        raise invalid("top_logprobs needs logprobs", "top_logprobs")
    if logprobs:
        options["logprobs"] = top or 0
    stream, usage = sampling.take_stream(fields)
    _refuse_tools(fields)
    fields.refuse("modalities", neutral=(["text"],))
    fields.refuse("audio", "web_search_options", "reasoning_effort", "verbosity", "moderation", "store")
    fields.ignore(*_NO_EFFECT)
    fields.done()
    return Asked(
        chat=True,
        prompts=(None,),
        options=options,
        stream=stream,
        include_usage=usage,
        tier=tier,
        logprobs=logprobs,
    )


def read_completion(body: dict[str, Any], settings: GatewaySettings) -> Asked:
    """Read the body of a plain completion.

    Raises:
        ApiError: Something in it can't be, or isn't supported.
    """
    fields = Fields(body)
    options = sampling.take_options(fields, settings)
    prompts = _prompts(fields.raw("prompt"))
    sampling.take_format(fields, options)
    tier = sampling.take_tier(fields, settings, options)
    most = fields.take("max_tokens", int)
    _set_max_tokens(options, DEFAULT_COMPLETION_TOKENS if most is None else most)
    logprobs, echo = fields.take("logprobs", int), fields.flag("echo")
    if logprobs is not None:
        options["logprobs"] = logprobs
        if echo:
            options["prompt_logprobs"] = logprobs
    best = fields.take("best_of", int)
    if best is not None and best != options.get("n", 1):
        raise unsupported("best_of is not supported: it must be n, or be left out", "best_of")
    stream, usage = sampling.take_stream(fields)
    fields.refuse("suffix", neutral=("",))
    fields.ignore(*_NO_EFFECT)
    fields.done()
    return Asked(
        chat=False,
        prompts=prompts,
        options=options,
        stream=stream,
        include_usage=usage,
        tier=tier,
        logprobs=logprobs is not None,
        echo=echo,
    )


def _set_max_tokens(options: JobOptions, most: int | None) -> None:
    if most is not None:
        options["max_tokens"] = most


def _refuse_tools(fields: Fields) -> None:
    fields.refuse("tool_choice", neutral=("none", "auto"))
    for name in ("tools", "functions"):
        if fields.raw(name):
            raise unsupported(
                f"{name} are not supported: this server runs no tool calls; response_format can ask for JSON",
                name,
            )
    fields.refuse("function_call", neutral=("none", "auto"))


def _messages(given: object) -> list[dict[str, str]]:
    if not isinstance(given, list) or not given:
        raise invalid("messages must be a list of at least one message", "messages")
    return [_message(one, f"messages[{place}]") for place, one in enumerate(given)]


def _message(given: object, place: str) -> dict[str, str]:
    if not isinstance(given, dict):
        raise invalid(f"{place} must be an object", place, "invalid_type")
    fields = Fields(given)
    role = fields.take("role", str) or ""
    if role in {"tool", "function"}:
        raise unsupported(f"{place}: tools are not supported", f"{place}.role")
    if role not in _ROLES:
        known = ", ".join(sorted(_ROLES))
        raise invalid(f"{place}.role must be one of {known}", f"{place}.role", "invalid_value")
    content = _content(fields.raw("content"), f"{place}.content")
    fields.ignore("name", "refusal", "annotations")
    try:
        fields.refuse("tool_calls", "function_call", "audio")
        fields.done()
    except ApiError as error:
        raise invalid(f"{place}: {error.message}", f"{place}.{error.param}", error.code) from error
    return {"role": role, "content": content}


def _content(given: object, place: str) -> str:
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not given:
        raise invalid(f"{place} must be a string or a list of parts", place, "invalid_type")
    texts = []
    for part in given:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in {"text", "refusal"}:
            raise unsupported(f"{place}: only parts of type text are supported", place)
        text = part.get(kind)
        if not isinstance(text, str):
            raise invalid(f"{place}: the {kind} of a part must be a string", place, "invalid_type")
        texts.append(text)
    return "\n".join(texts)


def _prompts(given: object) -> tuple[str | list[int] | None, ...]:
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, list) or not given:
        raise invalid("prompt must be a string, token ids, or a list of either", "prompt", "invalid_type")
    if type(given[0]) is int:
        return (sampling.token_ids(given, "prompt"),)
    if len(given) > MOST_PROMPTS:
        raise invalid(f"at most {MOST_PROMPTS} prompts", "prompt")
    return tuple(one if isinstance(one, str) else sampling.token_ids(one, "prompt") for one in given)
