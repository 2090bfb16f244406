"""Runs the queue's scripts: loads them once, sends them by hash, maps failures to domain errors."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TypeAlias

from redis.exceptions import NoScriptError, RedisError

from batond.daemon.queue.connection import domain_error
from batond.daemon.queue.keys import lua_prelude

if TYPE_CHECKING:
    import redis
    import redis.asyncio

    from batond.daemon.queue.keys import Keys

Argument: TypeAlias = str | bytes | int


@dataclass(frozen=True, slots=True)
class Script:
    """A script's whole text and the hash by which the server knows it."""

    source: str
    sha: str


@cache
def load_script(name: str) -> Script:
    """Reads `scripts/<name>.lua` and puts key names and the functions all share before it."""
    folder = files("batond.daemon.queue.scripts")
    parts = [
        lua_prelude(),
        *((folder / f"{part}.lua").read_text("utf-8") for part in ("common", "line", "pace", "moves", name)),
    ]
    source = "\n".join(parts)
    return Script(source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


async def call(client: redis.asyncio.Redis, keys: Keys, name: str, *args: Argument) -> Any:
    """Runs one script on the event loop.

    Raises:
        UnavailableError: Redis can't be reached, loads, or can't write.
        ExhaustedError: Redis is out of memory.
        ConfigError: Redis refuses this user.
    """
    script = load_script(name)
    try:
        try:
            return await client.evalsha(script.sha, 1, keys.base, *args)
        except NoScriptError:  # A new or restarted server; EVAL teaches it.
            return await client.eval(script.source, 1, keys.base, *args)
    except RedisError as error:
        raise domain_error(error) from error


def call_sync(client: redis.Redis, keys: Keys, name: str, *args: Argument) -> Any:
    """Runs one script in a thread; see `call`."""
    script = load_script(name)
    try:
        try:
            return client.evalsha(script.sha, 1, keys.base, *args)
        except NoScriptError:
            return client.eval(script.source, 1, keys.base, *args)
    except RedisError as error:
        raise domain_error(error) from error
