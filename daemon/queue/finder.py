"""Finds the primary: asks the Sentinels, or the nodes of a Cluster who serves our slot.

batond needs one slot of a Cluster at a time: all keys of a model lie in one (keys.py), those of the tenants
in another. So a client is a plain one whose connections go to the primary of one slot, wherever that is now.
That gives pipelines, WAIT, pub/sub and one retry rule in all three topologies, and lets us refuse to follow
ASK: while a slot moves, some of its keys are here and some there, and a script that ran on either node would
take the others for lost. The queue waits instead until the slot is there as a whole.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any, Final, cast

import redis
import redis.asyncio
import redis.asyncio.connection
import redis.asyncio.sentinel
import redis.connection
import redis.sentinel
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from batond.daemon.queue.target import Address, RedisTarget

#: "MOVED 3999 10.0.0.7:6381"; newer clients cut the word off and say it by the error's class.
_REDIRECT: Final = re.compile(r"(?:(MOVED|ASK) )?(\d+) (\S*):(\d+)")


class NobodyAnswersError(RedisError):
    """No Sentinel, or no node, could say where the primary is."""


def redirect(error: RedisError) -> tuple[str, Address] | None:
    """Reads MOVED or ASK with its address; an empty host is that of the node asked. None of other errors."""
    if not isinstance(error, ResponseError):
        return None
    found = _REDIRECT.fullmatch(str(error))
    word = (found and found[1]) or {"MovedError": "MOVED", "AskError": "ASK"}.get(type(error).__name__)
    return (word, (found[3], int(found[4]))) if found and word else None


class Finder:
    """Knows the address of the primary, or asks for it.

    Args:
        target: Sentinels or a Cluster.
        key: Whose slot, in a Cluster.
        timeout_s: For each step with each that is asked.
    """

    def __init__(self, target: RedisTarget, key: str, *, timeout_s: float) -> None:
        self._target, self._key = target, key
        asked = target.sentinel_options() if target.mode == "sentinel" else target.server_options()
        self._options: dict[str, Any] = {
            **asked,
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            "ssl": target.tls,
        }
        self._first = 0
        self._known: Address | None = None

    async def find(self) -> Address:
        """Gives the address.

        Raises:
            NobodyAnswersError: Nobody knew it.
            NoPermissionError: This user may not ask.
        """
        if self._known is not None:
            return self._known
        failures: list[str] = []
        for node in self._nodes():
            with self._note(node, failures):
                if self._target.mode == "sentinel":
                    return await self._ask_sentinel(node)
                self._known = await self._ask_node(node)
                return self._known
        raise self._nobody(failures)

    def find_sync(self) -> Address:
        """As `find`, for a thread."""
        if self._known is not None:
            return self._known
        failures: list[str] = []
        for node in self._nodes():
            with self._note(node, failures):
                if self._target.mode == "sentinel":
                    return self._ask_sentinel_sync(node)
                self._known = self._ask_node_sync(node)
                return self._known
        raise self._nobody(failures)

    def moved(self, address: Address) -> None:
        """Takes a node's word for where the slot is now."""
        self._known = address

    def forget(self) -> None:
        """Asks again next time, and somebody else first."""
        self._known = None
        self._first += 1

    def _nodes(self) -> list[Address]:
        nodes = self._target.nodes
        first = self._first % len(nodes)
        return [*nodes[first:], *nodes[:first]]

    @contextlib.contextmanager
    def _note(self, node: Address, failures: list[str]) -> Iterator[None]:
        """Lets the next one be asked, unless the answer was that we may not ask."""
        try:
            yield
        except (AuthenticationError, NoPermissionError):
            raise
        except (RedisError, OSError) as error:
            failures.append(f"{node[0]}:{node[1]}: {error}")

    def _nobody(self, failures: list[str]) -> NobodyAnswersError:
        who = f"Sentinel knows the primary of {self._target.service!r}"
        if self._target.mode == "cluster":
            who = "node of the Cluster says who serves the slot"
        return NobodyAnswersError(f"no {who}: {'; '.join(failures)}")

    async def _ask_sentinel(self, node: Address) -> Address:
        manager: Any = cast("Any", redis.asyncio.sentinel.Sentinel)(
            [node], sentinel_kwargs=self._options | _once()
        )
        try:
            return _address(await manager.discover_master(self._target.service))
        finally:
            for one in manager.sentinels:
                await one.aclose()

    def _ask_sentinel_sync(self, node: Address) -> Address:
        manager: Any = cast("Any", redis.sentinel.Sentinel)(
            [node], sentinel_kwargs=self._options | _once_sync()
        )
        try:
            return _address(manager.discover_master(self._target.service))
        finally:
            for one in manager.sentinels:
                one.close()

    # Any command on a key of the slot tells: the node serves it, or names the one that does.

    async def _ask_node(self, node: Address) -> Address:
        client = redis.asyncio.Redis(host=node[0], port=node[1], **self._options, **_once())
        try:
            await client.exists(self._key)
        except ResponseError as error:
            return _owner(node, error)
        finally:
            await client.aclose()
        return node

    def _ask_node_sync(self, node: Address) -> Address:
        client = redis.Redis(host=node[0], port=node[1], **self._options, **_once_sync())
        try:
            client.exists(self._key)
        except ResponseError as error:
            return _owner(node, error)
        finally:
            client.close()
        return node


def _once() -> dict[str, Any]:
    """No retries: the next one is asked instead."""
    return {"retry": AsyncRetry(NoBackoff(), 0)}


def _once_sync() -> dict[str, Any]:
    return {"retry": Retry(NoBackoff(), 0)}


def _address(found: Any) -> Address:
    host, port = found
    return str(host), int(port)


def _owner(node: Address, error: ResponseError) -> Address:
    """Who serves the slot, from what a node answered to a question about one of its keys."""
    told = redirect(error)
    if told is None:
        raise error
    word, (host, port) = told
    return (host or node[0], port) if word == "MOVED" else node  # It has the slot until all keys are gone.


def _elsewhere(error: RedisError, finder: Finder, host: str) -> RedisError | None:
    """What to raise instead if the primary is elsewhere by now: what makes the client connect anew."""
    told = redirect(error)
    if told is not None and told[0] == "MOVED":
        finder.moved((told[1][0] or host, told[1][1]))
        return RedisConnectionError("the slot is served by another node now")
    # Redis 6.2 wraps a script's error in words of its own.
    if isinstance(error, ReadOnlyError) or (isinstance(error, ResponseError) and "-READONLY " in str(error)):
        finder.forget()
        return RedisConnectionError("the primary has become a replica")
    if isinstance(error, (RedisConnectionError, RedisTimeoutError)) or "CLUSTERDOWN" in repr(error):
        finder.forget()
    return None


class FoundConnection(redis.asyncio.connection.Connection):
    """A connection to the primary, wherever it is."""

    def __init__(self, *, finder: Finder, **options: Any) -> None:
        self._finder = finder
        super().__init__(**options)

    async def _connect(self) -> None:
        self.host, self.port = await self._finder.find()
        connect: Any = super()._connect
        try:
            await connect()
        except BaseException:
            self._finder.forget()
            raise

    async def read_response(self, *args: Any, **options: Any) -> Any:
        """Reads one reply, and knows one that says that the primary is elsewhere."""
        try:
            return await super().read_response(*args, **options)
        except RedisError as error:
            instead = _elsewhere(error, self._finder, self.host)
            if instead is None:
                raise
            await self.disconnect()
            raise instead from error


class FoundTlsConnection(FoundConnection, redis.asyncio.connection.SSLConnection):
    """The same over TLS."""


class FoundSyncConnection(redis.connection.Connection):
    """A thread's connection to the primary."""

    def __init__(self, *, finder: Finder, **options: Any) -> None:
        self._finder = finder
        cast("Any", super()).__init__(**options)

    def _connect(self) -> Any:
        self.host, self.port = self._finder.find_sync()
        connect: Any = super()._connect
        try:
            return connect()
        except BaseException:
            self._finder.forget()
            raise

    def read_response(self, *args: Any, **options: Any) -> Any:
        """Reads one reply, and knows one that says that the primary is elsewhere."""
        try:
            return super().read_response(*args, **options)
        except RedisError as error:
            instead = _elsewhere(error, self._finder, self.host)
            if instead is None:
                raise
            cast("Any", self).disconnect()
            raise instead from error


class FoundTlsSyncConnection(FoundSyncConnection, redis.connection.SSLConnection):
    """The same over TLS."""


def async_pool(
    finder: Finder, options: Mapping[str, Any], *, tls: bool
) -> redis.asyncio.BlockingConnectionPool:
    """A pool of connections to the primary."""
    kind = FoundTlsConnection if tls else FoundConnection
    return redis.asyncio.BlockingConnectionPool(connection_class=kind, finder=finder, **options)


def sync_pool(finder: Finder, options: Mapping[str, Any], *, tls: bool) -> redis.ConnectionPool:
    """A pool of connections to the primary, for threads."""
    kind = FoundTlsSyncConnection if tls else FoundSyncConnection
    return redis.ConnectionPool(connection_class=kind, finder=finder, **options)
