"""The way to Redis: the daemon's own server or the configured ones, and connections to them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from batond.daemon.front.tasks import end_all
from batond.daemon.queue import EmbeddedRedis, open_async, open_sync
from batond.daemon.queue.keys import TENANTS_KEY
from batond.daemon.queue.target import target_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batond.daemon.config import Settings
    from batond.daemon.queue.target import RedisTarget


class Clients:
    """Connections to Redis: in a Cluster, jobs and tenants are at different nodes."""

    def __init__(
        self, target: RedisTarget | str, base: str, stack: contextlib.AsyncExitStack, *, budget_s: float
    ) -> None:
        self.jobs = open_async(target, key=base)
        self.tenants = open_async(target, key=TENANTS_KEY)
        stack.push_async_callback(self.jobs.aclose)
        stack.push_async_callback(self.tenants.aclose)
        self.leases = open_sync(target, key=base, budget_s=budget_s)


@contextlib.asynccontextmanager
async def redis_server(
    settings: Settings, embedded: EmbeddedRedis | None
) -> AsyncIterator[RedisTarget | str]:
    """The configured servers, or a private one that lives as long as the daemon."""
    if embedded is None:
        yield target_of(settings.queue)
        return
    await asyncio.to_thread(embedded.start)
    guard = asyncio.create_task(embedded.keep_running(), name="embedded Redis")
    try:
        yield embedded.url
    finally:
        await end_all([guard])
        await asyncio.to_thread(embedded.stop)
