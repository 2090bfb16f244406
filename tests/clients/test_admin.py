"""Tenants, policies, deadlines and updates through both clients."""

from __future__ import annotations

import datetime as dt
from typing import Any

import grpc
import pytest

from batond.clients import PolicyInfo, TenantLimits, build, errors
from batond.v1 import admin_pb2

NOON = dt.datetime(2030, 1, 31, 12, tzinfo=dt.UTC)
LIMITS = TenantLimits(
    weight=2.5,
    sla_classes=("standard", "batch"),
    highest_class="standard",
    default_class="batch",
    lower_class=True,
    max_queued=1,
    max_running=2,
    tokens_per_minute=1 << 40,
    longest_prompt_tokens=4,
    admin=True,
)


def test_limits_arrive_and_come_back(daemon: Any, client: Any) -> None:
    made = client.create_tenant("red", LIMITS, certificate_subject="red.example")
    _, request = daemon.calls[-1]
    assert request.limits == admin_pb2.TenantLimits(
        weight=2.5,
        sla_classes=["standard", "batch"],
        highest_class="standard",
        default_class="batch",
        lower_class=True,
        max_queued=1,
        max_running=2,
        tokens_per_minute=1 << 40,
        longest_prompt_tokens=4,
        admin=True,
    )
    assert made.token == "n3w-t0ken"
    assert made.tenant.limits == LIMITS
    assert made.tenant.certificate_subject == "red.example"
    assert made.tenant.created_time == dt.datetime(2023, 11, 14, 22, 13, 20, tzinfo=dt.UTC)


def test_a_token_is_not_shown_by_accident(client: Any) -> None:
    assert "n3w-t0ken" not in repr(client.create_tenant("red"))


def test_life_of_a_tenant(daemon: Any, client: Any) -> None:
    client.create_tenant("red")
    assert client.rotate_tenant_token("red").token == "r0tated"
    assert client.disable_tenant("red").disabled
    assert not client.enable_tenant("red").disabled
    assert client.update_tenant("red", TenantLimits(max_queued=9)).limits.max_queued == 9
    assert [one.name for one in client.tenants()] == ["red"]
    assert daemon.names() == [
        "CreateTenant",
        "RotateTenantToken",
        "DisableTenant",
        "EnableTenant",
        "UpdateTenant",
        "ListTenants",
    ]


def test_tokens_are_made_once(daemon: Any, client: Any, fault: Any) -> None:
    """A lost answer is told: a second token would be unknown to whoever has the first."""
    daemon.faults["CreateTenant"] = [fault(grpc.StatusCode.UNAVAILABLE)]
    with pytest.raises(errors.UnavailableError):
        client.create_tenant("red")
    assert daemon.names() == ["CreateTenant"]


@pytest.mark.parametrize("limits", [{"max_queued": -1}, {"weight": "much"}, {"tokens_per_minute": 1 << 70}])
def test_limits_that_cant_be_sent(client: Any, limits: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidRequestError) as caught:
        client.create_tenant("red", TenantLimits(**limits))
    assert list(caught.value.fields) == list(limits)


def test_policies(client: Any) -> None:
    assert client.policy() == PolicyInfo(policy="fair", known_policies=("fair", "fcfs"))
    assert client.set_policy("fcfs") == "fair"


def test_a_waiting_job_is_updated(daemon: Any, client: Any) -> None:
    client.submit("x", job_id="j")
    job = client.update("j", sla_class="batch", deadline=NOON)
    assert (job.effective_sla_class, job.deadline) == ("batch", NOON)
    client.update("j", sla_class="batch")
    assert not daemon.calls[-1][1].HasField("deadline")


def test_time_limits_arrive(daemon: Any, client: Any) -> None:
    client.submit("x", deadline=NOON)
    assert daemon.calls[-1][1].spec.deadline.ToDatetime(tzinfo=dt.UTC) == NOON
    client.submit("x", time_limit_s=1.5)
    assert daemon.calls[-1][1].spec.timeout.ToTimedelta() == dt.timedelta(seconds=1.5)
    client.submit("x")
    assert daemon.calls[-1][1].spec.WhichOneof("time_limit") is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deadline": NOON, "time_limit_s": 1.0}, "not both"),
        ({"deadline": NOON.replace(tzinfo=None)}, "time zone"),
        ({"time_limit_s": float("inf")}, "can't be sent"),
        ({"time_limit_s": "soon"}, "can't be sent"),
    ],
)
def test_time_limits_that_cant_be(options: Any, message: str) -> None:
    with pytest.raises(errors.InvalidRequestError, match=message):
        build.spec("x", options)
