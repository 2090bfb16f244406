"""Who hears the engine from its first breath on."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Final

from batond.daemon.telemetry.logging import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batond.daemon.front.dispatcher import Dispatcher
    from batond.daemon.telemetry.systemd import Notifier
    from batond.daemon.wire.messages import Ready, StepEvents

EXTEND_START_S: Final = 30.0
NOTE_EVERY_S: Final = 10.0  # In the log, while the model loads.

_log = get_logger(__name__)


class EngineListener:
    """Hears the engine before there is a dispatcher, and passes everything on once there is one."""

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self.dispatcher: Dispatcher | None = None
        self.first_ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._noted_s = -math.inf

    def engine_loading(self, note: str) -> None:
        """See EngineHandler. The notes come every two seconds; the log gets one now and then."""
        self._notifier.loading(note, EXTEND_START_S)
        now_s = time.monotonic()
        if now_s - self._noted_s >= NOTE_EVERY_S:
            self._noted_s = now_s
            _log.info("engine_loading", note=note)

    def engine_up(self, ready: Ready) -> None:
        """See EngineHandler."""
        _log.info("engine_up", batch=ready.batch_kind, rows=ready.rows, load_s=round(ready.load_s, 1))
        if not self.first_ready.done():
            self.first_ready.set_result(ready)
        if self.dispatcher is not None:
            self.dispatcher.engine_up(ready)

    async def engine_step(self, step: StepEvents) -> None:
        """See EngineHandler."""
        if self.dispatcher is not None:
            await self.dispatcher.engine_step(step)

    def engine_begins(self, query_ids: Sequence[str]) -> None:
        """See EngineHandler."""
        if self.dispatcher is not None:
            self.dispatcher.engine_begins(query_ids)

    def engine_down(self, why: str) -> None:
        """See EngineHandler."""
        if self.dispatcher is not None:
            self.dispatcher.engine_down(why)
