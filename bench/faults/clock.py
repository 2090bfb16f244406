"""Turns the clock of a queue: what would have happened `by_ms` later is due now, without waiting for it.

Time in the queue is the Redis server's, which can't be set. So everything in Redis that is due at a time is
moved the other way instead, in one script: leases, expiries, deadlines and quotas in sorted sets and in the
records of jobs, and times to live of keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import redis

#: Sorted sets by time are `leases`, `due`, `expiring`, `dead` and one `resting:` a class.
_ADVANCE: Final = """
local by_ms = tonumber(ARGV[2])
local TIMED = { leases = true, due = true, expiring = true, dead = true, resting = true }
for _, key in ipairs(redis.call('KEYS', ARGV[1])) do
  local kind = key:match('}:(%a+)')
  local found = redis.call('TYPE', key).ok
  if TIMED[kind] and found == 'zset' then
    for _, member in ipairs(redis.call('ZRANGE', key, 0, -1)) do
      redis.call('ZINCRBY', key, -by_ms, member)
    end
  elseif kind == 'job' and found == 'hash' then
    for _, field in ipairs({ 'expires_ms', 'deadline_ms', 'start_by_ms' }) do
      local at_ms = tonumber(redis.call('HGET', key, field) or nil) or 0
      if at_ms > 0 then
        redis.call('HSET', key, field, string.format('%.0f', math.max(1, at_ms - by_ms)))
      end
    end
  end
  local left_ms = redis.call('PTTL', key)
  if left_ms > 0 then
    redis.call('PEXPIRE', key, math.max(1, left_ms - by_ms))
  end
end
"""


def advance(client: redis.Redis, by_ms: int, pattern: str = "batond:*") -> None:
    """Let `by_ms` of the queue's time pass at once. Not for a cluster: it touches all keys.

    Args:
        client: Past any proxy.
        by_ms: How much later it is afterwards.
        pattern: Of the keys that are moved.
    """
    client.eval(_ADVANCE, 0, pattern, by_ms)
