"""Bytes on the daemon's socket that are no gRPC, and connections that say nothing."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from batond.bench.fuzz_streams import hostile_stream, message, request
from batond.clients.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Fuzzed, Plan

SILENT = 200
AT_ONCE = 16
MOST_GROWTH_BYTES = 100 << 20
pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(3600)]


async def connect(fuzzed: Fuzzed) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect, as soon as the daemon listens (again)."""
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(OSError):
                return await asyncio.open_unix_connection(str(fuzzed.daemon.socket))
            await asyncio.sleep(0.05)


async def send(fuzzed: Fuzzed, raw: bytes, patience_s: float) -> bytes:
    """Send bytes and read for a while what is said to them."""
    reader, writer = await connect(fuzzed)
    heard = b""
    with contextlib.suppress(OSError, TimeoutError):
        writer.write(raw)
        async with asyncio.timeout(patience_s):
            await writer.drain()
            while part := await reader.read(1 << 16):
                heard += part
    writer.close()
    return heard


async def patient_job(fuzzed: Fuzzed) -> None:
    """A good job, of a client that tries again."""
    async with asyncio.timeout(30):
        while True:
            try:
                await fuzzed.good_job()
            except UnavailableError:
                await asyncio.sleep(0.1)
            else:
                return


async def test_a_path_that_is_no_text_ends_nothing(fuzzed: Fuzzed) -> None:
    """C5: it ends the loop of gRPC's server, or its process, where gRPC decodes it."""
    path = b"/\xff\xfe"
    async with (
        fuzzed.daemon.async_client("good") as client,
        client.generate(token_ids=[1], max_tokens=800, seed=1) as stream,
    ):
        await anext(stream)
        for _ in range(20):
            assert await send(fuzzed, request("", message(b""), h_path=path), 1.0)
        assert len((await stream.last_job()).output_token_ids) == 800
    await fuzzed.good_job()
    assert fuzzed.in_log("server_replaced") == []
    assert fuzzed.faults_in_log() == []


async def test_bytes_that_are_no_grpc_harm_their_own_connection_only(
    fuzzed: Fuzzed, plan: Plan, say: Callable[..., None]
) -> None:
    """C5, C6: other protocols, broken frames, floods, lies about sizes, and clients that hang up anywhere."""
    await fuzzed.good_job()
    before_bytes = fuzzed.rss_bytes
    silent = [await connect(fuzzed) for _ in range(SILENT)]
    counts: Counter[str] = Counter()
    left = iter(plan.numbers(200, 10_000))

    async def sender() -> None:
        for number in left:
            name, raw = hostile_stream(plan.seed, number, fuzzed.tokens["red"])
            await send(fuzzed, raw, random.Random(number).choice((0.0, 0.01, 0.1)))
            counts[name] += 1
            if number % 100 == 99:
                await patient_job(fuzzed)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(sender())
    for _, writer in silent:
        writer.close()
    await patient_job(fuzzed)
    say(f"seed {plan.seed}: {counts.total()} connections", dict(counts))
    assert fuzzed.faults_in_log(no_text=True) == []
    fuzzed.wait_for_metric("batond_open_streams", 0)
    growth_bytes = fuzzed.rss_bytes - before_bytes
    say(f"the front grew by {growth_bytes >> 20} MiB")
    assert growth_bytes < MOST_GROWTH_BYTES


async def test_the_requests_that_are_varied_would_be_answered(fuzzed: Fuzzed) -> None:
    """Else nothing of what is sent above would come as far as the daemon's own code."""
    path = "/batond.v1.AdminService/GetServerInfo"
    heard = await send(fuzzed, request(fuzzed.tokens["operator"], message(b""), h_path=path), 2.0)
    assert b"priority" in heard, "the name of the policy"
