"""Connections to Redis, and the checks a server must pass before jobs are trusted to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import redis
import redis.asyncio
import structlog
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialBackoff
from redis.exceptions import (
    AuthenticationError,
    ClusterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.retry import Retry

from batond.daemon.errors import BatondError, ConfigError, ExhaustedError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

MIN_VERSION: Final[tuple[int, ...]] = (6, 2)
#: A call may be tried again: every script does nothing the second time (claim: gives the same again).
RETRIES: Final = 2
BACKOFF_CAP_S: Final = 0.2
TIMEOUT_S: Final = 5.0
MAX_CONNECTIONS: Final = 64  # Of one daemon; each costs the server some 20 KiB.
#: The server is there but can't write now: its disk, its role, its cluster.
AWAY_CODES: Final = ("MISCONF", "READONLY", "CLUSTERDOWN", "MASTERDOWN", "NOREPLICAS")

_log = structlog.get_logger(__name__)


def open_async(url: str, *, timeout_s: float = TIMEOUT_S) -> redis.asyncio.Redis:
    """Opens a client for the event loop; `redis://`, `rediss://` or `unix://`. Connects on first use.

    Raises:
        ConfigError: The URL can't be read.
    """
    try:
        # A thousand calls at once wait for one of these; the plain pool would refuse the hundred and first.
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=AsyncRetry(ExponentialBackoff(cap=BACKOFF_CAP_S, base=0.02), RETRIES),
        )
        return redis.asyncio.Redis.from_pool(pool)
    except ValueError as error:
        raise ConfigError(f"the Redis URL can't be used: {error}", setting="queue.url") from error


def open_sync(url: str, *, timeout_s: float = TIMEOUT_S) -> redis.Redis:
    """Opens a client for a thread, as `open_async` does for the event loop.

    Raises:
        ConfigError: The URL can't be read.
    """
    try:
        return redis.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(ExponentialBackoff(cap=BACKOFF_CAP_S, base=0.02), RETRIES),
        )
    except ValueError as error:
        raise ConfigError(f"the Redis URL can't be used: {error}", setting="queue.url") from error


def domain_error(error: RedisError) -> BatondError:
    """Says what a failure of Redis means to whoever called us."""
    text = str(error)
    if isinstance(error, (AuthenticationError, NoPermissionError)):
        return ConfigError(f"Redis refuses this user: {text}. Mend the URL or the user's ACL.")
    # An error inside a script comes with the script's words around it; else the client cuts the code off.
    if isinstance(error, OutOfMemoryError) or "OOM command" in text:
        return ExhaustedError(
            "Redis is out of memory: raise its maxmemory, or let results expire sooner", reason="QUEUE_MEMORY"
        )
    away = isinstance(error, (ReadOnlyError, ClusterDownError)) or any(code in text for code in AWAY_CODES)
    if isinstance(error, ResponseError) and not away:
        return BatondError(f"Redis refused a queue script: {text}", reason="QUEUE_SCRIPT")
    return UnavailableError(
        f"the job queue can't be reached ({text}): retry in a moment; "
        "if it stays away, the operator should look at the Redis server",
        reason="QUEUE_AWAY",
    )


async def check_server(client: redis.asyncio.Redis) -> str:
    """Checks that a server keeps what it is given, and gives its name and version.

    Raises:
        ConfigError: It is too old, or evicts keys when its memory is full.
        UnavailableError: It can't be reached.
    """
    try:
        about = await client.info("server")
        check_version(about)
        policy = await _eviction_policy(client)
    except RedisError as error:
        raise domain_error(error) from error
    if policy is None:
        _log.warning(
            "redis_policy_unknown",
            note="INFO and CONFIG don't tell maxmemory-policy to this user; make sure that it is noeviction",
        )
    elif policy != "noeviction":
        raise ConfigError(
            f"Redis has maxmemory-policy {policy}: it would drop accepted jobs when its memory is full. "
            "Set `maxmemory-policy noeviction`, or give batond a server of its own.",
            setting="maxmemory-policy",
            value=policy,
        )
    await _warn_if_volatile(client)
    return f"{about.get('server_name', 'redis')} {_version_text(about)}"


def check_version(about: dict[str, Any]) -> None:
    """Refuses servers older than 6.2.

    Raises:
        ConfigError: It is older, or tells no version.
    """
    text = _version_text(about)
    try:
        version = [int(part) for part in text.split(".")[:2]]
    except ValueError:
        version = [0, 0]
    if tuple(version) < MIN_VERSION:
        raise ConfigError(
            f"Redis {text} is too old: batond needs 6.2 or newer, or Valkey",
            setting="queue.url",
            version=text,
        )


def _version_text(about: dict[str, Any]) -> str:
    return str(about.get("valkey_version") or about.get("redis_version") or "of unknown version")


async def _eviction_policy(client: redis.asyncio.Redis) -> str | None:
    """Asks INFO first: managed servers often forbid CONFIG."""
    policy = await _allowed(lambda: client.info("memory"))
    if policy and policy.get("maxmemory_policy"):
        return str(policy["maxmemory_policy"])
    policy = await _allowed(lambda: client.config_get("maxmemory-policy"))
    return str(policy["maxmemory-policy"]) if policy and policy.get("maxmemory-policy") else None


async def _warn_if_volatile(client: redis.asyncio.Redis) -> None:
    persistence = await _allowed(lambda: client.info("persistence"))
    if persistence and not int(persistence.get("aof_enabled", 0)):
        _log.warning(
            "redis_without_aof",
            note="accepted jobs are lost if Redis dies; set `appendonly yes` to keep them",
        )


async def _allowed(ask: Callable[[], Awaitable[Any]]) -> dict[str, Any] | None:
    """Gives the answer, or None where this user may not ask or the server does not know the question."""
    try:
        answer = await ask()
    except (NoPermissionError, ResponseError):
        return None
    return answer if isinstance(answer, dict) else None
