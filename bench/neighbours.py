"""Who shares a memory with the engine: a process on a card, or a script where there is none."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from batond.daemon.memory.governor import OwnUse
from batond.daemon.memory.readings import MemoryReading, ReadingLost

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

#: Between two readings of a scripted memory.
TICK_S: Final = 0.05
_READY_S: Final = 60.0
_CHILD: Final = (sys.executable, "-m", "batond.bench.neighbour_child")


class Neighbour(Protocol):
    """Takes memory that the engine's batch lives in, and gives it back."""

    @property
    def wanted_bytes(self) -> int:
        """What it is told to hold."""

    @property
    def held_bytes(self) -> int:
        """What it holds, as far as is known."""

    def want(self, nbytes: int) -> None:
        """Have it hold so much; it takes as long as there is no room for it."""

    def clock(self) -> float:
        """Seconds: monotonic, or those of the script."""

    def close(self) -> None:
        """End it; what it held is free again."""


@dataclass
class ScriptedNeighbour:
    """A memory that one batch shares with neighbours, told in tokens of KV. Time passes with each reading.

    It is the source of the governor's readings as well as the neighbour.

    Attributes:
        total_tokens: All there is.
        others_tokens: What neighbours hold; no more than the batch leaves.
        wanted_tokens: What they want.
        broken: Why it can't be read; "" if it can.
        now_s: The clock.
        batch: Of the engine, once it was asked what it holds.
        held_tokens: Of the batch, at each reading.
        closed: It was let go.
    """

    total_tokens: int = 1000
    others_tokens: int = 0
    wanted_tokens: int = 0
    broken: str = ""
    now_s: float = 500.0
    batch: Any = None
    held_tokens: list[int] = field(default_factory=list)
    name: str = "a neighbourhood"
    closed: bool = False

    def own_use(self, batch: Any) -> OwnUse:
        """What the batch holds: its tokens, without pages."""
        self.batch = batch
        return OwnUse(committed_bytes=sum(batch.lengths) * batch.layout.record_bytes)

    def clock(self) -> float:
        """The script's time."""
        return self.now_s

    def read(self) -> MemoryReading:
        """Let time pass, and neighbours take what is free.

        Raises:
            ReadingLost: As the script wants.
        """
        self.now_s += TICK_S
        if self.broken:
            raise ReadingLost(self.broken)
        own = sum(self.batch.lengths)
        self.held_tokens.append(own)
        self.others_tokens = min(self.wanted_tokens, self.total_tokens - own)
        free = self.total_tokens - own - self.others_tokens
        return MemoryReading(self.total_tokens * self._record, free * self._record, self.now_s)

    @property
    def wanted_bytes(self) -> int:
        """What it is told to hold."""
        return self.wanted_tokens * self._record

    @property
    def held_bytes(self) -> int:
        """As of the last reading."""
        return self.others_tokens * self._record

    def want(self, nbytes: int) -> None:
        """Hold so much from the next reading on."""
        self.wanted_tokens = nbytes // self._record

    def close(self) -> None:
        """Nothing is held."""
        self.closed = True

    @property
    def _record(self) -> int:
        return int(self.batch.layout.record_bytes)


class CardNeighbour:
    """A process of its own on a card, see `neighbour_child.py`. It begins to start when it is made.

    Args:
        device: The card.
        command: Of the process, instead (tests).
    """

    def __init__(self, device: torch.device, command: Sequence[str] = _CHILD) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - a module of this package
            [*command, str(device)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._told, self._lives = threading.Event(), True
        self._held_bytes = self._wanted_bytes = 0
        self._reader = threading.Thread(target=self._read, name="neighbour", daemon=True)
        self._reader.start()

    @property
    def wanted_bytes(self) -> int:
        """What it is told to hold."""
        return self._wanted_bytes

    @property
    def held_bytes(self) -> int:
        """As it said last."""
        return self._held_bytes

    def wait_ready(self) -> None:
        """Wait until it has a context on the card.

        Raises:
            RuntimeError: It has ended, or takes too long.
        """
        if not self._told.wait(_READY_S) or not self._lives:
            raise RuntimeError("the neighbour's process did not come up: see its output above")

    def want(self, nbytes: int) -> None:
        """Have it hold so much.

        Raises:
            OSError: It has ended.
        """
        self._wanted_bytes = nbytes
        stdin = self._process.stdin
        if stdin is not None:
            stdin.write(f"{nbytes}\n")
            stdin.flush()

    @staticmethod
    def clock() -> float:
        """The machine's monotonic clock."""
        return time.monotonic()

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(_READY_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._held_bytes = int(line)
            self._told.set()
        self._lives = False
        self._told.set()
