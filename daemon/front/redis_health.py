"""Whether Redis does what it is asked."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Final

from batond.daemon.telemetry.logging import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batond.daemon.errors import BatondError
    from batond.daemon.telemetry.metrics import Metrics

#: A server that has not answered for so long is away, though the connection stands and no call failed.
SLOW_S: Final = 3.0

_log = get_logger(__name__)


class RedisHealth:
    """Derived from what callers report: away, full, unable to write, or silent."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._failed = False
        self._asked_s: list[float] = []
        metrics.redis_up.set_function(lambda: float(self.up))

    @property
    def up(self) -> bool:
        """Whether it answered last time, and nobody waits for long."""
        return not self._failed and (not self._asked_s or time.monotonic() - min(self._asked_s) < SLOW_S)

    def note(self, error: BatondError | None) -> None:
        """Redis did what was asked, or did not."""
        if self._failed is (error is None):
            _log.warning(
                "redis_back" if error is None else "redis_away", error=error.message if error else ""
            )
        self._failed = error is not None

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Around a call: how long it takes is seen before it ends."""
        asked_s = time.monotonic()
        self._asked_s.append(asked_s)
        try:
            yield
        finally:
            self._asked_s.remove(asked_s)
