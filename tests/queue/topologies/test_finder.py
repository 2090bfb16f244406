"""A connection that outlives its primary's role."""

from __future__ import annotations

from typing import TYPE_CHECKING

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from batond.bench.local_redis import HOST, RedisServer
from batond.daemon.queue.calls import call
from batond.daemon.queue.finder import Finder, async_pool
from batond.daemon.queue.keys import Keys
from batond.daemon.queue.target import RedisTarget

if TYPE_CHECKING:
    from pathlib import Path

    from batond.daemon.queue.target import Address


class _Told(Finder):
    """Knows the next primary as soon as the present one is doubted."""

    def __init__(self, *servers: RedisServer) -> None:
        super().__init__(RedisTarget(mode="sentinel", nodes=((HOST, 1),), service="s"), "", timeout_s=1.0)
        self.addresses = [(HOST, server.port) for server in servers]

    async def find(self) -> Address:
        return self.addresses[0]

    def forget(self) -> None:
        self.addresses = self.addresses[1:] or self.addresses


async def test_a_script_that_meets_a_replica_goes_to_the_new_primary(tmp_path: Path) -> None:
    """D5: the old primary lives on as a replica and keeps its connections, as after `REPLICAOF` by hand."""
    old, new = RedisServer(tmp_path / "old"), RedisServer(tmp_path / "new")
    options = {"retry": Retry(NoBackoff(), 1), "socket_timeout": 5.0}
    pool = async_pool(_Told(old, new), options, tls=False)
    try:
        async with redis.asyncio.Redis.from_pool(pool) as client:
            assert await call(client, Keys("m"), "reap", 3, 100, 1000)
            old.ask("REPLICAOF", HOST, str(new.port))
            assert await call(client, Keys("m"), "reap", 3, 100, 1000)
            assert await client.hget(f"{Keys('m').base}:totals", "reaps") is not None
        assert int(new.info("commandstats")["cmdstat_hincrby"]["calls"]) == 1
    finally:
        old.kill()
        new.kill()
