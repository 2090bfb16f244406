"""What signals ask of the daemon."""

from __future__ import annotations

import asyncio
import os
import signal

from batond.daemon.early import early
from batond.daemon.telemetry.logging import get_logger

_log = get_logger(__name__)


class Stop(asyncio.Event):
    """Set once the daemon shall end.

    Attributes:
        why: What asked for it first; empty before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.why = ""

    def ask(self, why: str) -> None:
        """Ask for the end; a second time changes nothing."""
        if not self.is_set():
            self.why = why
            self.set()


async def tell_stop(stop: Stop) -> None:
    """Log that the signal was heard: until the engine is loaded, nothing else would show it."""
    await stop.wait()
    _log.info("stopping", why=stop.why, during="load")


def on_signals() -> tuple[Stop, asyncio.Event]:
    """Listen from now on; returns the events "stop" and "reload".

    SIGTERM and SIGINT ask for a drain, and the second one ends at once. SIGHUP asks for a reload; from a
    terminal that was closed, for a drain.
    """
    stop, reload = Stop(), asyncio.Event()
    loop = asyncio.get_running_loop()
    had_terminal = _has_terminal()

    def ask(number: signal.Signals) -> None:
        if stop.is_set():
            _log.warning("forced")
            os._exit(1)  # The engine sees its socket close; leases run out, nothing is lost.
        stop.ask(number.name)

    def hang_up() -> None:
        if had_terminal and not _has_terminal():
            stop.ask("the terminal was closed")  # Nobody is left to stop the daemon.
        else:
            reload.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ask, number)
    loop.add_signal_handler(signal.SIGHUP, hang_up)
    if (
        early.reload
    ):  # It came while modules were being imported; the configuration may have been read before.
        reload.set()
    return stop, reload


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
