"""What administrators may not ask for."""

from __future__ import annotations

from typing import Any
from unittest.mock import AsyncMock, Mock

import grpc
import pytest
from google.protobuf import duration_pb2

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
