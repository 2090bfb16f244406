"""Starts the engine process, listens to it, and starts it again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from batond.daemon import errors
from batond.daemon.errors import BatondError, UnavailableError
from batond.daemon.front.overheard import STDERR, Overheard
from batond.daemon.telemetry.logging import get_logger
from batond.daemon.wire.channel import ChannelClosed, ChannelError, FrontChannel
from batond.daemon.wire.messages import Begins, EngineFailed, LoadFailed, Loading, Ready, StepEvents, Stop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from batond.daemon.wire.messages import Command, Event
    from batond.daemon.wire.settings import EngineSettings

#: `-P`: the working directory must not shadow a module of ours or of torch's.
ENGINE_COMMAND: Final = (sys.executable, "-P", "-m", "batond.daemon.engine.process")
LONGEST_BACKOFF_S: Final = 60.0
STOP_TIMEOUT_S: Final = 5.0
LAST_BREATH_S: Final = 2.0
FROZEN_TICKS: Final = 20  # Looks within the time after which an engine is frozen.
LONGEST_TICK_S: Final = 1.0
HEALTHY_AFTER_S: Final = 60.0  # An engine that lived so long starts the back-off anew.

_log = get_logger(__name__)
_ERRORS: Final[dict[str, type[BatondError]]] = {
    kind.reason: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, BatondError)
}


class EngineHandler(Protocol):
    """Who hears the engine, on the event loop."""

    def engine_loading(self, note: str) -> None:
        """The model is being loaded."""

    def engine_up(self, ready: Ready) -> None:
        """The engine takes queries; after a restart it knows none."""

    def engine_begins(self, query_ids: Sequence[str]) -> None:
        """The engine is about to compute queries for the first time."""

    async def engine_step(self, step: StepEvents) -> None:
        """Events of one step, or a heartbeat. While this waits, the engine is not read: it will wait too."""

    def engine_down(self, why: str) -> None:
        """The engine died, and all that is known of it; it will be started again."""


def error_from(reason: str, message: str) -> BatondError:
    """The domain error that the engine named; `BatondError` if we don't know it."""
    return _ERRORS.get(reason, BatondError)(message, reason=reason)


class EngineLink:
    """One engine process at a time.

    Args:
        settings: What the process is told.
        backoff_s: First pause before a dead engine is started again; doubles up to a minute.
        frozen_after_s: An engine that serves and says nothing for so long is killed, and started again.
        command: How to start the process; the descriptor of its socket is appended.

    Attributes:
        ready: What the engine says of itself; None while there is none that takes queries.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        backoff_s: float = 0.5,
        frozen_after_s: float = math.inf,
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> None:
        self._config_json = msgspec.json.encode(settings)
        self._first_backoff_s, self._frozen_after_s = backoff_s, frozen_after_s
        self._last_words = ""  # Why it dies, by its own word or ours.
        self._command = tuple(command)
        self._process: asyncio.subprocess.Process | None = None
        self._overheard: Overheard | None = None
        self._channel: FrontChannel | None = None
        self._stopping = False
        self._heard_s = time.monotonic()
        self._handling = False
        self.ready: Ready | None = None

    @property
    def silent_s(self) -> float:
        """How long the engine has said nothing, though it was listened to.

        While a step waits for room (Redis is away for long), the engine is not read: that is no silence of
        its own, and no reason to have the daemon killed with all it could not save yet. Nor is the pause
        before a dead engine is started again.
        """
        return 0.0 if self._handling or self._channel is None else time.monotonic() - self._heard_s

    @property
    def pid(self) -> int | None:
        """Process id of the engine."""
        return None if self._process is None else self._process.pid

    def send(self, command: Command) -> None:
        """Send a command.

        Raises:
            UnavailableError: There is no engine to take it now.
        """
        if self._channel is None or self.ready is None:
            raise UnavailableError("the engine is being started", reason="ENGINE_DOWN")
        try:
            self._channel.send(command)
        except ChannelClosed as error:
            raise UnavailableError("the engine has died", reason="ENGINE_DOWN") from error

    async def run(self, handler: EngineHandler) -> None:
        """Start the engine, listen to it, and start it again whenever it dies, until `stop`.

        Raises:
            BatondError: It says at its first start that it can't serve as configured; the message says why.
        """
        backoff_s = self._first_backoff_s
        proven, why = False, ""
        while not self._stopping:
            started_s = time.monotonic()
            try:
                await self._spawn()
                await self._load(handler)
                proven = True
                await self._listen(handler)
            except (ChannelClosed, ChannelError, OSError) as error:
                why = await self._bury(error)
            except BatondError as error:
                why = await self._bury(error)
                if not proven:
                    raise
            if self._stopping:
                return
            if not proven:
                raise UnavailableError(f"the engine died while it was loading: {why}", reason="ENGINE_DOWN")
            if time.monotonic() - started_s > HEALTHY_AFTER_S:
                backoff_s = self._first_backoff_s
            _log.error("engine_down", why=why, restart_in_s=backoff_s)
            handler.engine_down(why)
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, LONGEST_BACKOFF_S)

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End the process: by asking, then by force."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        try:
            self.send(Stop())
        except UnavailableError:
            process.kill()  # It is still loading, and has nothing to lose.
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
        except TimeoutError:
            _log.warning("engine_killed", pid=process.pid)
            process.kill()
            await process.wait()

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        stderr: int | None = None
        if not os.isatty(STDERR):  # A terminal it writes to itself, in colours.
            self._overheard, stderr = await Overheard.open()
        try:
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    str(theirs.fileno()),
                    stdin=asyncio.subprocess.PIPE,
                    stderr=stderr,
                    pass_fds=(theirs.fileno(),),
                    # transformers draws a bar for GGUF files, asked or not: between the lines of the log.
                    env={"TQDM_DISABLE": "1", **os.environ},
                )
        finally:
            if stderr is not None:
                os.close(stderr)
        self._heard_s, self._last_words = time.monotonic(), ""
        self._channel = await FrontChannel.open(ours)
        if self._process.stdin is not None:
            self._process.stdin.write(self._config_json)
            self._process.stdin.close()
        _log.info("engine_started", pid=self._process.pid)

    async def _load(self, handler: EngineHandler) -> None:
        while True:
            event = await self._receive()
            if isinstance(event, Loading):
                handler.engine_loading(event.note)
            elif isinstance(event, LoadFailed):
                raise error_from(event.reason, event.message)
            elif isinstance(event, Ready):
                self.ready = event
                handler.engine_up(event)
                return

    async def _listen(self, handler: EngineHandler) -> None:
        watch = asyncio.create_task(self._kill_frozen(), name="frozen engine")
        try:
            while True:
                event = await self._receive()
                if isinstance(event, StepEvents):
                    self._handling = True
                    try:
                        await _taken(handler.engine_step(event))
                    finally:
                        self._handling = False
                        self._heard_s = time.monotonic()
                elif isinstance(event, Begins):
                    handler.engine_begins(event.query_ids)
                elif isinstance(event, EngineFailed):
                    self._last_words = f"step {event.step}: {event.reason}: {event.message}"
        finally:
            watch.cancel()

    async def _kill_frozen(self) -> None:
        """Kill an engine that says nothing although it is listened to.

        Time is counted in ticks: where this process was paused itself, one tick has passed, not the pause.
        """
        tick_s = min(self._frozen_after_s / FROZEN_TICKS, LONGEST_TICK_S)
        heard_s, silent_ticks = self._heard_s, 0
        while True:
            await asyncio.sleep(tick_s)
            silent_ticks = silent_ticks + 1 if heard_s == self._heard_s and not self._handling else 0
            heard_s = self._heard_s
            if silent_ticks * tick_s >= self._frozen_after_s and self._process is not None:
                self._last_words = f"it said nothing for {self._frozen_after_s:g} s and was killed"
                _log.error("engine_frozen", pid=self._process.pid, silent_s=round(self.silent_s, 1))
                # Its stacks go to the log (faulthandler); a process that is stopped can't do even that.
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(signal.SIGABRT)
                    await asyncio.sleep(LAST_BREATH_S)
                    self._process.kill()
                silent_ticks = 0

    async def _receive(self) -> Event:
        if self._channel is None:
            raise ChannelClosed("there is no engine")
        event = await self._channel.receive()
        self._heard_s = time.monotonic()
        return event

    async def _bury(self, error: Exception) -> str:
        """Make sure that the process is gone; returns why it went."""
        self.ready = None
        code, muttered = None, ""
        try:
            if self._channel is not None:
                # One that reads nothing never takes what is still to be written; it is killed below.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LAST_BREATH_S):
                        await self._channel.close()
            if self._process is not None:
                code = await self._end_of(self._process)
        finally:
            if self._overheard is not None:
                muttered = await self._overheard.close(LAST_BREATH_S)
                self._overheard = None
            self._channel = None  # Until then it is silent: a process that can't be killed is no engine.
        words = [self._last_words or str(error)]
        if code is not None:
            words.append(f"exit status {code}" if code >= 0 else f"killed by {_signal_name(-code)}")
        if muttered:
            words.append(f"on standard error: {muttered}")
        return "; ".join(words)

    @staticmethod
    async def _end_of(process: asyncio.subprocess.Process) -> int:
        try:
            async with asyncio.timeout(LAST_BREATH_S):  # It may still be on its way out.
                return await process.wait()
        except TimeoutError:
            process.kill()
            return await process.wait()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


async def _taken(handled: Awaitable[None]) -> None:
    """A step that can't be taken in ends the engine that said it, and not the front."""
    try:
        await handled
    except Exception as error:
        _log.exception("engine_step_refused")
        raise ChannelError(f"a step can't be taken in: {error!r}") from error
