"""What all parts of the configuration's schema are made of."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import math
from typing import Annotated, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator
from pydantic_settings import NoDecode

_LARGEST_PORT: Final = 65535


def _split(value: object) -> object:
    """Let one string stand for a list: JSON, or items separated by commas."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return json.loads(value)
    return [item.strip() for item in value.split(",") if item.strip()]


def parse_json(value: object) -> object:
    """Let JSON text stand for a value."""
    return json.loads(value) if isinstance(value, str) else value


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port`; an IPv6 host stands in brackets.

    Raises:
        ValueError: It is no such thing.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdecimal() or not 0 <= int(port) <= _LARGEST_PORT:
        raise ValueError(f"{address!r} is neither host:port nor unix:/path")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        ipaddress.IPv6Address(host)
    elif ":" in host:
        raise ValueError(f"{address!r}: put the IPv6 address in brackets")
    return host, int(port)


StringList = Annotated[list[str], NoDecode, BeforeValidator(_split)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _number(value: object) -> object:
    """Take a number, true or false, or the text of one, as the environment has it."""
    with contextlib.suppress(ValueError):
        value = json.loads(value) if isinstance(value, str) else value
    # Infinity has no place in the JSON that the engine reads.
    if not isinstance(value, (bool, int, float)) or not math.isfinite(value):
        raise ValueError("neither a finite number nor true or false")
    return value


Number = Annotated[bool | int | float, PlainValidator(_number)]


class Section(BaseModel):
    """A table of the configuration: frozen, and no key that is not known."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
