"""Requests that no client of good will sends; the same for the same seed and number.

Every rpc of the daemon is called: with good requests of which some fields are spoiled, with fields drawn at
random, with bytes that are no message (any more), with more or fewer messages than the rpc takes, and with
metadata that make no sense.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from batond.bench.fuzz_values import (
    BAD_UTF8,
    MARKER,
    good_value,
    hostile_count,
    hostile_duration_s,
    hostile_number,
    hostile_text,
)
from batond.v1 import admin_pb2, jobs_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from google.protobuf.message import Message

    #: The two implementations of descriptors have no type in common.
    Descriptor: TypeAlias = Any
    MethodDescriptor: TypeAlias = Any
    Field: TypeAlias = Any
    Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]

_SERVICES: Final = (
    jobs_pb2.DESCRIPTOR.services_by_name["JobService"],
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"],
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
)
METHODS: Final[tuple[MethodDescriptor, ...]] = tuple(
    method for service in _SERVICES for method in service.methods
)
#: Jobs are what the daemon mostly hears of.
_WEIGHTS: Final = [
    12
    if method.name in {"SubmitJob", "GenerateStream"}
    else 4
    if method.containing_service is _SERVICES[0]
    else 1
    for method in METHODS
]
_KINDS: Final = {
    "good": 8,
    "spoiled fields": 42,
    "random fields": 14,
    "mangled bytes": 22,
    "random bytes": 5,
    "another message": 3,
    "message count": 3,
    "metadata": 2,
    "unknown method": 1,
}
_UNKNOWN: Final = (
    "/",
    "/x",
    "/batond.v1.JobService/Nothing",
    "/batond.v1.JobService/",
    "/a/b/c",
    "/%2e%2e/SubmitJob",
)
_MOST_SPOILED: Final = 3
_MOST_DEPTH: Final = 6


@dataclass(frozen=True, slots=True)
class Case:
    """One call.

    Attributes:
        number: Which, of its seed.
        kind: How it is wrong.
        path: Of the rpc.
        requests: Bytes of each message that is sent.
        metadata: With the credentials.
        patience_s: How long the answer is read before the call is cancelled; None is to its end.
    """

    number: int
    kind: str
    path: str
    requests: tuple[bytes, ...]
    metadata: Metadata
    patience_s: float | None


def case(seed: int, number: int, tokens: Mapping[str, str]) -> Case:
    """The call of a number.

    Args:
        seed: Of all.
        number: Which.
        tokens: By tenant; `operator` is an administrator's, the others are common ones.
    """
    rng = random.Random(f"{seed}/{number}")  # noqa: S311 - to be repeated
    (kind,) = rng.choices(list(_KINDS), list(_KINDS.values()))
    (method,) = rng.choices(METHODS, _WEIGHTS)
    drains = method.name == "Drain"
    if drains:
        kind = "spoiled fields"
    path = (
        rng.choice(_UNKNOWN)
        if kind == "unknown method"
        else f"/{method.containing_service.full_name}/{method.name}"
    )
    requests = [_request(rng, method, kind)]
    if kind == "message count":
        requests *= rng.choice((0, 2, 3, 20))
    return Case(
        number=number,
        kind=kind,
        path=path,
        requests=tuple(requests),
        metadata=_metadata(rng, method, kind, tokens),
        patience_s=_patience_s(rng, method, len(requests)),
    )


def _patience_s(rng: random.Random, method: MethodDescriptor, requests: int) -> float | None:
    if not requests:
        return 0.2  # gRPC waits for the message, as long as the client does.
    if not method.server_streaming:
        return None
    return rng.choice((0.0, 0.01, 0.05, 0.2, None if method.name == "GenerateStream" else 0.3))


def _request(rng: random.Random, method: MethodDescriptor, kind: str) -> bytes:
    if method.name == "Drain":
        return _impossible_drain(rng)
    if kind == "random bytes":
        return rng.randbytes(rng.choice((0, 1, 2, 7, 64, 500, 70_000)))
    message = _new(rng.choice(METHODS).input_type if kind == "another message" else method.input_type)
    if kind == "random fields":
        _fill_at_random(rng, message)
    else:
        _fill_well(rng, message)
    if kind == "spoiled fields":
        for _ in range(rng.randint(1, _MOST_SPOILED)):
            _spoil(rng, message)
    raw = message.SerializeToString().replace(MARKER, BAD_UTF8)
    return _mangle(rng, raw) if kind == "mangled bytes" else raw


def _impossible_drain(rng: random.Random) -> bytes:
    """Of a time-out that no daemon takes: one that it took would end the run."""
    request = admin_pb2.DrainRequest()
    request.timeout.seconds = hostile_duration_s(rng)
    return request.SerializeToString()


def _metadata(rng: random.Random, method: MethodDescriptor, kind: str, tokens: Mapping[str, str]) -> Metadata:
    common = [name for name in tokens if name != "operator"]
    admin = method.containing_service is _SERVICES[1]
    name = "operator" if rng.random() < (0.85 if admin else 0.1) else rng.choice(common)
    credentials = ("authorization", f"Bearer {tokens[name]}")
    if kind != "metadata":
        return (credentials,) if rng.random() < 0.98 else ()  # noqa: PLR2004 - a share
    odd: tuple[Metadata, ...] = (
        (),
        (("authorization", ""),),
        (("authorization", "Bearer "),),
        (("authorization", "Bearer " + "x" * rng.choice((10, 5000, 1 << 20))),),
        (("authorization", "Basic cm9vdDpyb290"),),
        (("authorization", f"Bearer {tokens[name]}\x7f~"),),
        (credentials, ("authorization", "Bearer other")),
        (("authorization-bin", rng.randbytes(30)), credentials),
        (*((f"x-{i}", "y" * 20) for i in range(rng.choice((50, 1000)))), credentials),
        (("x-data-bin", rng.randbytes(rng.choice((0, 100, 9000)))), credentials),
        (("te", "x"), ("user-agent", ""), credentials),
        (("traceparent", "00-" + "f" * 90), ("host", "../.."), credentials),
    )
    return rng.choice(odd)


# -- messages -----------------------------------------------------------------------------------------------


def _new(descriptor: Descriptor) -> Message:
    return message_factory.GetMessageClass(descriptor)()


def _is_map(field: Field) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _fill_well(rng: random.Random, message: Message) -> None:
    """Set what makes a request that the daemon would take; the rest stays unset."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None and field.name in {
            "spec",
            "limits",
            "tokens",
            "text",
            "chat",
            "sampling",
        }:
            oneof = field.containing_oneof
            if oneof is not None and field is not oneof.fields[hash_of(message) % len(oneof.fields)]:
                continue
            inner = getattr(message, field.name)
            inner.SetInParent()
            _fill_well(rng, inner)
        elif field.name == "messages":
            getattr(message, field.name).add(role="user", content="hello")
        elif (value := good_value(rng, field.name, str(message.DESCRIPTOR.name))) is not None:
            _set(message, field, value)


def hash_of(message: Message) -> int:
    """Which member of a oneof a message gets."""
    return len(message.DESCRIPTOR.name)


def _set(message: Message, field: Field, value: Any) -> None:
    if field.is_repeated:
        getattr(message, field.name).extend(value if isinstance(value, list) else [value])
    else:
        setattr(message, field.name, value)


def _fill_at_random(rng: random.Random, message: Message, depth: int = 0) -> None:
    for field in message.DESCRIPTOR.fields:
        if depth < _MOST_DEPTH and rng.random() < 0.5:  # noqa: PLR2004 - half of them
            _set_hostile(rng, message, field, depth)


def _spoil(rng: random.Random, message: Message) -> None:
    """Give one field, here or further inside, a value that nobody expects."""
    fields: list[Field] = list(message.DESCRIPTOR.fields)
    if not fields:
        return
    field = rng.choice(fields)
    inner = field.message_type is not None and not field.is_repeated
    if inner and rng.random() < 0.9:  # noqa: PLR2004 - mostly further inside
        target = getattr(message, field.name)
        target.SetInParent()
        _spoil(rng, target)
    else:
        _set_hostile(rng, message, field, 0)


def _set_hostile(rng: random.Random, message: Message, field: Field, depth: int) -> None:
    target = getattr(message, field.name)
    if _is_map(field):
        value_type = field.message_type.fields_by_name["value"]
        key_type = field.message_type.fields_by_name["key"]
        for index in range(hostile_count(rng)):
            key = _scalar(rng, key_type)
            key = f"{key[:200]}{index}" if isinstance(key, str) else (key + index) % (1 << 31)
            target[key] = _scalar(rng, value_type)
    elif field.is_repeated and field.message_type is not None:
        for _ in range(min(hostile_count(rng), 1000)):
            _fill_at_random(rng, target.add(), depth + 2)
    elif field.is_repeated:
        one = _scalar(rng, field)
        count = hostile_count(rng)
        target.extend([one] * (count if len(str(one)) < 1000 else min(count, 20)))  # noqa: PLR2004 - no gigabytes
    elif field.message_type is not None:
        target.SetInParent()
        _fill_at_random(rng, target, depth + 1)
    else:
        setattr(message, field.name, _scalar(rng, field))


def _scalar(rng: random.Random, field: Field) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            text = hostile_text(rng, field.name)
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        case FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5  # noqa: PLR2004 - either
        case kind:
            return hostile_number(rng, kind)


# -- bytes --------------------------------------------------------------------------------------------------


def _mangle(rng: random.Random, raw: bytes) -> bytes:
    """Bytes of a message, damaged as on a bad way or by a bad hand."""
    at = rng.randrange(len(raw) + 1)
    before, after = raw[:at], raw[at:]
    damages: tuple[Callable[[], bytes], ...] = (
        lambda: before,
        lambda: _flip(rng, raw),
        lambda: before + rng.randbytes(rng.randint(1, 20)) + after,
        lambda: before + after[rng.randint(1, 10) :],
        lambda: raw + after * rng.randint(1, 50),
        lambda: raw + b"\x0b" * rng.choice((1, 99, 101, 20_000)),  # Groups that never end.
        lambda: raw + b"\x0a" + b"\xff" * rng.randint(1, 12) + b"\x7f",  # A length beyond all.
        lambda: raw + b"\xc2\x3e\x05hello" * rng.choice((1, 5000)),  # A field of a later version.
        lambda: _nested(rng.choice((50, 120, 3000))),
    )
    return rng.choice(damages)()


def _flip(rng: random.Random, raw: bytes) -> bytes:
    data = bytearray(raw)
    for _ in range(rng.randint(1, 8) if data else 0):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def _nested(levels: int) -> bytes:
    """A message inside a message inside a message: field 2 of each."""
    data = b""
    for _ in range(levels):
        size, length = len(data), b""
        while size > 0x7F:  # noqa: PLR2004 - a varint's digit
            length += bytes((size & 0x7F | 0x80,))
            size >>= 7
        data = b"\x12" + length + bytes((size,)) + data
    return data
