"""A proxy before Redis that knows the calls by name, and does something nasty at one of them.

    proxy.on("commit_step", Moment.AFTER, cut, nth=3)     Redis has done it; nobody hears of it
    proxy.on("renew", Moment.BEFORE, drop, every=True)    no renewal ever reaches Redis
    proxy.on("claim", Moment.AFTER, first(daemon.kill))   the daemon dies with the answer on its way
    proxy.refuse(), proxy.stall()                         Redis is away; hangs

It runs in a thread with a loop of its own, so that tests of any kind can drive it.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import hashlib
import threading
from collections import deque
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import quote

from batond.bench.faults.resp import PUSH, read_reply, read_request
from batond.daemon.queue.calls import load_script

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from pathlib import Path
    from typing import Self

_SHARED_PARTS: Final = frozenset({"common", "line", "pace", "moves"})  # Of every script; none of their own.
_SUBSCRIBING: Final = frozenset({"SUBSCRIBE", "PSUBSCRIBE", "SSUBSCRIBE"})
_BUFFER_BYTES: Final = 1 << 26
_CALL_TIMEOUT_S: Final = 10.0


@cache
def script_names() -> dict[str, str]:
    """The queue's scripts: SHA -> name."""
    folder = files("batond.daemon.queue.scripts")
    names = {entry.name.removesuffix(".lua") for entry in folder.iterdir() if entry.name.endswith(".lua")}
    return {load_script(name).sha: name for name in sorted(names - _SHARED_PARTS)}


def name_call(words: list[bytes]) -> str:
    """The name of a call: its script's, else its command's in capitals."""
    command = words[0].decode(errors="replace").upper()
    if command == "EVALSHA":
        return script_names().get(words[1].decode(), command)
    if command == "EVAL":
        return script_names().get(hashlib.sha1(words[1], usedforsecurity=False).hexdigest(), command)
    return command


class Moment(enum.StrEnum):
    """When a rule acts on a call."""

    BEFORE = "before"  # It has not reached Redis.
    AFTER = "after"  # Redis has done it, its answer was not passed on.


class Outcome(enum.Enum):
    """What becomes of a call, or of its answer."""

    PASS = enum.auto()
    CUT = enum.auto()  # The connection is closed, on both sides.
    DROP = enum.auto()  # It vanishes, and so does all that follows on its connection.


Action: TypeAlias = "Callable[[str], Awaitable[Outcome]]"


async def cut(_: str) -> Outcome:
    """Close the connection."""
    return Outcome.CUT


async def drop(_: str) -> Outcome:
    """Swallow it, and whatever comes on the connection from now on, without a word."""
    return Outcome.DROP


def delay(seconds: float) -> Action:
    """Let it wait."""

    async def wait(_: str) -> Outcome:
        await asyncio.sleep(seconds)
        return Outcome.PASS

    return wait


def first(deed: Callable[[], object], outcome: Outcome = Outcome.CUT) -> Action:
    """Do something, such as kill somebody, while the call stands still; then let `outcome` become of it."""

    async def act(_: str) -> Outcome:
        deed()
        return outcome

    return act


@dataclass(slots=True)
class Rule:
    """What happens at which call.

    Attributes:
        name: Of the call; empty is any.
        moment: Before it reaches Redis, or after it was done.
        action: What happens.
        nth: At which of them since the rule was made, from 1; 0 is each.
        count: How many came so far.
        met: Set once it has acted.
    """

    name: str
    moment: Moment
    action: Action
    nth: int
    count: int = 0
    met: threading.Event = field(default_factory=threading.Event)

    def fits(self, name: str, moment: Moment) -> bool:
        """Whether to act; counts the call."""
        if moment is not self.moment or self.name not in {"", name}:
            return False
        self.count += 1
        return self.nth in {0, self.count}


class RedisProxy:
    """Listens on a Unix socket of its own and passes on to that of a Redis server.

    Args:
        upstream: Socket of the server.
        socket: Socket to listen on; made.

    Attributes:
        trace: Names of the calls in the order in which they came; lists that tests may clear.
    """

    def __init__(self, upstream: Path, socket: Path) -> None:
        self._upstream, self._socket = upstream, socket
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="redis-proxy", daemon=True)
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._flow = asyncio.Event()
        self._flow.set()
        self._rules: list[Rule] = []
        self.trace: list[str] = []

    @property
    def url(self) -> str:
        """What `queue.url` takes."""
        return f"unix://{quote(str(self._socket))}"

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._listen())
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CALL_TIMEOUT_S)
        self._loop.close()

    def on(self, name: str, moment: Moment, action: Action, *, nth: int = 1, every: bool = False) -> Rule:
        """Act at the `nth` call of this name from now on, or at every one."""
        rule = Rule(name, moment, action, 0 if every else nth)
        self._rules = [*self._rules, rule]
        return rule

    def lift(self) -> None:
        """Forget all rules."""
        self._rules = []

    def refuse(self) -> None:
        """Cut all connections and take no new ones."""
        self._do(self._close())

    def accept(self) -> None:
        """Take connections again."""
        self._do(self._listen())

    def stall(self) -> None:
        """Pass nothing on, either way, but keep all connections."""
        self._loop.call_soon_threadsafe(self._flow.clear)

    def go_on(self) -> None:
        """Pass on what was held by `stall`, and what follows."""
        self._loop.call_soon_threadsafe(self._flow.set)

    async def meet(self, name: str, moment: Moment) -> Outcome:
        """What the rules want to become of a call; the first that acts decides."""
        await self._flow.wait()
        if moment is Moment.BEFORE:
            self.trace.append(name)
        outcome = Outcome.PASS
        for rule in self._rules:
            if rule.fits(name, moment) and outcome is Outcome.PASS:
                try:
                    outcome = await rule.action(name)
                finally:  # Who did not wait for the end of a delay has met it all the same.
                    rule.met.set()
        return outcome

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_CALL_TIMEOUT_S)

    async def _listen(self) -> None:
        self._socket.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self._socket, limit=_BUFFER_BYTES)

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self._socket.unlink(missing_ok=True)
        for connection in list(self._connections):
            connection.close()
        if self._connections:
            await asyncio.wait({connection.ended for connection in self._connections})

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream = await asyncio.open_unix_connection(self._upstream, limit=_BUFFER_BYTES)
        except OSError:  # Redis is dead: so is the connection.
            writer.close()
            return
        connection = _Connection(self, (reader, writer), upstream)
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)
            connection.ended.set_result(None)


_Streams: TypeAlias = "tuple[asyncio.StreamReader, asyncio.StreamWriter]"


class _Connection:
    """One client's connection and ours to the server in its name."""

    def __init__(self, proxy: RedisProxy, client: _Streams, server: _Streams) -> None:
        self._proxy = proxy
        self._client, self._server = client, server
        self._asked: deque[str] = deque()  # Names of calls whose answers are to come.
        self._subscribed = False  # What comes is no answer.
        self._dropped = False
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Pass on until one side ends or a rule does."""
        self._tasks = tuple(asyncio.create_task(work) for work in (self._requests(), self._replies()))
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        self.close()
        for done in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(done, Exception) and not isinstance(done, (OSError, EOFError)):
                raise done

    def close(self) -> None:
        """Cut both sides."""
        for task in self._tasks:
            task.cancel()
        for _, writer in (self._client, self._server):
            with contextlib.suppress(OSError, RuntimeError):
                writer.transport.abort()

    async def _requests(self) -> None:
        while True:
            raw, words = await read_request(self._client[0])
            name = name_call(words)
            outcome = await self._proxy.meet(name, Moment.BEFORE)
            if outcome is Outcome.CUT:
                return
            self._dropped |= outcome is Outcome.DROP
            if self._dropped:
                continue
            if name in _SUBSCRIBING:
                self._subscribed = True
            if not self._subscribed:
                self._asked.append(name)
            self._server[1].write(raw)
            await self._server[1].drain()

    async def _replies(self) -> None:
        while True:
            raw = await read_reply(self._server[0])
            if self._asked and not self._subscribed and raw[:1] != PUSH:
                outcome = await self._proxy.meet(self._asked.popleft(), Moment.AFTER)
                if outcome is Outcome.CUT:
                    return
                self._dropped |= outcome is Outcome.DROP
            if not self._dropped:
                self._client[1].write(raw)
                await self._client[1].drain()
