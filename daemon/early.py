"""SIGHUP before the daemon listens for it: while Python reads a hundred modules, it would end the process.

Needs nothing but the standard library: it is the first thing that `batond serve` does.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType


@dataclass(slots=True)
class Early:
    """What came early.

    Attributes:
        reload: SIGHUP came, and nobody has acted on it yet.
    """

    reload: bool = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.reload = True

    def listen(self) -> None:
        """Note SIGHUP from now on, until the event loop takes over."""
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            signal.signal(signal.SIGHUP, self._note)


early = Early()
