"""Domain errors: each says what the caller should do.

    BatondError
    ├── InvalidRequestError      the request can never work as it is: change it
    │   └── RequestTooLargeError prompt + output exceeds what the engine can hold: shorten it
    ├── NotFoundError            no such job for this tenant
    ├── ConflictError            the id is taken by a job with another body: use another id
    ├── StateError               the query or job is in another state: look, then decide
    ├── PermissionDeniedError    the tenant may not do this
    ├── UnauthenticatedError     credentials are missing or wrong
    ├── ExhaustedError           a bounded resource is full: free something or retry later
    ├── UnavailableError         draining or still loading: retry, perhaps elsewhere
    ├── UnsupportedModelError    this model can't be served exactly: serve another, or another mode
    ├── DeadlineError            the time the caller gave is over
    └── ConfigError              the operator must mend the configuration

`batond.daemon.front.status` maps every class to one gRPC status.
"""

from __future__ import annotations


class BatondError(Exception):
    """Root of all errors batond raises on purpose.

    Attributes:
        reason: Machine-readable constant, UPPER_SNAKE_CASE, stable across releases.
        details: Machine-readable facts (limits, ids, states) as strings.
    """

    reason = "BATOND"

    def __init__(self, message: str, *, reason: str | None = None, **details: object) -> None:
        super().__init__(message)
        self.message = message
        if reason is not None:
            self.reason = reason
        self.details = {key: str(value) for key, value in details.items()}


class InvalidRequestError(BatondError, ValueError):
    """The request can never work as it is."""

    reason = "INVALID_REQUEST"


class RequestTooLargeError(InvalidRequestError):
    """Prompt plus output exceeds the one limit the engine enforces and reports."""

    reason = "TOO_MANY_TOKENS"


class NotFoundError(BatondError, LookupError):
    """No such job for this tenant, or no such model."""

    reason = "NOT_FOUND"


class ConflictError(BatondError):
    """The id is taken by a job with another body."""

    reason = "ALREADY_EXISTS"


class StateError(BatondError, RuntimeError):
    """The query or job is in a state in which this can't be done."""

    reason = "WRONG_STATE"


class PermissionDeniedError(BatondError):
    """The tenant may not do this."""

    reason = "PERMISSION_DENIED"


class UnauthenticatedError(BatondError):
    """Credentials are missing or wrong."""

    reason = "UNAUTHENTICATED"


class ExhaustedError(BatondError):
    """A bounded resource is full; something must be freed, or the call retried later."""

    reason = "RESOURCE_EXHAUSTED"


class UnavailableError(BatondError):
    """The daemon is loading or draining, or a server it needs is away."""

    reason = "UNAVAILABLE"


class UnsupportedModelError(BatondError):
    """This model can't be served exactly; the message says why."""

    reason = "UNSUPPORTED_MODEL"


class DeadlineError(BatondError):
    """The time the caller or the class gave is over."""

    reason = "DEADLINE_EXCEEDED"


class ConfigError(BatondError):
    """The operator must mend the configuration."""

    reason = "BAD_CONFIG"
