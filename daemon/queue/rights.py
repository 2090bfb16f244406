"""What the Redis user must be allowed, asked at the start.

A command that is refused inside a script would mostly look like an empty key: the queue would go wrong
without a word. So every one is tried beforehand, on a key of our own that is gone afterwards.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Final, cast

from redis.exceptions import NoPermissionError, RedisError

from batond.daemon.errors import ConfigError
from batond.daemon.queue.connection import domain_error, says_forbidden

if TYPE_CHECKING:
    from collections.abc import Awaitable

    import redis.asyncio

PROBE_KEY: Final = "batond:probe"
PROBE_CHANNEL: Final = "batond:probe:news"

#: Commands of scripts, with arguments after the key that have the right form.
IN_SCRIPTS: Final = {
    "DEL": (),
    "EXISTS": (),
    "GET": (),
    "HDEL": ("a",),
    "HGET": ("a",),
    "HGETALL": (),
    "HINCRBY": ("a", "1"),
    "HMGET": ("a",),
    "HSET": ("a", "1"),
    "HVALS": (),
    "INCRBY": ("1",),
    "PEXPIRE": ("1000",),
    "SADD": ("a",),
    "SCARD": (),
    "SET": ("1",),
    "SMEMBERS": (),
    "SREM": ("a",),
    "TYPE": (),
    "XADD": ("1-1", "a", "1"),
    "XRANGE": ("-", "+"),
    "XREVRANGE": ("+", "-"),
    "ZADD": ("1", "a"),
    "ZCARD": (),
    "ZCOUNT": ("0", "1"),
    "ZRANGE": ("0", "1"),
    "ZRANGEBYSCORE": ("0", "1"),
    "ZRANK": ("a",),
    "ZREM": ("a",),
    "ZREMRANGEBYRANK": ("0", "1"),
    "ZREMRANGEBYSCORE": ("0", "1"),
    "ZREVRANGE": ("0", "1"),
    "ZREVRANGEBYSCORE": ("1", "0"),
    "ZSCORE": ("a",),
}
#: Of scripts too, but without a key.
WITHOUT_KEY: Final = ("PUBLISH", "TIME")
#: Commands that the daemon sends itself, beside some of the above.
SENT: Final = ("EVAL", "EVALSHA", "INFO", "PING", "SUBSCRIBE", "UNSUBSCRIBE", "WAIT")

_PROBE: Final = """
local refused = {}
local function try(command, ...)
  local reply = redis.pcall(command, ...)
  if type(reply) == 'table' and reply.err then
    refused[#refused + 1] = { command, reply.err }
  end
end
for command, arguments in pairs(cjson.decode(ARGV[1])) do
  try(command, KEYS[1], unpack(arguments))
  redis.pcall('DEL', KEYS[1])
end
try('PUBLISH', ARGV[2], '')
try('TIME')
return refused
"""


async def check_rights(client: redis.asyncio.Redis, *, replicas: int = 0) -> None:
    """Tries all that the daemon will do.

    Args:
        client: Of the slot of PROBE_KEY.
        replicas: `queue.wait_replicas`: WAIT is needed if it is set.

    Raises:
        ConfigError: Something is forbidden; the message says what.
        UnavailableError: The server can't be reached.
    """
    try:
        given = (1, PROBE_KEY, json.dumps(IN_SCRIPTS), PROBE_CHANNEL)
        told = await cast("Awaitable[list[list[bytes]]]", client.eval(_PROBE, *given))
        refused = {
            command.decode(): words.decode() for command, words in told if says_forbidden(words.decode())
        }
        sha = hashlib.sha1(_PROBE.encode(), usedforsecurity=False).hexdigest()
        await cast("Awaitable[object]", client.evalsha(sha, *given))
        await client.ping()
        async with client.pubsub() as pubsub:
            await pubsub.subscribe(PROBE_CHANNEL)
            await pubsub.get_message(timeout=1.0)
            await pubsub.unsubscribe(PROBE_CHANNEL)
            await pubsub.get_message(timeout=1.0)
        if replicas:
            await _check_wait(client)
    except RedisError as error:
        raise domain_error(error) from error
    if refused:
        raise ConfigError(
            f"the Redis user lacks rights that the queue needs: {', '.join(sorted(refused))} "
            f"({next(iter(refused.values()))}). docs/operations.md has the ACL line",
            setting="queue.username",
        )


async def _check_wait(client: redis.asyncio.Redis) -> None:
    try:
        await cast("Any", client).execute_command("WAIT", 0, 1)  # For nobody: it answers at once.
    except NoPermissionError as error:
        user = client.connection_pool.connection_kwargs.get("username") or "default"
        raise ConfigError(
            f"queue.wait_replicas is set, and the Redis user may not wait for replicas ({error}). "
            f"Allow it: ACL SETUSER {user} +wait",
            setting="queue.wait_replicas",
        ) from error
