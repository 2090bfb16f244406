"""Daemons tell of themselves; who stops telling is gone, and leaves nothing."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import pytest

from batond.daemon.errors import UnavailableError
from batond.daemon.queue import open_async
from batond.daemon.queue.keys import DAEMONS_KEY, TENANTS_KEY
from batond.daemon.queue.registry import TELL_EVERY_S, TTL_MS, DaemonRecord, Registry

if TYPE_CHECKING:
    import redis.asyncio

A = DaemonRecord(id="a", model="m", address="gpu0:7431", state="ready", rows=4, version="1", started_ms=5)
B = DaemonRecord(id="b", model="m", state="loading", started_ms=3)
C = DaemonRecord(id="c", model="k")


async def gone(client: redis.asyncio.Redis) -> None:
    async with asyncio.timeout(30):
        while await client.exists(DAEMONS_KEY):
            continue


async def test_daemons_are_listed_by_model_and_start_until_they_leave(client: redis.asyncio.Redis) -> None:
    registry = Registry(client)
    for one in (A, B, C):
        await registry.tell(one)
    assert await registry.daemons() == [C, B, A]
    later = msgspec.structs.replace(A, state="draining", running_jobs=2)
    await registry.tell(later)
    await registry.leave("b")
    assert await registry.daemons() == [C, later]
    await registry.leave("a")
    await registry.leave("c")
    assert await client.keys() == []


async def test_who_dies_is_not_listed_and_leaves_nothing(client: redis.asyncio.Redis) -> None:
    """D9: by the clock of Redis, whatever those of the daemons show."""
    registry = Registry(client)
    await registry.tell(A, ttl_ms=1)
    await gone(client)
    assert await registry.daemons() == []
    await registry.tell(B, ttl_ms=60_000)
    await client.hset(DAEMONS_KEY, "a", b"1 " + msgspec.json.encode(A))
    assert await registry.daemons() == [B]
    await registry.tell(C)
    assert {*await client.hkeys(DAEMONS_KEY)} == {b"b", b"c"}, "the others throw it away"
    assert 0 < await client.pttl(DAEMONS_KEY) <= TTL_MS
    assert TTL_MS >= 2 * TELL_EVERY_S * 1000


async def test_garbage_and_newer_records_harm_nobody(client: redis.asyncio.Redis) -> None:
    """D13, and daemons of several releases."""
    registry = Registry(client)
    await registry.tell(A)
    future = b"99999999999999 "
    newer = b'{"id":"z","model":"m","state":"dreaming","started_ms":9,"shards":[1,2],"rows":1}'
    for name, value in {
        "z": future + newer,
        "x": future + b"\xff\x00",
        "y": future + b'{"id":1}',
        "w": b"no time at all",
    }.items():
        await client.hset(DAEMONS_KEY, name, value)
    found = await registry.daemons()
    assert [one.id for one in found] == ["a", "z"]
    assert (found[1].state, found[1].rows) == ("dreaming", 1)
    await registry.tell(A)
    assert b"w" not in await client.hkeys(DAEMONS_KEY)


async def test_away_is_away() -> None:
    async with open_async("redis://127.0.0.1:1") as nobody:
        registry = Registry(nobody)
        for call in (registry.daemons(), registry.tell(A), registry.leave("a"), registry.now_ms()):
            with pytest.raises(UnavailableError):
                await call


async def test_it_shares_the_slot_of_the_tenants(client: redis.asyncio.Redis) -> None:
    """One client serves both in a Cluster, and one pattern of an ACL covers all keys."""
    assert DAEMONS_KEY.startswith("batond:")
    tag = DAEMONS_KEY[DAEMONS_KEY.index("{") + 1 : DAEMONS_KEY.index("}")]
    assert tag == TENANTS_KEY
    assert await Registry(client).now_ms() > 1_700_000_000_000
