"""Tenants between the contract and the daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ValidationError

from batond.daemon.config_tenants import TenantRights
from batond.daemon.errors import InvalidRequestError
from batond.daemon.front import convert
from batond.daemon.front.tenant_book import AddedTenant
from batond.v1 import admin_pb2

if TYPE_CHECKING:
    from batond.daemon.config_tenants import TenantConfig

_HINT_CHARS = 8
_SAME = (
    "highest_class",
    "default_class",
    "lower_class",
    "admin",
    "weight",
    "max_queued",
    "max_running",
    "tokens_per_minute",
    "longest_prompt_tokens",
)


def rights(limits: admin_pb2.TenantLimits) -> TenantRights:
    """Check what a tenant shall be allowed.

    Raises:
        InvalidRequestError: A value is out of range; the details name the field.
    """
    values = {name: getattr(limits, name) for name in _SAME}
    values["classes"] = list(limits.sla_classes)
    values["weight"] = limits.weight or 1.0
    try:
        return TenantRights(**values)
    except ValidationError as error:
        fault = error.errors()[0]
        field = f"limits.{fault['loc'][0]}" if fault["loc"] else "limits"
        raise InvalidRequestError(f"{field}: {fault['msg']}", reason="BAD_TENANT", field=field) from error


def tenant(config: TenantConfig) -> admin_pb2.Tenant:
    """Describe a tenant: never its token, and of the hash only the beginning."""
    shown = admin_pb2.Tenant(
        name=config.name,
        configured=not isinstance(config, AddedTenant),
        token_hint=config.token_sha256[:_HINT_CHARS].lower(),
        certificate_subject=config.certificate_subject,
        limits=admin_pb2.TenantLimits(
            sla_classes=config.classes, **{name: getattr(config, name) for name in _SAME}
        ),
    )
    if isinstance(config, AddedTenant):
        shown.disabled = config.disabled
        shown.created_time.CopyFrom(convert.timestamp(config.created_ms))
        shown.token_time.CopyFrom(convert.timestamp(config.token_ms))
    return shown
