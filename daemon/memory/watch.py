"""Reads a memory again and again, on a thread of its own: nobody waits for a driver that hangs.

A reading that is not renewed in time is *lost*, whatever the reason: the source failed, its call hangs, or
the thread got no processor. Whoever asks gets None then, at once.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from batond.daemon.memory.readings import ReadingLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.memory.governor import OwnUse
    from batond.daemon.memory.readings import MemoryReading, MemorySource

_log = logging.getLogger(__name__)

DEFAULT_INTERVAL_S: Final = 0.05
#: A reading is lost after so many intervals, but not before `LEAST_STALE_S`: neither one failure nor a busy
#: processor changes anything.
STALE_INTERVALS: Final = 5
LEAST_STALE_S: Final = 1.0
#: The first reading may have to wake a driver, and is waited for; but where it is refused, it is again.
FIRST_TIMEOUT_S: Final = 10.0
FIRST_TRIES: Final = 3
#: Own use may change while the source is asked; so often is asked again for a pair that belongs together.
PAIR_TRIES: Final = 3
PAIR_TOLERANCE_BYTES: Final = 8 << 20  # A heap breathes.
CLOSE_TIMEOUT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A reading, and what this process held of that memory at the same moment.

    The two belong together: other processes' use is the difference. Own use of now against a reading from
    before a release of 10 GB would call these 10 GB somebody else's.
    """

    reading: MemoryReading
    own: OwnUse


class MemoryWatch:
    """Keeps the latest sample. `start` begins the thread; without it, `sample` is called by hand.

    Args:
        source: Is asked.
        own_use: Tells what this process holds; called from the thread.
        interval_s: Between two readings.
        stale_s: A reading so old is lost; None follows from the interval.
        on_sample: Called from the thread with each sample, for what can't wait for the engine's next step.
        clock: Monotonic, the source's.
    """

    def __init__(
        self,
        source: MemorySource,
        own_use: Callable[[], OwnUse],
        *,
        interval_s: float = DEFAULT_INTERVAL_S,
        stale_s: float | None = None,
        on_sample: Callable[[Sample], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source, self._own_use, self._on_sample = source, own_use, on_sample
        self._interval_s = interval_s
        self._stale_s = max(STALE_INTERVALS * interval_s, LEAST_STALE_S) if stale_s is None else stale_s
        self._clock = clock
        self._began_s = clock()
        self._sample: Sample | None = None
        self._trouble = ""  # Of the last try; "" if it succeeded.
        self._lost = False
        self._losses = 0
        self._tries, self._tried = 0, threading.Condition()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def losses(self) -> int:
        """How often the readings were lost since the start."""
        return self._losses

    @property
    def last_failure(self) -> str:
        """Why the last try gave no reading; "" if it gave one, or has not come back."""
        return self._trouble

    @property
    def trouble(self) -> str:
        """Why there is no reading, in words; "" while there is one."""
        if not self._lost:
            return ""
        last_s = self._began_s if self._sample is None else self._sample.reading.at_s
        silent = f"no reading of {self._source.name} for {self._clock() - last_s:.1f} s"
        return f"{silent}: {self._trouble or 'the call has not come back'}"

    def latest(self) -> Sample | None:
        """The newest sample, or None if it is lost. Never waits; logs loss and return once each."""
        sample = self._sample
        last_s = self._began_s if sample is None else sample.reading.at_s
        fresh = self._clock() - last_s <= self._stale_s
        if fresh and sample is not None and self._lost:
            self._lost = False
            _log.warning("readings of %s are back", self._source.name)
        elif not fresh and not self._lost:
            self._lost = True
            self._losses += 1
            _log.warning("%s; memory limits are not raised until there is one", self.trouble)
        return sample if fresh else None

    def start(self) -> None:
        """Begin to read on a thread."""
        if self._thread is not None:
            raise RuntimeError("the watch has been started before")
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)
        self._thread.start()

    def wait_first(self, timeout_s: float = FIRST_TIMEOUT_S) -> bool:
        """Wait for the thread's first reading; returns whether there is one.

        Args:
            timeout_s: For which a call may hang; failures end the wait sooner.
        """
        with self._tried:
            self._tried.wait_for(lambda: self._sample or self._tries >= FIRST_TRIES, timeout_s)
            if self._sample is None and not self._tries:
                self._trouble = f"no answer within {timeout_s:g} s"
        return self._sample is not None

    def sample(self) -> bool:
        """Read once, now; returns whether there was a reading. The thread does nothing else."""
        found = self._read()
        with self._tried:
            self._tries += 1
            self._tried.notify_all()
        return found

    def _read(self) -> bool:
        try:
            own, reading = self._own_use(), self._source.read()
            for _ in range(PAIR_TRIES):
                before, own = own, self._own_use()
                if abs(own.total_bytes - before.total_bytes) <= PAIR_TOLERANCE_BYTES:
                    break
                reading = self._source.read()
            self._sample = sample = Sample(reading, own)
            if self._on_sample is not None:
                self._on_sample(sample)
        except ReadingLost as error:
            self._trouble = str(error)
            return False
        except Exception as error:  # noqa: BLE001 - a thread that dies of a surprise would say nothing
            self._trouble = f"{type(error).__name__}: {error}"
            return False
        self._trouble = ""
        return True

    def close(self) -> None:
        """End the thread, which closes its source: letting go may hang as well as asking.

        One that hangs is left alone; the process may exit all the same.
        """
        self._done.set()
        if self._thread is None:
            if self._tries:  # By hand, on this thread; who has never read has opened nothing.
                self._source.close()
            return
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _log.warning("%s still hangs in a call: it is left alone", self._source.name)

    def _run(self) -> None:
        while not self._done.is_set():
            self.sample()
            self._done.wait(self._interval_s)
        self._source.close()


def read_within(source: MemorySource, timeout_s: float = FIRST_TIMEOUT_S) -> MemoryReading:
    """Ask a source once, on a thread that closes it too, and leave it alone if it hangs.

    Args:
        source: Is nobody else's: a call that hangs may come back much later.
        timeout_s: For which a call may hang.

    Raises:
        ReadingLost: It failed, or did not answer in time.
    """
    found: list[MemoryReading] = []
    failures: list[Exception] = []

    def read() -> None:
        try:
            found.append(source.read())
        except Exception as error:  # noqa: BLE001 - handed to the caller
            failures.append(error)
        finally:
            source.close()

    thread = threading.Thread(target=read, name="memory-first", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if found:
        return found[0]
    why = f"{failures[0]}" if failures else f"no answer within {timeout_s:g} s"
    raise ReadingLost(f"{source.name}: {why}")
