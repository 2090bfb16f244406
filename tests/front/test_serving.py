"""A server that listens no more is replaced, and unknown calls are refused as gRPC would."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc

from batond.daemon.front.serving import Serving
from batond.daemon.front.unknown_calls import careful_server

if TYPE_CHECKING:
    from pathlib import Path

CHECK = "/grpc.health.v1.Health/Check"


async def test_a_server_that_listens_no_more_is_replaced(tmp_path: Path) -> None:
    """V3: the daemon would live on, and nobody would reach it."""
    address = f"unix:{tmp_path / 's'}"
    made: list[grpc.aio.Server] = []
    started = asyncio.Queue[int]()

    def build() -> grpc.aio.Server:
        server = careful_server()
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
        server.add_insecure_port(address)
        made.append(server)
        return server

    serving = Serving(build, [address], lambda: started.put_nowait(len(made)))
    await serving.start()
    watch = asyncio.create_task(serving.run())
    async with asyncio.timeout(60):
        assert await started.get() == 1
        await made[0].stop(None)
        assert await started.get() == 2
        async with grpc.aio.insecure_channel(address) as channel:
            assert await channel.unary_unary(CHECK)(b"")
    watch.cancel()
    await serving.stop(0.1)


async def test_an_unknown_call_is_refused_and_the_next_one_is_heard(tmp_path: Path) -> None:
    """C5: as gRPC itself would, but for the look at its path."""
    server = careful_server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    address = f"unix:{tmp_path / 's'}"
    server.add_insecure_port(address)
    await server.start()
    async with asyncio.timeout(60), grpc.aio.insecure_channel(address) as channel:
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await channel.unary_unary("/x.Y/Z")(b"")
            assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert await channel.unary_unary(CHECK)(b"")
    await server.stop(None)
