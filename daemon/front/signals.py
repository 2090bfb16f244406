"""What signals ask of the daemon."""

from __future__ import annotations

import asyncio
import os
import signal

from batond.daemon.early import early
from batond.daemon.telemetry.logging import get_logger

_log = get_logger(__name__)


def on_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Listen from now on; returns the events "stop" and "reload".

    SIGTERM and SIGINT ask for a drain, and the second one ends at once. SIGHUP asks for a reload; from a
    terminal that was closed, for a drain.
    """
    stop, reload = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    had_terminal = _has_terminal()

    def ask() -> None:
        if stop.is_set():
            _log.warning("forced")
            os._exit(1)  # The engine sees its socket close; leases run out, nothing is lost.
        stop.set()

    def hang_up() -> None:
        if had_terminal and not _has_terminal():
            stop.set()  # Nobody is left to stop the daemon.
        else:
            reload.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ask)
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
