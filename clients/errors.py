"""What can go wrong between a client and the daemon; each class says what the caller should do.

BatondClientError
├── RequestError                the call can never work as it is
│   ├── InvalidRequestError     change the request; `fields` names what is wrong (also raised before sending)
│   ├── NotFoundError           check the id or the model's name
│   ├── AlreadyExistsError      the id belongs to a job with another body: use another id
│   ├── WrongStateError         look at its state, then decide
│   └── UnsupportedCallError    the daemon doesn't know this call: use a client of its version
├── AccessError
│   ├── UnauthenticatedError    give a valid token or client certificate
│   └── PermissionDeniedError   ask the operator
├── RetryLaterError             nothing is wrong with the request; `retry_after_s` if the daemon said when
│   ├── UnavailableError        the daemon is away, loading or draining
│   └── ExhaustedError          a quota or the queue is full: free something or wait
├── TimeoutExpiredError
│   ├── ClientDeadlineError     this client's own time-out is over; the job may go on
│   └── ServerDeadlineError     the daemon's limit is over, such as the class's longest queue time
├── CallEndedError
│   ├── CallCancelledError      this client closed the call
│   └── ServerAbortedError      the daemon ended the call
├── ServerError                 a fault of the daemon: report it with the id in `details`
└── JobEndedError               the call worked, the job did not; `job` has all there is
    ├── JobFailedError          `reason` says why
    └── JobCancelledError       somebody cancelled it
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from google.protobuf.any_pb2 import Any as AnyMessage

    from batond.clients.model import JobInfo


class BatondClientError(Exception):
    """Root of all errors of the clients.

    Attributes:
        message: What happened, without the hint.
        hint: What to do.
        reason: Machine-readable constant of the daemon (google.rpc.ErrorInfo); empty if it gave none.
        details: Machine-readable facts of the daemon: limits, ids, states.
        fields: What is wrong with which field of the request, by its path (google.rpc.BadRequest).
        retry_after_s: When the daemon expects that a retry makes sense (google.rpc.RetryInfo).
        code: The gRPC status; None if the error was found before sending.
    """

    hint: str = ""

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        details: Mapping[str, str] = MappingProxyType({}),
        fields: Mapping[str, str] = MappingProxyType({}),
        retry_after_s: float | None = None,
        code: grpc.StatusCode | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.details = dict(details)
        self.fields = dict(fields)
        self.retry_after_s = retry_after_s
        self.code = code

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class RequestError(BatondClientError):
    """The call can never work as it is."""


class InvalidRequestError(RequestError, ValueError):
    """The request is wrong: change it."""

    hint = "change the request"


class NotFoundError(RequestError, LookupError):
    """No such job for this tenant, or no such model."""

    hint = "check the name; jobs of other tenants and expired jobs are not found"


class AlreadyExistsError(RequestError):
    """The id belongs to a job with another body."""

    hint = "use another id or name, or repeat the very same request"


class WrongStateError(RequestError):
    """The job is in a state in which this can't be done."""

    hint = "look at its state, then decide"


class UnsupportedCallError(RequestError):
    """The daemon doesn't know this call."""

    hint = "use the client of the daemon's own version"


class AccessError(BatondClientError):
    """The caller may not do this."""


class UnauthenticatedError(AccessError):
    """Credentials are missing or wrong."""

    hint = "give a valid token or client certificate"


class PermissionDeniedError(AccessError):
    """The tenant may not do this."""

    hint = "ask the operator of the daemon"


class RetryLaterError(BatondClientError):
    """Nothing is wrong with the request: try again later."""


class UnavailableError(RetryLaterError):
    """The daemon is away, loading or draining."""

    hint = (
        "check that the daemon runs and is reached by this address (with TLS, if it has it), or retry later"
    )

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message, **facts)
        if self.reason:  # Its own word: it runs, and is reached.
            self.hint = "retry later, or at another daemon"


class ExhaustedError(RetryLaterError):
    """A quota, the queue or a size limit is full."""

    hint = "free something, send less, or retry later"


class TimeoutExpiredError(BatondClientError, TimeoutError):
    """A time limit is over."""


class ClientDeadlineError(TimeoutExpiredError):
    """The time-out this client gave is over; what it asked for may go on."""

    hint = "give a longer timeout_s; a submitted job goes on and can be watched"


class ServerDeadlineError(TimeoutExpiredError):
    """A time limit of the daemon is over."""

    hint = "retry when there is less load, or use a more urgent class"


class CallEndedError(BatondClientError):
    """The call was ended before it was complete."""


class CallCancelledError(CallEndedError):
    """This client closed the call."""

    hint = "this client closed the call itself"


class ServerAbortedError(CallEndedError):
    """The daemon ended the call."""

    hint = "look at the job; submit it again if it is gone"


class ServerError(BatondClientError):
    """A fault of the daemon."""

    hint = "report it to the operator; the daemon's log has the details"


class JobEndedError(BatondClientError):
    """The call worked, but the job did not succeed.

    Attributes:
        job: The job in its final state, with the output it got to.
    """

    def __init__(self, job: JobInfo, message: str, *, reason: str = "") -> None:
        super().__init__(message, reason=reason)
        self.job = job


class JobFailedError(JobEndedError):
    """The job can't be finished."""


class JobCancelledError(JobEndedError):
    """Somebody cancelled the job."""


#: Every status but OK, and but the two that need a look at who ended the call.
BY_STATUS: Final[Mapping[grpc.StatusCode, type[BatondClientError]]] = MappingProxyType(
    {
        grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
        grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
        grpc.StatusCode.NOT_FOUND: NotFoundError,
        grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
        grpc.StatusCode.FAILED_PRECONDITION: WrongStateError,
        grpc.StatusCode.UNIMPLEMENTED: UnsupportedCallError,
        grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
        grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
        grpc.StatusCode.UNAVAILABLE: UnavailableError,
        grpc.StatusCode.RESOURCE_EXHAUSTED: ExhaustedError,
        grpc.StatusCode.ABORTED: ServerAbortedError,
        grpc.StatusCode.INTERNAL: ServerError,
        grpc.StatusCode.UNKNOWN: ServerError,
        grpc.StatusCode.DATA_LOSS: ServerError,
    }
)


def from_rpc_error(
    error: grpc.RpcError, *, time_is_over: bool = False, closed_here: bool = False
) -> BatondClientError:
    """Turns what gRPC raised into the error that says what to do.

    Args:
        error: A finished call of the sync or the asyncio stack.
        time_is_over: Whether the call's own time-out has passed; tells its deadline from the server's.
        closed_here: Whether this client closed the call; tells its cancel from the server's.
    """
    code = error.code()
    message = error.details() or f"the call ended with {code.name}"
    # gRPC itself never adds details, so an answer with details is the daemon's own word.
    rich = _details_of(error)
    kind: type[BatondClientError]
    if code is grpc.StatusCode.CANCELLED:
        kind = CallCancelledError if closed_here else ServerAbortedError
    elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
        kind = ClientDeadlineError if time_is_over and not rich else ServerDeadlineError
    else:
        kind = BY_STATUS.get(code, ServerError)
    reason, facts, fields, retry_after_s = _read(rich)
    return kind(message, reason=reason, details=facts, fields=fields, retry_after_s=retry_after_s, code=code)


def _details_of(error: grpc.RpcError) -> list[AnyMessage]:
    try:
        # It needs nothing of a call but code, details and trailing metadata, which the error has.
        status = rpc_status.from_call(cast("grpc.Call", error))
    except (ValueError, DecodeError):
        # Details that contradict the status or can't be read: the status itself still counts.
        return []
    return list(status.details) if status is not None else []


def _read(rich: Iterable[AnyMessage]) -> tuple[str, dict[str, str], dict[str, str], float | None]:
    reason, facts, fields, retry_after_s = "", {}, {}, None
    for item in rich:
        info = error_details_pb2.ErrorInfo()
        bad = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if item.Unpack(info):
            reason, facts = info.reason, dict(info.metadata)
        elif item.Unpack(bad):
            fields = {violation.field: violation.description for violation in bad.field_violations}
        elif item.Unpack(retry):
            retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
    return reason, facts, fields, retry_after_s
