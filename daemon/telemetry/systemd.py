"""The notify protocol of systemd, see sd_notify(3) and sd_watchdog_enabled(3).

Written out here because the one pure-Python package for it has had no release since 2017 and neither handles
abstract sockets' edge cases nor the watchdog's variables.
"""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_PINGS_PER_INTERVAL = 3  # systemd recommends at least two.


class Notifier:
    """Tells the service manager how the daemon is; does nothing where there is none.

    Args:
        environment: Where NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID stand.
        clock: Monotonic seconds.
    """

    def __init__(
        self, environment: Mapping[str, str] = os.environ, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):
            self._address = "\0" + self._address[1:]  # The abstract namespace.
        self._clock = clock
        self._last_ping_s = -float("inf")
        self.watchdog_s = _watchdog_s(environment)

    def ready(self, status: str) -> None:
        """The daemon serves: call it once the engine gave its self-test token and gRPC listens."""
        self._send(f"READY=1\nSTATUS={status}")

    def loading(self, status: str, extend_s: float) -> None:
        """The start goes on: don't give up for another `extend_s`."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(extend_s * 1e6)}\nSTATUS={status}")

    def status(self, status: str) -> None:
        """One line for `systemctl status`."""
        self._send(f"STATUS={status}")

    def reloading(self, status: str) -> None:
        """The configuration is read again; `ready` ends it. `Type=notify-reload` asks for the time."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={int(self._clock() * 1e6)}\nSTATUS={status}")

    def stopping(self, status: str) -> None:
        """The drain began."""
        self._send(f"STOPPING=1\nSTATUS={status}")

    def alive(self) -> None:
        """The engine made progress: call it at each heartbeat; pings are sent a few times per interval."""
        if self.watchdog_s is None:
            return
        now_s = self._clock()
        if now_s - self._last_ping_s >= self.watchdog_s / _PINGS_PER_INTERVAL:
            self._last_ping_s = now_s
            self._send("WATCHDOG=1")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
            try:
                notify.sendto(text.encode(), socket.MSG_DONTWAIT, self._address)
            except OSError:
                return  # A manager that does not listen must not stop the service.


def _watchdog_s(environment: Mapping[str, str]) -> float | None:
    micros = environment.get("WATCHDOG_USEC", "")
    meant_for = environment.get("WATCHDOG_PID", "")
    if not micros.isdecimal() or int(micros) == 0 or (meant_for and meant_for != str(os.getpid())):
        return None
    return int(micros) / 1e6
