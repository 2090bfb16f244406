"""The one table from domain errors to gRPC statuses, and the machine-readable details that go with them."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from batond.daemon import errors
from batond.daemon.telemetry.logging import get_logger

if TYPE_CHECKING:
    from google.protobuf.message import Message

DOMAIN: Final = "batond"
#: Every class of errors.py; the nearest base class counts, so a new subclass is covered.
CODES: Final[dict[type[errors.BatondError], grpc.StatusCode]] = {
    errors.BatondError: grpc.StatusCode.INTERNAL,
    errors.InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.RequestTooLargeError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.ConflictError: grpc.StatusCode.ALREADY_EXISTS,
    errors.StateError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.PermissionDeniedError: grpc.StatusCode.PERMISSION_DENIED,
    errors.UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    errors.ExhaustedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.UnsupportedModelError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.ConfigError: grpc.StatusCode.INTERNAL,
}
#: Faults of the operator or of ours: the client gets an id, the text goes to the log.
_HIDDEN: Final = frozenset({grpc.StatusCode.INTERNAL})
_RETRY_AFTER_S: Final = {grpc.StatusCode.UNAVAILABLE: 1.0, grpc.StatusCode.RESOURCE_EXHAUSTED: 1.0}
#: A status travels in two HTTP/2 trailers: its message percent-encoded, and all of it as base64. gRPC leaves
#: out a trailer above 2 KiB without a word, and peers break the connection at 8 KiB: these stay below.
_LONGEST_MESSAGE_BYTES: Final = 480
_LONGEST_DESCRIPTION_BYTES: Final = 160
_LONGEST_FIELD_BYTES: Final = 64
_LONGEST_VALUE_BYTES: Final = 128
_MOST_FACTS_BYTES: Final = 400

_log = get_logger(__name__)


def code_of(error: BaseException) -> grpc.StatusCode:
    """The gRPC status for an error; INTERNAL for what we don't know."""
    for kind in type(error).__mro__:
        if kind in CODES:
            return CODES[kind]
    return grpc.StatusCode.INTERNAL


def code_of_reason(reason: str) -> int:
    """The number of the google.rpc.Code for a reason that came from the engine or lies in Redis."""
    found = next((code for kind, code in CODES.items() if kind.reason == reason), grpc.StatusCode.INTERNAL)
    number: int = found.value[0]
    return number


def to_status(error: BaseException) -> grpc.Status:
    """Turn an error into what is sent.

    The message of an unknown error, and of one that the caller can do nothing about, is replaced by an id,
    under which the log has everything.
    """
    code = code_of(error)
    if not isinstance(error, errors.BatondError) or code in _HIDDEN:
        return _hidden(error)
    message = _cut(error.message, _LONGEST_MESSAGE_BYTES)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    room_bytes = _MOST_FACTS_BYTES
    for key, value in error.details.items():
        fact = _cut(value, _LONGEST_VALUE_BYTES)
        room_bytes -= len(key) + len(fact.encode())
        if room_bytes < 0:
            break
        info.metadata[key] = fact
    details: list[Message] = [info]
    if code is grpc.StatusCode.INVALID_ARGUMENT and "field" in error.details:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(error.details["field"], _LONGEST_FIELD_BYTES),
            description=_cut(message, _LONGEST_DESCRIPTION_BYTES),
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if code in _RETRY_AFTER_S:
        known_ms = error.details.get("retry_ms", "")
        delay_s = int(known_ms) / 1000 if known_ms.isdecimal() else _RETRY_AFTER_S[code]
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(delay_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return _pack(code, message, details)


def _hidden(error: BaseException) -> grpc.Status:
    error_id = secrets.token_hex(8)
    _log.error("call_failed", error_id=error_id, exc_info=error)
    info = error_details_pb2.ErrorInfo(reason="INTERNAL", domain=DOMAIN, metadata={"error_id": error_id})
    message = f"internal error {error_id}: the operator finds it in the log under this id"
    return _pack(grpc.StatusCode.INTERNAL, message, [info])


def _pack(code: grpc.StatusCode, message: str, details: list[Message]) -> grpc.Status:
    packed = []
    for detail in details:
        anything = any_pb2.Any()
        anything.Pack(detail)
        packed.append(anything)
    # The stub types miss `to_status`'s argument type of googleapis' own module.
    return rpc_status.to_status(status_pb2.Status(code=code.value[0], message=message, details=packed))


def _cut(text: str, most_bytes: int) -> str:
    # The slice first: a megabyte need not be encoded to be cut.
    raw = text[: most_bytes + 1].encode(errors="replace")
    if len(raw) <= most_bytes:
        return raw.decode()
    return raw[: most_bytes - 3].decode(errors="ignore") + "..."
