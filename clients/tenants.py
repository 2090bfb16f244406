"""What administrators see and set: tenants and policies, and their way to and from the contract."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from batond.clients.errors import InvalidRequestError
from batond.v1 import admin_pb2

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """What a tenant may do and use. 0 is no limit of the tenant's own.

    Attributes:
        weight: Share among tenants that compete, relative to theirs.
        sla_classes: Classes it may ask for; empty is all up to `highest_class`.
        highest_class: The most urgent class it may ask for; empty is no cap.
        default_class: Class of a job that names none; empty is "standard" if allowed, else the least urgent.
        lower_class: Serve a request for too urgent a class under the most urgent one allowed.
        max_queued: Most jobs that wait.
        max_running: Most jobs that run at the same time, on all daemons.
        tokens_per_minute: Most tokens a minute, of prompts and outputs.
        longest_prompt_tokens: Longest prompt.
        admin: May use the admin service.
    """

    weight: float = 1.0
    sla_classes: tuple[str, ...] = ()
    highest_class: str = ""
    default_class: str = ""
    lower_class: bool = False
    max_queued: int = 0
    max_running: int = 0
    tokens_per_minute: int = 0
    longest_prompt_tokens: int = 0
    admin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantInfo:
    """Who may use the daemons of a queue.

    Attributes:
        name: Scope of its jobs.
        limits: What it may do and use.
        disabled: Its calls are refused.
        configured: It stands in the daemon's configuration, where alone it can be changed.
        token_hint: The beginning of its token's SHA-256 (hex); empty if it has none.
        certificate_subject: The client certificate it is known by; empty is none.
        created_time: When it was added (UTC); None for configured ones.
        token_time: When its token was made (UTC); None for configured ones.
    """

    name: str
    limits: TenantLimits
    disabled: bool = False
    configured: bool = False
    token_hint: str = ""
    certificate_subject: str = ""
    created_time: datetime | None = None
    token_time: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantToken:
    """A tenant and the token just made for it, which nobody can show again."""

    tenant: TenantInfo
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInfo:
    """The active scheduling policy and all registered ones."""

    policy: str
    known_policies: tuple[str, ...]


def limits_message(limits: TenantLimits) -> admin_pb2.TenantLimits:
    """Puts limits into the contract's form.

    Raises:
        InvalidRequestError: A value that its field can't hold.
    """
    message = admin_pb2.TenantLimits()
    for one in fields(limits):
        value = getattr(limits, one.name)
        try:
            message.MergeFrom(admin_pb2.TenantLimits(**{one.name: value}))
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(
                f"{one.name} can't be sent: {error}", fields={one.name: str(error)}
            ) from error
    return message


def create(name: str, limits: TenantLimits, certificate_subject: str) -> admin_pb2.CreateTenantRequest:
    """Makes the request to add a tenant."""
    return admin_pb2.CreateTenantRequest(
        name=name, limits=limits_message(limits), certificate_subject=certificate_subject
    )


def update(name: str, limits: TenantLimits) -> admin_pb2.UpdateTenantRequest:
    """Makes the request to replace a tenant's limits."""
    return admin_pb2.UpdateTenantRequest(name=name, limits=limits_message(limits))


def tenant(message: admin_pb2.Tenant) -> TenantInfo:
    """Gives a tenant."""
    limits = message.limits
    values: dict[str, Any] = {one.name: getattr(limits, one.name) for one in fields(TenantLimits)}
    values["sla_classes"] = tuple(limits.sla_classes)
    return TenantInfo(
        name=message.name,
        limits=TenantLimits(**values),
        disabled=message.disabled,
        configured=message.configured,
        token_hint=message.token_hint,
        certificate_subject=message.certificate_subject,
        created_time=_time(message.created_time) if message.HasField("created_time") else None,
        token_time=_time(message.token_time) if message.HasField("token_time") else None,
    )


def token(
    message: admin_pb2.CreateTenantResponse | admin_pb2.RotateTenantTokenResponse,
) -> TenantToken:
    """Gives a tenant with its new token."""
    return TenantToken(tenant=tenant(message.tenant), token=message.token)


def policy(message: admin_pb2.GetPolicyResponse) -> PolicyInfo:
    """Gives the active policy."""
    return PolicyInfo(policy=message.policy, known_policies=tuple(message.known_policies))


def _time(stamp: Timestamp) -> datetime:
    return stamp.ToDatetime(tzinfo=UTC)
