"""Runs the queue's scripts: loads them once, sends them by hash, maps failures to domain errors."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from redis.exceptions import NoScriptError, RedisError

from batond.daemon.errors import UnavailableError
from batond.daemon.queue.connection import domain_error
from batond.daemon.queue.keys import lua_prelude

if TYPE_CHECKING:
    import redis
    import redis.asyncio

    from batond.daemon.queue.keys import Keys

Argument: TypeAlias = str | bytes | int
#: Replicas acknowledge within a second, or are in trouble; well under the time-out of a reply.
WAIT_MS: Final = 1000


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


async def call(client: redis.asyncio.Redis, keys: Keys, name: str, *args: Argument, replicas: int = 0) -> Any:
    """Runs one script on the event loop.

    Args:
        client: Of the queue.
        keys: Of the model.
        name: Of the script.
        *args: Its arguments.
        replicas: So many must have what it wrote (WAIT), else it counts as not done and can be called again:
            the second call finds its work done, and waits for the replicas to have all of that.

    Raises:
        UnavailableError: Redis can't be reached, loads, or can't write; or too few replicas have the write.
        ExhaustedError: Redis is out of memory.
        ConfigError: Redis refuses this user.
    """
    script = load_script(name)
    run = _run_and_wait if replicas else _run
    try:
        try:
            return await run(client, ("EVALSHA", script.sha, 1, keys.base, *args), replicas)
        except NoScriptError:  # A new or restarted server; EVAL teaches it.
            return await run(client, ("EVAL", script.source, 1, keys.base, *args), replicas)
    except RedisError as error:
        raise domain_error(error) from error
    finally:
        heed_cancel()


def heed_cancel() -> None:
    """Raises CancelledError if the running task is being cancelled.

    A cancel that comes while redis-py (seen in 8.1) checks a connection of its pool ends that check, nothing
    else: the task would go on for ever, and whoever waits for its end with it.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def _run(client: redis.asyncio.Redis, command: tuple[Argument, ...], _: int) -> Any:
    return await cast("Any", client).execute_command(*command)


async def _run_and_wait(client: redis.asyncio.Redis, command: tuple[Argument, ...], replicas: int) -> Any:
    """One round trip on one connection: WAIT speaks of what its own connection did before."""
    pipe = client.pipeline(transaction=False)
    pipe.execute_command(*command)
    pipe.execute_command("WAIT", replicas, WAIT_MS)
    reply, have = await pipe.execute(raise_on_error=False)
    for one in (reply, have):
        if isinstance(one, Exception):
            raise one
    if have < replicas:
        raise UnavailableError(
            f"{have} of {replicas} replicas have the write: it does not count until they do. "
            "The operator should look at the replicas, or lower queue.wait_replicas",
            reason="QUEUE_REPLICAS",
        )
    return reply


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
