"""What a server must be like before jobs are trusted to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import redis.asyncio
import structlog
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from batond.daemon.errors import ConfigError, UnavailableError
from batond.daemon.queue.connection import TIMEOUT_S, domain_error, open_async
from batond.daemon.queue.finder import Finder, NobodyAnswersError
from batond.daemon.queue.rights import PROBE_KEY, check_rights
from batond.daemon.queue.target import RedisTarget

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from batond.daemon.queue.target import Address

MIN_VERSION: Final[tuple[int, ...]] = (6, 2)

_log = structlog.get_logger(__name__)


async def check_target(
    target: RedisTarget | str,
    *,
    replicas: int = 0,
    timeout_s: float = TIMEOUT_S,
    warn: Callable[..., object] | None = None,
) -> str:
    """Checks all servers that keep jobs, or may do so after a failover, and says what they are.

    Primaries must answer; a replica that is away now is left to the operator.

    Args:
        target: The configured servers.
        replicas: `queue.wait_replicas`.
        timeout_s: For a connection, and for each reply.
        warn: Hears what is doubtful, as a log would; None is the log.

    Raises:
        ConfigError: A server is too old, evicts keys when its memory is full, is none of this topology, or
            the user may not do all that the queue does.
        UnavailableError: One can't be reached.
    """
    if isinstance(target, str):
        target = RedisTarget(url=target)
    tell: Callable[..., object] = _log.warning if warn is None else warn
    cluster = target.mode == "cluster"
    if target.mode == "standalone":
        async with open_async(target, timeout_s=timeout_s) as client:
            about = await check_server(client, warn=tell)
            await check_rights(client, replicas=replicas)
            return about
    try:
        primaries, others = await _members(target, timeout_s)
    except RedisError as error:
        raise domain_error(error) from error
    for host, port in primaries:
        async with _one(target, host, port, timeout_s) as client:
            about = await check_server(client, cluster=cluster, warn=tell)
    for host, port in others:
        async with _one(target, host, port, timeout_s) as client:
            try:
                await check_server(client, cluster=cluster, warn=tell)
            except UnavailableError as error:
                tell("redis_replica_away", replica=f"{host}:{port}", error=str(error))
    async with open_async(target, key=PROBE_KEY, timeout_s=timeout_s) as client:
        await check_rights(client, replicas=replicas)
    return f"{about}, {target.mode}: {len(primaries)} primaries, {len(others)} replicas"


async def check_server(
    client: redis.asyncio.Redis, *, cluster: bool = False, warn: Callable[..., object] | None = None
) -> str:
    """Checks that a server keeps what it is given, and gives its name and version.

    Args:
        client: Of this server.
        cluster: It must be a node of a Cluster; otherwise it must be none.
        warn: As in `check_target`.

    Raises:
        ConfigError: It is too old, evicts keys when its memory is full, or is none of this topology.
        UnavailableError: It can't be reached.
    """
    tell: Callable[..., object] = _log.warning if warn is None else warn
    try:
        about = await client.info("server")
        check_version(about)
        _check_topology(await _allowed(lambda: client.info("cluster")), cluster=cluster)
        policy = await _eviction_policy(client)
    except RedisError as error:
        raise domain_error(error) from error
    if policy is None:
        tell(
            "redis_policy_unknown",
            server=_name(client),
            note="INFO and CONFIG don't tell maxmemory-policy to this user; make sure that it is noeviction",
        )
    elif policy != "noeviction":
        raise ConfigError(
            f"Redis has maxmemory-policy {policy}: it would drop accepted jobs when its memory is full. "
            "Set `maxmemory-policy noeviction`, or give batond a server of its own.",
            setting="maxmemory-policy",
            value=policy,
        )
    await _warn_if_volatile(client, tell)
    return f"{about.get('server_name', 'redis')} {_version_text(about)}"


def _check_topology(about: dict[str, Any] | None, *, cluster: bool) -> None:
    if not about or bool(int(about.get("cluster_enabled", 0))) == cluster:
        return
    found = "is no node of a Redis Cluster" if cluster else "is a node of a Redis Cluster"
    raise ConfigError(f"the Redis server {found}: set queue.mode to what it is", setting="queue.mode")


async def _members(target: RedisTarget, timeout_s: float) -> tuple[list[Address], list[Address]]:
    """Primaries and replicas, as the servers know them."""
    if target.mode == "sentinel":
        host, port = await Finder(target, "", timeout_s=timeout_s).find()
        async with _one(target, host, port, timeout_s) as client:
            about = await _allowed(lambda: client.info("replication")) or {}
        members = [
            value for name, value in about.items() if name.startswith("slave") and isinstance(value, dict)
        ]
        return [(host, port)], [(str(one["ip"]), int(one["port"])) for one in members]
    failures: list[str] = []
    for host, port in target.nodes:
        async with _one(target, host, port, timeout_s) as client:
            try:
                # The client's own name for it would bring its own reading of the reply.
                ranges = await cast("Any", client).execute_command("CLUSTER", "SLOTS")
            except (RedisConnectionError, RedisTimeoutError) as error:
                failures.append(f"{host}:{port}: {error}")
                continue
            except ResponseError as error:
                if "cluster support disabled" in str(error):
                    _check_topology({"cluster_enabled": 0}, cluster=True)
                raise
        return _read_slots(ranges, host)
    raise NobodyAnswersError("no node of the Cluster answers: " + "; ".join(failures))


def _read_slots(ranges: list[Any], asked: str) -> tuple[list[Address], list[Address]]:
    """Reads the reply of CLUSTER SLOTS; a node that does not say its host is at the one that was asked."""
    if not ranges:
        raise ConfigError("the Redis Cluster serves no slot yet: finish its setup", setting="queue.nodes")
    primaries: set[Address] = set()
    replicas: set[Address] = set()
    for _, _, primary, *others in ranges:
        for kind, node in ((primaries, primary), *((replicas, other) for other in others)):
            kind.add(((node[0] or b"").decode() or asked, int(node[1])))
    return sorted(primaries), sorted(replicas)


def _one(target: RedisTarget, host: str, port: int, timeout_s: float) -> redis.asyncio.Redis:
    return redis.asyncio.Redis(
        host=host,
        port=port,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=AsyncRetry(NoBackoff(), 0),
        ssl=target.tls,
        **target.server_options(),
    )


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


def _name(client: redis.asyncio.Redis) -> str:
    place = client.connection_pool.connection_kwargs
    return str(place["path"]) if "path" in place else f"{place.get('host')}:{place.get('port')}"


def _version_text(about: dict[str, Any]) -> str:
    return str(about.get("valkey_version") or about.get("redis_version") or "of unknown version")


async def _eviction_policy(client: redis.asyncio.Redis) -> str | None:
    """Asks INFO first: managed servers often forbid CONFIG."""
    policy = await _allowed(lambda: client.info("memory"))
    if policy and policy.get("maxmemory_policy"):
        return str(policy["maxmemory_policy"])
    policy = await _allowed(lambda: client.config_get("maxmemory-policy"))
    return str(policy["maxmemory-policy"]) if policy and policy.get("maxmemory-policy") else None


async def _warn_if_volatile(client: redis.asyncio.Redis, warn: Callable[..., object]) -> None:
    persistence = await _allowed(lambda: client.info("persistence"))
    if persistence and not int(persistence.get("aof_enabled", 0)):
        warn(
            "redis_without_aof",
            server=_name(client),
            note="accepted jobs are lost if Redis dies; set `appendonly yes` to keep them",
        )


async def _allowed(ask: Callable[[], Awaitable[Any]]) -> dict[str, Any] | None:
    """Gives the answer, or None where this user may not ask or the server does not know the question."""
    try:
        answer = await ask()
    except (NoPermissionError, ResponseError):
        return None
    return answer if isinstance(answer, dict) else None
