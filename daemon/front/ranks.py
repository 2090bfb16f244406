"""How urgent a job may be: its class within its tenant's, and its deadline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from batond.daemon.errors import InvalidRequestError, PermissionDeniedError
from batond.daemon.front import audit

if TYPE_CHECKING:
    from google.protobuf.duration_pb2 import Duration
    from google.protobuf.timestamp_pb2 import Timestamp

    from batond.daemon.front.identity import Tenant
    from batond.policies.classes import SlaClasses
    from batond.v1 import types_pb2

_LONGEST_S: Final = 1e9  # 31 years: what is later is a wrong unit.
_LAST_TIMESTAMP_S: Final = 253_402_300_799  # End of the year 9999: what is later can't be shown again.


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """When a job must have ended; the earlier of both counts.

    Attributes:
        deadline_ms: A point in time, ms of the Redis clock; 0 is never.
        timeout_ms: Counted from the submission; None is never.
    """

    deadline_ms: int = 0
    timeout_ms: int | None = None

    def within(self, seconds: float | None) -> TimeLimit:
        """The same, but no later than in so many seconds; None changes nothing."""
        if seconds is None:
            return self
        ms = max(0, int(min(seconds, _LONGEST_S) * 1000))
        return TimeLimit(self.deadline_ms, ms if self.timeout_ms is None else min(ms, self.timeout_ms))


def time_limit(spec: types_pb2.JobSpec) -> TimeLimit:
    """Read the limit a client set.

    Raises:
        InvalidRequestError: It is no time, or not above 0.
    """
    match spec.WhichOneof("time_limit"):
        case "deadline":
            return TimeLimit(deadline_ms=deadline_ms(spec.deadline, "spec.deadline"))
        case "timeout":
            return TimeLimit(timeout_ms=_timeout_ms(spec.timeout))
    return TimeLimit()


def deadline_ms(deadline: Timestamp, field: str) -> int:
    """Read a point in time; one that has passed is for the queue to refuse, by the clock of Redis.

    Raises:
        InvalidRequestError: It is no time.
    """
    if not (0 < deadline.seconds <= _LAST_TIMESTAMP_S and 0 <= deadline.nanos < 10**9):
        raise InvalidRequestError(
            f"{field} is no point in time from 1970 to 9999", reason="BAD_TIME_LIMIT", field=field
        )
    return int(deadline.seconds) * 1000 + deadline.nanos // 1_000_000


def _timeout_ms(timeout: Duration) -> int:
    nanoseconds = int(timeout.seconds) * 10**9 + timeout.nanos
    if not 0 < nanoseconds <= _LONGEST_S * 1e9:
        field = "spec.timeout"
        raise InvalidRequestError(f"{field} must be above 0", reason="BAD_TIME_LIMIT", field=field)
    return -(-nanoseconds // 1_000_000)


def choose_class(asked: str, tenant: Tenant, classes: SlaClasses) -> str:
    """The class a job is served as.

    Args:
        asked: What the client named; empty takes the tenant's default.
        tenant: Whose job.
        classes: All classes.

    Raises:
        InvalidRequestError: There is no such class.
        PermissionDeniedError: The tenant may not use it, and is not to be served under a less urgent one.
    """
    if not asked:
        return tenant.default_class
    check_class(asked, classes, "spec.sla_class")
    if asked in tenant.classes:
        return asked
    order = classes.get(asked).order
    lower = [one.name for one in classes if one.name in tenant.classes and one.order >= order]
    lowered = tenant.lower_class and bool(lower)
    audit.record(
        "UseClass",
        actor=tenant.name,
        target=asked,
        outcome="lowered" if lowered else "refused",
        reason="CLASS_NOT_ALLOWED",
    )
    if lowered:
        return lower[0]
    raise _not_allowed(asked, tenant, classes)


def lower_class(asked: str, present: str, tenant: Tenant, classes: SlaClasses) -> str:
    """The class a waiting job may be moved to: callers only lower, never raise.

    Raises:
        InvalidRequestError: There is no such class.
        PermissionDeniedError: It is more urgent than the present one, or not the tenant's to use.
    """
    check_class(asked, classes, "sla_class")
    refusal = None
    if present in classes and classes.get(asked).order < classes.get(present).order:
        refusal = PermissionDeniedError(
            f"the job is served as {present}; it can't be raised to {asked}",
            reason="CLASS_RAISED",
            present=present,
        )
    elif asked not in tenant.classes:
        refusal = _not_allowed(asked, tenant, classes)
    if refusal is None:
        return asked
    audit.record("UseClass", actor=tenant.name, target=asked, outcome="refused", reason=refusal.reason)
    raise refusal


def check_class(asked: str, classes: SlaClasses, field: str) -> None:
    """Refuse an unknown class.

    Raises:
        InvalidRequestError: It is one; the message names those there are.
    """
    if asked not in classes:
        known = ", ".join(classes.names)
        raise InvalidRequestError(
            f"unknown SLA class {asked[:100]!r}; known are {known}",
            reason="UNKNOWN_CLASS",
            field=field,
            known=known,
        )


def _not_allowed(asked: str, tenant: Tenant, classes: SlaClasses) -> PermissionDeniedError:
    allowed = ", ".join(name for name in classes.names if name in tenant.classes)
    return PermissionDeniedError(
        f"tenant {tenant.name} may not use the class {asked}, only {allowed}",
        reason="CLASS_NOT_ALLOWED",
        allowed=allowed,
    )
