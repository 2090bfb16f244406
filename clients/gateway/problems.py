"""Errors as OpenAI's API tells them: a status, and one object with message, type, param and code."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import grpc

from batond.clients import errors

if TYPE_CHECKING:
    from batond.clients.model import JobInfo

_INVALID: Final = "invalid_request_error"
_BUSY: Final = "rate_limit_error"
_AWAY: Final = "service_unavailable_error"
_SERVER: Final = "server_error"
_TIMEOUT: Final = "timeout_error"

#: Status and type by class of error; the nearest base class counts, so a new subclass is covered.
_KINDS: Final[dict[type[errors.BatondClientError], tuple[int, str]]] = {
    errors.BatondClientError: (500, _SERVER),
    errors.RequestError: (400, _INVALID),
    errors.InvalidRequestError: (400, _INVALID),
    errors.NotFoundError: (404, _INVALID),
    errors.AlreadyExistsError: (409, _INVALID),
    errors.WrongStateError: (400, _INVALID),
    errors.UnsupportedCallError: (501, _SERVER),
    errors.AccessError: (403, "permission_error"),
    errors.UnauthenticatedError: (401, "authentication_error"),
    errors.PermissionDeniedError: (403, "permission_error"),
    errors.RetryLaterError: (503, _AWAY),
    errors.UnavailableError: (503, _AWAY),
    errors.ExhaustedError: (429, _BUSY),
    errors.TimeoutExpiredError: (504, _TIMEOUT),
    errors.ClientDeadlineError: (504, _TIMEOUT),
    errors.ServerDeadlineError: (504, _TIMEOUT),
    errors.CallEndedError: (502, _SERVER),
    errors.CallCancelledError: (502, _SERVER),
    errors.ServerAbortedError: (502, _SERVER),
    errors.ServerError: (500, _SERVER),
    errors.JobEndedError: (500, _SERVER),
    errors.JobFailedError: (500, _SERVER),
    errors.JobCancelledError: (400, _INVALID),
}
#: The words that programs look for, by the daemon's.
_CODES: Final = {
    "NO_CREDENTIALS": "invalid_api_key",
    "BAD_TOKEN": "invalid_api_key",
    "BAD_CERTIFICATE": "invalid_api_key",
    "MODEL_NOT_SERVED": "model_not_found",
    "TOO_MANY_TOKENS": "context_length_exceeded",
    "PROMPT_TOO_LONG": "context_length_exceeded",
}
_STATUS_CODES: Final = {401: "invalid_api_key", 429: "rate_limit_exceeded", 503: "service_unavailable"}
#: Fields of the contract by the names that callers know them under.
_PARAMS: Final = {
    "text": "prompt",
    "text.text": "prompt",
    "tokens": "prompt",
    "tokens.token_ids": "prompt",
    "chat": "messages",
    "chat.messages": "messages",
    "sla_class": "service_tier",
    "json_schema": "response_format",
}


class ApiError(Exception):
    """What a caller is told.

    Args:
        status: HTTP status.
        message: For people.
        kind: Sort of error; by default that of a wrong request.
        param: Which field is wrong.
        code: Machine-readable constant.
        retry_after_s: When to try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = _INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        """What is sent."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """What goes with it."""
        found = {}
        if self.retry_after_s is not None:
            # Whole seconds by HTTP; clients of OpenAI's API read the milliseconds first.
            found["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
            found["retry-after-ms"] = str(max(1, math.ceil(self.retry_after_s * 1e3)))
        if self.status == 401:  # noqa: PLR2004 - an HTTP status
            found["www-authenticate"] = "Bearer"
        return found


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that can never work as it is."""
    return ApiError(400, message, param=param, code=code)


def not_found(message: str, param: str | None = None) -> ApiError:
    """Something that isn't there, or is another tenant's."""
    return ApiError(404, message, param=param, code="not_found")


def of_error(error: errors.BatondClientError) -> ApiError:
    """Says what a client's error is in OpenAI's words."""
    status, kind = next(_KINDS[one] for one in type(error).__mro__ if one in _KINDS)
    field = next(iter(error.fields), error.details.get("field", ""))
    code = _CODES.get(error.reason) or _STATUS_CODES.get(status) or error.reason.lower() or None
    return ApiError(
        status,
        error.message,
        kind=kind,
        param=param_of(field),
        code=code,
        retry_after_s=(error.retry_after_s or 1.0) if status in {429, 503} else None,
    )


def of_job(job: JobInfo) -> ApiError | None:
    """Says why a job did not succeed; None if it did."""
    if job.error_code:
        status = next((one for one in grpc.StatusCode if one.value[0] == job.error_code), None)
        kind = errors.BY_STATUS.get(status, errors.ServerError) if status else errors.ServerError
        if status is grpc.StatusCode.DEADLINE_EXCEEDED:
            kind = errors.ServerDeadlineError
        return of_error(kind(job.error_message, reason=job.error_reason))
    if job.state == "cancelled":
        return ApiError(400, "the generation was cancelled", code="cancelled")
    if job.state == "failed":
        return ApiError(500, job.error_message or "the generation failed", kind=_SERVER)
    return None


def param_of(field: str) -> str | None:
    """The name under which callers know a field of the contract."""
    path = field.removeprefix("spec.").removeprefix("sampling.")
    return _PARAMS.get(path, path) or None
