"""Turns the clock of a queue: what would have happened `by_ms` later is due now, without waiting for it.

Time in the queue is the Redis server's, which can't be set. So everything in Redis that is due at a time is
moved the other way instead: leases, expiries, deadlines and quotas in sorted sets, and times to live of keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import redis

#: Sorted sets whose scores are milliseconds of the Redis clock, by what follows `batond:{model}:`.
TIMED: Final = ("leases", "due", "expiring", "dead")
TIMED_OF_A_CLASS: Final = "resting:"
#: Fields of a job's record that the scripts compare with the clock.
FIELDS: Final = ("expires_ms", "deadline_ms", "start_by_ms")


def advance(client: redis.Redis, by_ms: int, pattern: str = "batond:*") -> None:
    """Let `by_ms` of the queue's time pass at once.

    Not atomic: meant for a moment in which no daemon is in the middle of a call that would mind.

    Args:
        client: Not decoding responses.
        by_ms: How much later it is afterwards.
        pattern: Of the keys that are moved.
    """
    for key in list(client.scan_iter(pattern, count=1000)):
        suffix = key.decode().rpartition("}:")[2]
        if suffix in TIMED or suffix.startswith(TIMED_OF_A_CLASS):
            members: list[Any] = client.zrange(key, 0, -1)
            for member in members:
                client.zincrby(key, -by_ms, member)
        elif suffix.startswith("job:") and client.type(key) == b"hash":
            for field, value in zip(FIELDS, client.hmget(key, FIELDS), strict=True):
                if value and int(value) > 0:
                    client.hset(key, field, max(1, int(value) - by_ms))
        left_ms = client.pttl(key)
        if left_ms > 0:
            client.pexpire(key, max(1, left_ms - by_ms))
