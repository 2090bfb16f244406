"""Daemons know of each other behind Sentinels and in a Cluster, with the client of the tenants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batond.daemon.queue import open_async
from batond.daemon.queue.keys import TENANTS_KEY
from batond.daemon.queue.registry import DaemonRecord, Registry

if TYPE_CHECKING:
    from batond.daemon.queue.target import RedisTarget


async def test_a_daemon_is_listed_until_it_leaves(target: RedisTarget) -> None:
    async with open_async(target, key=TENANTS_KEY) as client:
        registry = Registry(client)
        own = DaemonRecord(id="me", model="m", started_ms=await registry.now_ms())
        await registry.tell(own)
        assert own in await registry.daemons()
        await registry.leave("me")
        assert own not in await registry.daemons()
