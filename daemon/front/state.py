"""How the daemon stands: all it says of itself, to clients, health checks and systemd, is derived here."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from batond.v1 import admin_pb2

if TYPE_CHECKING:
    from batond.daemon.front.dispatcher import Dispatcher
    from batond.daemon.front.engine_link import EngineLink
    from batond.daemon.wire.messages import Ready

#: A frozen engine is killed and replaced (engine_link.py). One that is there after so many times the patience
#: hangs in the kernel: whoever watches this process may have more power over it.
UNKILLABLE: Final = 2


class DaemonState:
    """Derives states from engine, queue and drain.

    Args:
        link: The engine.
        dispatcher: The jobs.
        ready: What the engine said first; its limits hold while it is restarted.
        frozen_after_s: An engine silent for so long is frozen.
        max_queued: Waiting jobs at which the queue is full.

    Attributes:
        stop_requested: Set when the daemon shall drain and end.
        drain_timeout_s: Asked for with the stop; None is the configured one.
    """

    def __init__(
        self,
        link: EngineLink,
        dispatcher: Dispatcher,
        ready: Ready,
        *,
        frozen_after_s: float,
        max_queued: int,
    ) -> None:
        self._link, self._dispatcher, self._first_ready = link, dispatcher, ready
        self._frozen_after_s, self._max_queued = frozen_after_s, max_queued
        self.stop_requested = asyncio.Event()
        self.drain_timeout_s: float | None = None

    @property
    def ready(self) -> Ready:
        """What the engine says of itself."""
        return self._link.ready or self._first_ready

    @property
    def policy(self) -> str:
        """Name of the active scheduling policy."""
        return self._dispatcher.policy or self.ready.policy

    @property
    def engine_alive(self) -> bool:
        """Whether the engine was heard of late."""
        return self._link.silent_s < self._frozen_after_s

    @property
    def live(self) -> bool:
        """Whether the process is worth keeping: only a frozen engine that can't be killed says no."""
        return self._link.silent_s < UNKILLABLE * self._frozen_after_s

    @property
    def serving(self) -> bool:
        """Whether new jobs will run soon."""
        able = self._link.ready is not None and self.engine_alive and self._dispatcher.redis_up
        return able and not self._dispatcher.draining

    @property
    def saturated(self) -> bool:
        """Whether the queue is full: a reason to send work elsewhere, not to restart."""
        counts = self._dispatcher.counts
        return counts is not None and sum(counts.queued.values()) >= self._max_queued

    @property
    def server_state(self) -> admin_pb2.ServerState:
        """For GetServerInfo."""
        if self._dispatcher.draining:
            return admin_pb2.SERVER_STATE_DRAINING
        if self._link.ready is None:
            return admin_pb2.SERVER_STATE_LOADING
        if not self._dispatcher.redis_up or not self.engine_alive:
            return admin_pb2.SERVER_STATE_DEGRADED
        return admin_pb2.SERVER_STATE_READY

    @property
    def message(self) -> str:
        """Why it isn't ready; empty if it is."""
        if self._dispatcher.draining:
            return "draining: no new jobs"
        if self._link.ready is None:
            return "the engine is being started"
        if not self.engine_alive:
            return f"the engine has been silent for {self._link.silent_s:.0f} s"
        if self._dispatcher.waits_for_redis:
            return "Redis has been away for so long that generation waits; nothing is lost"
        if not self._dispatcher.redis_up:
            return "Redis does not answer: generation goes on, results are saved when it is back"
        return ""

    def request_stop(self, drain_timeout_s: float | None = None) -> None:
        """Drain and end; a second request changes nothing."""
        if not self.stop_requested.is_set():
            self.drain_timeout_s = drain_timeout_s
            self.stop_requested.set()
