"""Tenants between the contract and the daemon, and what the audit log cuts."""

from __future__ import annotations

from typing import Any

import pytest
import structlog.testing

from batond.daemon.config_tenants import TenantConfig, TenantRights
from batond.daemon.errors import InvalidRequestError
from batond.daemon.front import audit, tenant_convert
from batond.daemon.front.tenant_book import AddedTenant
from batond.v1 import admin_pb2


def test_unset_limits_are_the_defaults() -> None:
    assert tenant_convert.rights(admin_pb2.TenantLimits()) == TenantRights()


def test_rights_come_back_as_they_were_sent() -> None:
    sent = admin_pb2.TenantLimits(
        weight=2.5,
        sla_classes=["batch"],
        highest_class="standard",
        default_class="batch",
        lower_class=True,
        max_queued=1,
        max_running=2,
        tokens_per_minute=3,
        longest_prompt_tokens=4,
        admin=True,
    )
    rights = tenant_convert.rights(sent)
    added = AddedTenant(
        **rights.model_dump(), name="red", token_sha256="AB" * 32, disabled=True, created_ms=1
    )
    shown = tenant_convert.tenant(added)
    assert shown.limits == sent
    assert (shown.token_hint, shown.disabled, shown.configured) == ("abababab", True, False)
    assert not tenant_convert.tenant(TenantConfig(name="red", token_sha256="AB" * 32)).HasField(
        "created_time"
    )


@pytest.mark.parametrize(
    "limits",
    [{"weight": -1.0}, {"weight": float("nan")}, {"weight": float("inf")}, {"tokens_per_minute": 1 << 60}],
)
def test_what_no_tenant_can_have_names_its_field(limits: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        tenant_convert.rights(admin_pb2.TenantLimits(**limits))
    assert caught.value.details["field"] == f"limits.{next(iter(limits))}"


def test_a_stranger_cant_fill_the_log() -> None:
    with structlog.testing.capture_logs() as lines:
        audit.record("CreateTenant", actor="", outcome="refused", target="x" * 10**6)
    assert len(lines[0]["target"]) == audit.LONGEST_TARGET_CHARS
