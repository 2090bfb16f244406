"""Slices that nobody owns any more, while something still touches their bytes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from batond.offload.entries import SliceState

if TYPE_CHECKING:
    from batond.offload.entries import Entry, StoreStats
    from batond.offload.spiller import Spiller

logger = logging.getLogger(__name__)


class Retired:
    """Gives bytes back once their last copy, write or read is over.

    Args:
        spiller: Releases the bytes.
        stats: Counts late completions.
    """

    def __init__(self, spiller: Spiller, stats: StoreStats) -> None:
        self._spiller, self._stats = spiller, stats
        self.entries: list[Entry] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the pool that wait."""
        return sum(entry.pool_bytes for entry in self.entries)

    def add(self, entry: Entry) -> None:
        """Take an entry that is gone; give its bytes back now, or when that can be."""
        self._spiller.let_go(entry)
        entry.transfers = [transfer for transfer in entry.transfers if not transfer.done()]
        if entry.transfers or not _at_rest(entry):
            self.entries.append(entry)
        else:
            self._spiller.release(entry)

    def collect(self) -> None:
        """Give back what nothing touches any more."""
        waiting: list[Entry] = []
        for entry in self.entries:
            running = [transfer for transfer in entry.transfers if not transfer.done()]
            self._stats.late_completions += len(entry.transfers) - len(running)
            entry.transfers = running
            if running or not _at_rest(entry):
                waiting.append(entry)
            else:
                self._spiller.release(entry)
        self.entries = waiting

    def close(self) -> None:
        """Wait for everything."""
        for entry in self.entries:
            for transfer in entry.transfers:
                try:
                    transfer.wait()
                except Exception:  # the bytes are given up anyway
                    logger.exception("a copy failed while the store was closed")
            self._stats.late_completions += len(entry.transfers)
            entry.transfers = []
            if entry.job is not None:
                entry.job.wait()
            self._spiller.release(entry)
        self.entries = []

    def check_integrity(self) -> None:
        """Raise AssertionError where an entry waits for nothing."""
        for entry in self.entries:
            if entry.state is not SliceState.GONE or not (entry.transfers or entry.job):
                raise AssertionError("a slice waits for its release without a copy under way")


def _at_rest(entry: Entry) -> bool:
    """Whether no write or read of a file touches its bytes."""
    return entry.job is None or entry.job.done()
