"""What comes over a real channel and is no message."""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock, Mock
from urllib.parse import quote

import grpc
import pytest
import structlog.testing
from google.rpc import error_details_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from batond.daemon.errors import InvalidRequestError, NotFoundError
from batond.daemon.front.calls import Calls
from batond.daemon.front.malformed import RefuseMalformed
from batond.daemon.front.status import to_status
from batond.daemon.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from batond.daemon.errors import BatondError

REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


class Broken(health.aio.HealthServicer):
    """A health service whose `Watch` has a bug."""

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:  # noqa: N802 - gRPC's name
        """Raise what nobody expects."""
        raise ValueError(f"{request.service} {context}")


@pytest.fixture
async def channel(tmp_path: Path) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(interceptors=[RefuseMalformed()])
    health_pb2_grpc.add_HealthServicer_to_server(Broken(), server)
    reflection.enable_server_reflection([health.SERVICE_NAME], server)
    address = f"unix:{tmp_path / 's'}"
    server.add_insecure_port(address)
    await server.start()
    async with grpc.aio.insecure_channel(address) as opened:
        yield opened
    await server.stop(None)


def reason_of(error: grpc.aio.AioRpcError) -> str:
    status = rpc_status.from_call(error)  # type: ignore[arg-type] # it has what is read of a call
    info = error_details_pb2.ErrorInfo()
    assert status is not None
    assert status.details[0].Unpack(info)
    return info.reason


@pytest.mark.parametrize("raw", [b"\xff", b"\x0a\x05ab", b"\x0a\x02\xff\xfe", b"\x0b" * 200])
async def test_bytes_that_are_no_message_are_an_invalid_argument(
    channel: grpc.aio.Channel, raw: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Q1: gRPC's own answer is UNKNOWN, and a traceback in the log."""
    for call in (
        channel.unary_unary("/grpc.health.v1.Health/Check")(raw),
        channel.unary_stream("/grpc.health.v1.Health/Watch")(raw),
        channel.stream_stream(REFLECT)([raw]),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await (call.read() if hasattr(call, "read") else call)
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert reason_of(refusal.value) == "BAD_MESSAGE"
    assert not caplog.records


async def test_a_good_message_goes_through(channel: grpc.aio.Channel) -> None:
    answer = await channel.unary_unary("/grpc.health.v1.Health/Check")(b"")
    assert health_pb2.HealthCheckResponse.FromString(answer).status == health_pb2.HealthCheckResponse.SERVING


async def test_a_bug_gets_an_id_and_no_text(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await channel.unary_stream("/grpc.health.v1.Health/Watch")(b"").read()
    assert refusal.value.code() is grpc.StatusCode.INTERNAL
    assert (refusal.value.details() or "").startswith("internal error ")


@pytest.mark.parametrize("char", ["a", "\0", "\u00e9", "\U0001f469"])
@pytest.mark.parametrize("kind", [InvalidRequestError, NotFoundError])
def test_a_status_fits_into_its_trailers(char: str, kind: Callable[..., BatondError]) -> None:
    """C6: gRPC leaves out a trailer above 2 KiB without a word: no message and no reason at the client."""
    facts = {f"fact{i}": char * 1000 for i in range(20)}
    status = to_status(kind(char * 1_000_000, reason="R" * 30, field=char * 1000, **facts))
    assert status.details
    assert len(quote(status.details)) < 1900
    (trailer,) = (value for _, value in status.trailing_metadata or ())
    assert len(base64.b64encode(trailer)) < 1900


async def test_a_client_that_is_gone_in_mid_write_is_no_fault_of_ours() -> None:
    """C5: gRPC may fail a write, and the status after it, before it says that the call has ended."""
    calls = Calls(lambda _: Mock(name="red"), Metrics([]))
    context = Mock(write=AsyncMock(side_effect=grpc.aio.InternalError("Failed execute_batch")))

    async def handle(_: object) -> None:
        await context.write(b"")

    with structlog.testing.capture_logs() as logs, pytest.raises(asyncio.CancelledError):
        await calls.stream("WatchJob", context, handle)
    assert logs == []
    context.abort_with_status.assert_not_called()
