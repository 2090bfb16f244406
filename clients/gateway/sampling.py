"""From the fields of OpenAI's API to a job's options. Ranges are the daemon's to check."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from batond.clients.gateway.fields import Fields, unsupported
from batond.clients.gateway.problems import invalid

if TYPE_CHECKING:
    from batond.clients.build import JobOptions
    from batond.clients.gateway.settings import GatewaySettings

#: Fields that mean the same here and there; those below the line are of other engines that serve this API.
_NUMBERS: Final[tuple[tuple[str, type], ...]] = (
    ("temperature", float),
    ("top_p", float),
    ("presence_penalty", float),
    ("frequency_penalty", float),
    ("n", int),
    # --
    ("top_k", int),
    ("min_p", float),
    ("repetition_penalty", float),
    ("min_tokens", int),
    ("ignore_eos", bool),
    ("regex", str),
    ("grammar", str),
    ("session_id", str),
)
_SEED_MASK: Final = (1 << 63) - 1


def take_options(fields: Fields, settings: GatewaySettings) -> JobOptions:
    """Take what chat and plain completions have in common.

    Args:
        fields: The request's.
        settings: Say what is meant by a tier, and which temperature by none.

    Raises:
        ApiError: A field is of the wrong kind, or asks for what isn't there.
    """
    options: dict[str, Any] = {"temperature": settings.default_temperature}
    for name, kind in _NUMBERS:
        value = fields.take(name, kind)
        if value is not None:
            options[name] = value
    seed = fields.take("seed", int)
    if seed is not None:
        options["seed"] = seed & _SEED_MASK  # OpenAI's may be negative.
    _take_stops(fields, options)
    _take_biases(fields, options)
    options["model"] = fields.take("model", str) or ""
    if not options["model"]:
        raise invalid("you must provide a model", "model", "missing_required_parameter")
    return options  # type: ignore[return-value] # its keys are those of JobOptions


def take_tier(fields: Fields, settings: GatewaySettings, options: JobOptions) -> str:
    """Take the service tier and set the class it means; gives the tier's name, empty if none was asked for.

    Raises:
        ApiError: There is no such tier.
    """
    tier = fields.take("service_tier", str) or ""
    found = settings.tiers.get(tier or "auto", "" if not tier else None)
    if found is None:
        known = ", ".join(sorted(settings.tiers))
        raise invalid(f"there is no service tier {tier[:50]!r}; there are {known}", "service_tier")
    if found:
        options["sla_class"] = found
    return tier


def take_format(fields: Fields, options: JobOptions) -> None:
    """Take the form that the output must have.

    Raises:
        ApiError: It is none that there is.
    """
    given = fields.take("response_format", dict)
    kind = None if given is None else given.get("type")
    if given is None or kind == "text":
        return
    schema: Any = {"type": "object"}
    if kind == "json_schema":
        described = given.get("json_schema")
        if not isinstance(described, dict):
            raise invalid("response_format.json_schema must be an object", "response_format.json_schema")
        schema = described.get("schema", schema)
        if not isinstance(schema, dict):
            raise invalid("the schema must be an object", "response_format.json_schema.schema")
    elif kind != "json_object":
        raise unsupported("response_format.type must be text, json_object or json_schema", "response_format")
    if "regex" in options or "grammar" in options:
        raise invalid("response_format, regex and grammar exclude each other", "response_format")
    options["json_schema"] = schema


def take_stream(fields: Fields) -> tuple[bool, bool]:
    """Take whether the answer is streamed, and whether the stream ends with the usage.

    Raises:
        ApiError: Options of a stream without one, or unknown ones.
    """
    stream, given = fields.flag("stream"), fields.take("stream_options", dict)
    if given is None:
        return stream, False
    if not stream:
        raise invalid("stream_options needs stream", "stream_options")
    inner = Fields(given)
    usage = inner.flag("include_usage")
    inner.ignore("include_obfuscation")  # Random padding against those who measure lengths: TLS's affair.
    inner.done()
    return stream, usage


def _take_stops(fields: Fields, options: dict[str, Any]) -> None:
    stop, ids = fields.raw("stop"), fields.raw("stop_token_ids")
    if stop is not None:
        many = [stop] if isinstance(stop, str) else stop
        if not isinstance(many, list) or not all(isinstance(one, str) for one in many):
            raise invalid("stop must be a string or a list of strings", "stop", "invalid_type")
        options["stop"] = many
    if ids is not None:
        options["stop_token_ids"] = token_ids(ids, "stop_token_ids")


def _take_biases(fields: Fields, options: dict[str, Any]) -> None:
    given = fields.take("logit_bias", dict)
    if not given:
        return
    biases = {}
    for key, bias in given.items():
        number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
        if not (key.isascii() and key.isdecimal() and int(key) < 1 << 32 and number):
            raise invalid("logit_bias maps token ids to numbers", "logit_bias", "invalid_type")
        biases[int(key)] = bias
    options["logit_bias"] = biases


def token_ids(value: object, param: str) -> list[int]:
    """Check that a value is a list of token ids.

    Raises:
        ApiError: It is none.
    """
    if not isinstance(value, list) or not all(type(one) is int and 0 <= one < 1 << 32 for one in value):
        raise invalid(f"{param} must be a list of token ids", param, "invalid_type")
    return value
