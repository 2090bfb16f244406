"""The daemons that share a Redis: each tells of itself every few seconds, and is forgotten when it does not.

One hash for all models of the server. Times are those of the Redis clock. Nothing of a daemon that died
stays: others throw its entry away, and the hash goes with the last of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
from redis.exceptions import RedisError

from batond.daemon.queue.connection import domain_error
from batond.daemon.queue.keys import DAEMONS_KEY

if TYPE_CHECKING:
    from collections.abc import Awaitable

    import redis.asyncio

#: How often a daemon tells of itself, and how long that holds: two tellings may get lost.
TELL_EVERY_S: Final = 5.0
TTL_MS: Final = 15_000

# ARGV: id, time to live (ms), record; without a record the entry goes. What is past its time goes with it.
_TELL: Final = """
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f ', now_ms + tonumber(ARGV[2])) .. ARGV[3])
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local until_ms = tonumber(all[i + 1]:match('^(%d+) ')) or 0
  if until_ms <= now_ms then
    redis.call('HDEL', KEYS[1], all[i])
  end
end
return now_ms
"""

_LIST: Final = """
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local found = {}
for _, told in ipairs(redis.call('HVALS', KEYS[1])) do
  local until_ms, record = told:match('^(%d+) (.*)$')
  if until_ms and tonumber(until_ms) > now_ms then
    found[#found + 1] = record
  end
end
return found
"""


class DaemonRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a daemon tells of itself. Fields of a newer release are passed over.

    Attributes:
        id: Names this run of the daemon.
        model: What it serves.
        address: Where other hosts reach it, `host:port`; empty if only its own host does.
        state: "loading", "ready", "draining", "degraded", or what a newer release knows.
        rows: Of its batch.
        running_jobs: In its engine.
        version: batond's.
        started_ms: When it was ready first, by the Redis clock.
    """

    id: str
    model: str
    address: str = ""
    state: str = ""
    rows: int = 0
    running_jobs: int = 0
    version: str = ""
    started_ms: int = 0


class Registry:
    """Reads and writes it. Every method raises `UnavailableError` while Redis is away.

    Args:
        client: Of the slot of DAEMONS_KEY.
    """

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client

    async def tell(self, record: DaemonRecord, ttl_ms: int = TTL_MS) -> None:
        """Tells of a daemon; holds for a while."""
        await self._ask(
            self._client.eval(_TELL, 1, DAEMONS_KEY, record.id, ttl_ms, msgspec.json.encode(record))
        )

    async def leave(self, daemon_id: str) -> None:
        """Takes a daemon out at once."""
        await self._ask(self._client.eval(_TELL, 1, DAEMONS_KEY, daemon_id, 0, ""))

    async def daemons(self) -> list[DaemonRecord]:
        """Gives all daemons, by model and start; what nobody can read is left out."""
        found = []
        for told in await self._ask(self._client.eval(_LIST, 1, DAEMONS_KEY)):
            try:
                found.append(msgspec.json.decode(told, type=DaemonRecord))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
        return sorted(found, key=lambda one: (one.model, one.started_ms, one.id))

    async def now_ms(self) -> int:
        """Gives what the clock of Redis shows."""
        seconds, microseconds = await self._ask(self._client.time())
        return int(seconds) * 1000 + int(microseconds) // 1000

    @staticmethod
    async def _ask(call: Any) -> Any:
        try:
            return await cast("Awaitable[Any]", call)
        except RedisError as error:
            raise domain_error(error) from error
