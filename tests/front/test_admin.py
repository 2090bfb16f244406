"""What administrators may not ask for."""

from __future__ import annotations

from typing import Any
from unittest.mock import AsyncMock, Mock

import grpc
import pytest
import structlog
from google.protobuf import duration_pb2

from batond.daemon.errors import NotFoundError, UnauthenticatedError
from batond.daemon.front.admin import AdminServicer
from batond.daemon.front.calls import Calls
from batond.daemon.front.identity import LocalAdministrators
from batond.daemon.telemetry.metrics import Metrics
from batond.policies.classes import SlaClasses
from batond.v1 import admin_pb2


class AbortedError(Exception):
    """Ends a call as gRPC's own abort does."""


@pytest.mark.parametrize(
    "time",
    [
        {"seconds": -1},
        {"nanos": -1},
        {"seconds": 1 << 40},
        {"seconds": (1 << 63) - 1},
    ],
)
@pytest.mark.parametrize(
    ("method", "kind", "field"),
    [
        ("Drain", admin_pb2.DrainRequest, "timeout"),
        ("WatchBatch", admin_pb2.WatchBatchRequest, "min_interval"),
    ],
)
async def test_what_is_no_time_is_the_callers_fault(
    method: str, kind: Any, field: str, time: dict[str, int]
) -> None:
    classes, state, context = SlaClasses(), Mock(), Mock()
    context.abort_with_status = AsyncMock(side_effect=AbortedError)
    calls = Calls(lambda _: LocalAdministrators(classes).administrator(0), Metrics())
    names = ("dispatcher", "store", "limits", "book", "neighbours")
    parts: dict[str, Any] = {name: Mock() for name in names}
    servicer = AdminServicer(calls=calls, state=state, classes=classes, max_message_bytes=1, **parts)
    with pytest.raises(AbortedError):
        await getattr(servicer, method)(kind(**{field: duration_pb2.Duration(**time)}), context)
    (status,) = context.abort_with_status.await_args.args
    assert status.code is grpc.StatusCode.INVALID_ARGUMENT
    assert field in status.details
    state.request_stop.assert_not_called()


@pytest.mark.parametrize("method", ["ParkJob", "ResumeJob"])
@pytest.mark.parametrize(
    ("tenant", "credentials", "target"),
    [("", True, "local:0/A"), ("blue", True, "blue/A"), ("", False, "A"), ("blue", False, "blue/A")],
)
async def test_the_audit_log_says_whose_job_was_steered(
    method: str, tenant: str, *, credentials: bool, target: str
) -> None:
    """The tenant is the caller's where none is named, and nobody's where the caller is not known."""
    administrator = LocalAdministrators(SlaClasses()).administrator(0)
    assert administrator.name == "local:0"

    def identify(_: object) -> Any:
        if not credentials:
            raise UnauthenticatedError("who are you?", reason="BAD_TOKEN")
        return administrator

    context = Mock()
    context.abort_with_status = AsyncMock(side_effect=AbortedError)
    names = ("dispatcher", "limits", "book", "neighbours", "state")
    parts: dict[str, Any] = {name: Mock() for name in names}
    store = Mock(get=AsyncMock(side_effect=NotFoundError("no such job", reason="JOB_NOT_FOUND")))
    calls = Calls(identify, Metrics())
    servicer = AdminServicer(calls=calls, store=store, classes=SlaClasses(), max_message_bytes=1, **parts)
    request = getattr(admin_pb2, f"{method}Request")(tenant=tenant, job_id="A")
    with structlog.testing.capture_logs() as lines, pytest.raises(AbortedError):
        await getattr(servicer, method)(request, context)
    said = [(line["action"], line["outcome"], line["target"]) for line in lines if "action" in line]
    assert said == [(method, "refused", target)]
