"""This daemon among those that share its Redis: it tells of itself, and says who serves other models."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from importlib import metadata
from typing import TYPE_CHECKING, Final

from batond.daemon.config import is_local
from batond.daemon.config_base import split_address
from batond.daemon.errors import BatondError, NotFoundError
from batond.daemon.front.convert import DAEMON_STATES
from batond.daemon.queue.registry import TELL_EVERY_S, DaemonRecord, Registry
from batond.daemon.telemetry.logging import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from batond.daemon.config import ServerSettings
    from batond.daemon.front.state import DaemonState

NOT_SERVED: Final = "MODEL_NOT_SERVED"
#: Daemons are asked for at most so often, however many wrong requests there are.
FRESH_S: Final = 1.0
#: An error's detail is no longer; a list is cut between two of its items.
LONGEST_LIST_CHARS: Final = 128
_WILDCARDS: Final = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - told apart, not listened at

_log = get_logger(__name__)


class Neighbours:
    """Keeps this daemon's entry in the registry, and reads those of the others.

    Args:
        registry: Of this Redis.
        daemon_id: Names this run of the daemon.
        state: How it stands.
        address: Where other hosts reach it; empty if they don't.
        running_jobs: How many jobs are in its engine.

    Attributes:
        id: `daemon_id`.
    """

    def __init__(
        self,
        registry: Registry,
        daemon_id: str,
        state: DaemonState,
        *,
        address: str,
        running_jobs: Callable[[], int],
    ) -> None:
        self._registry, self._state, self.id = registry, state, daemon_id
        self._address, self._running_jobs = address, running_jobs
        self._changed = asyncio.Event()
        self._started_ms = 0
        self._known: list[DaemonRecord] = []
        self._known_s = float("-inf")

    async def run(self) -> None:
        """Tell of this daemon until cancelled."""
        told = True
        while True:
            self._changed.clear()
            try:
                await self.tell()
                told = True
            except BatondError as error:
                if told:
                    _log.warning("not_registered", error=error.message)
                told = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TELL_EVERY_S):
                    await self._changed.wait()

    def changed(self) -> None:
        """Say that the others should hear of this daemon now."""
        self._changed.set()

    async def tell(self) -> None:
        """Tell of this daemon."""
        if not self._started_ms:
            self._started_ms = await self._registry.now_ms()
        ready = self._state.ready
        record = DaemonRecord(
            id=self.id,
            model=ready.model,
            address=self._address,
            state=DAEMON_STATES[self._state.server_state],
            rows=ready.rows,
            running_jobs=self._running_jobs(),
            version=metadata.version("batond"),
            started_ms=self._started_ms,
        )
        await self._registry.tell(record)

    async def leave(self) -> None:
        """Take this daemon out; if that fails its entry runs out by itself."""
        try:
            await self._registry.leave(self.id)
        except BatondError as error:
            _log.warning("not_unregistered", error=error.message)

    async def all(self) -> list[DaemonRecord]:
        """Return all daemons, this one included.

        Raises:
            UnavailableError: Redis is away.
        """
        return await self._registry.daemons()

    async def not_served(self, error: NotFoundError) -> NotFoundError:
        """Return the error of a request for another model, with who serves it as far as that is known."""
        try:
            daemons = await self._recent()
        except BatondError:
            return error
        model = error.details.get("model", "")
        serving = [one for one in daemons if one.model == model]
        addresses = _joined(one.address for one in sorted(serving, key=_load) if one.address)
        told = "no daemon of this queue serves it"
        if serving:
            told = f"daemons at {addresses} serve it" if addresses else "daemons without an address serve it"
        return NotFoundError(
            f"{error.message}; {told}",
            **error.details,
            reason=error.reason,
            models=_joined(one.model for one in daemons),
            addresses=addresses,
        )

    async def _recent(self) -> list[DaemonRecord]:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._known_s > FRESH_S:
            self._known = await self._registry.daemons()
            self._known_s = now_s
        return self._known


def advertised(server: ServerSettings) -> str:
    """The address that other hosts are told: the configured one, else the first that others can reach."""
    if server.advertise:
        return server.advertise
    for address in server.listen:
        if not is_local(address):
            host, port = split_address(address)
            return f"{socket.gethostname()}:{port}" if host in _WILDCARDS else address
    return ""


def _load(one: DaemonRecord) -> tuple[bool, float]:
    """Ready ones first, then those with most room."""
    return one.state != "ready", one.running_jobs / max(1, one.rows)


def _joined(items: Iterable[str]) -> str:
    text = ""
    for item in dict.fromkeys(items):
        longer = f"{text},{item}" if text else item
        if len(longer) <= LONGEST_LIST_CHARS:
            text = longer
    return text
