"""Clients of Redis, and what their failures mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import (
    AuthenticationError,
    ClusterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry

from batond.daemon.errors import BatondError, ConfigError, ExhaustedError, UnavailableError
from batond.daemon.queue.finder import Finder, async_pool, redirect, sync_pool
from batond.daemon.queue.target import RedisTarget, read_url

#: A call may be tried again: every script does nothing the second time (claim: gives the same again).
RETRIES: Final = 2
BACKOFF_CAP_S: Final = 0.2
TIMEOUT_S: Final = 5.0
MAX_CONNECTIONS: Final = 64  # Of one client; each costs the server some 20 KiB.
#: For each Sentinel or node that is asked where the primary is.
FIND_TIMEOUT_S: Final = 1.0
#: The server is there but can't write now: its disk, its role, its cluster.
AWAY_CODES: Final = ("MISCONF", "READONLY", "CLUSTERDOWN", "MASTERDOWN", "NOREPLICAS", "TRYAGAIN")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a client waits.

    Attributes:
        answer_s: For a connection, and for each reply.
        find_s: For each step with each Sentinel or node that is asked where the primary is.
    """

    answer_s: float = TIMEOUT_S
    find_s: float = FIND_TIMEOUT_S

    @classmethod
    def within(cls, total_s: float, target: RedisTarget) -> Patience:
        """Such that a call without retries ends in `total_s`, though nobody answers at all."""
        asked = len(target.nodes)
        # A step to connect and one to be answered; in half of the time, where somebody is asked before.
        return cls(answer_s=total_s / (4 if asked else 2), find_s=total_s / 2 / max(1, asked))

    def options(self) -> dict[str, Any]:
        """As the client takes them."""
        return {"socket_timeout": self.answer_s, "socket_connect_timeout": self.answer_s}


def open_async(
    target: RedisTarget | str, *, key: str = "", timeout_s: float = TIMEOUT_S
) -> redis.asyncio.Redis:
    """Opens a client for the event loop. Connects on first use.

    Args:
        target: Where; a string is the URL of a standalone server.
        key: In a Cluster, a key of the one slot that the client works on: `Keys.base`, or `TENANTS_KEY`.
        timeout_s: For a connection, and for each reply.

    Raises:
        ConfigError: The URL can't be read.
    """
    target = _named(target)
    patience = Patience(answer_s=timeout_s)
    options = {
        **target.server_options(),
        **patience.options(),
        "retry": AsyncRetry(ExponentialBackoff(cap=BACKOFF_CAP_S, base=0.02), RETRIES),
        # A thousand calls at once wait for one of these; the plain pool would refuse the hundred and first.
        "max_connections": MAX_CONNECTIONS,
        "timeout": timeout_s,
    }
    if target.mode == "standalone":
        read_url(target.url)
        pool = redis.asyncio.BlockingConnectionPool.from_url(target.url, **options)
    else:
        pool = async_pool(Finder(target, key, timeout_s=patience.find_s), options, tls=target.tls)
    return redis.asyncio.Redis.from_pool(pool)


def open_sync(
    target: RedisTarget | str, *, key: str = "", timeout_s: float = TIMEOUT_S, budget_s: float = 0.0
) -> redis.Redis:
    """Opens a client for a thread, as `open_async` does for the event loop.

    Args:
        target: See `open_async`.
        key: See `open_async`.
        timeout_s: For a connection, and for each reply; a call is tried again after it.
        budget_s: If set, a call takes no longer in all, whoever does not answer: it is tried again at once
            after an error, but not after a time-out.

    Raises:
        ConfigError: The URL can't be read.
    """
    target = _named(target)
    if budget_s:
        patience, retry = Patience.within(budget_s, target), _retry_errors()
    else:
        patience = Patience(answer_s=timeout_s)
        retry = Retry(ExponentialBackoff(cap=BACKOFF_CAP_S, base=0.02), RETRIES)
    options = {**target.server_options(), **patience.options(), "retry": retry}
    if target.mode == "standalone":
        read_url(target.url)
        return redis.Redis.from_url(target.url, **options)
    finder = Finder(target, key, timeout_s=patience.find_s)
    return redis.Redis.from_pool(sync_pool(finder, options, tls=target.tls))


def _retry_errors() -> Retry:
    """Once and at once, and not after a time-out."""
    return Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,))


def _named(target: RedisTarget | str) -> RedisTarget:
    return RedisTarget(url=target) if isinstance(target, str) else target


def says_forbidden(text: str) -> bool:
    """Whether a script's error says that its user may not do something."""
    return "The user executing the script can't" in text or "ACL failure in script" in text


def domain_error(error: RedisError) -> BatondError:
    """Says what a failure of Redis means to whoever called us."""
    text = str(error)
    kinds = (AuthenticationError, NoPermissionError)
    # Over a Unix socket the client wraps what went wrong with AUTH.
    if isinstance(error, kinds) or isinstance(error.__cause__, kinds) or says_forbidden(text):
        return ConfigError(f"Redis refuses this user: {text}. Mend user, password, or the user's ACL.")
    # An error inside a script comes with the script's words around it; else the client cuts the code off.
    if isinstance(error, OutOfMemoryError) or "OOM command" in text:
        return ExhaustedError(
            "Redis is out of memory: raise its maxmemory, or let results expire sooner", reason="QUEUE_MEMORY"
        )
    told = redirect(error)
    if told is not None:
        return _redirected(*told)
    away = isinstance(error, (ReadOnlyError, ClusterDownError)) or any(code in text for code in AWAY_CODES)
    if isinstance(error, ResponseError) and not away:
        return BatondError(f"Redis refused a queue script: {text}", reason="QUEUE_SCRIPT")
    return UnavailableError(
        f"the job queue can't be reached ({text}): retry in a moment; "
        "if it stays away, the operator should look at the Redis server",
        reason="QUEUE_AWAY",
    )


def _redirected(word: str, node: tuple[str, int]) -> BatondError:
    if word == "MOVED":
        return ConfigError(
            f"this server is a node of a Redis Cluster, and {node[0]}:{node[1]} has the key: set "
            "queue.mode = 'cluster' and queue.nodes",
            setting="queue.mode",
        )
    return UnavailableError(
        "the queue's slot is being moved to another node of the Cluster: it goes on when all of it is there",
        reason="QUEUE_AWAY",
    )
