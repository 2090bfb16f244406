"""How fast slices go to a directory and come back, against plain calls on the same disk, in turns.

plain      one aligned buffer, direct I/O, pieces of the same size: what `dd oflag=direct bs=16M` does
direct     the second tier: pool, staging, file, with header and names
buffered   the same through the page cache, synced and dropped piece by piece
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from rich.table import Table

from batond.offload.folder import SpillFolder
from batond.offload.spill import PIECE_BYTES, SpillTier

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MEGA: Final = 1e6
SEALED: Final = b"a header of some length"


@dataclass(frozen=True, slots=True)
class Rate:
    """Medians over the rounds, in MB/s (10^6 bytes)."""

    way: str
    out_mb_s: float
    in_mb_s: float


def run(path: Path, *, slice_bytes: int, slices: int, rounds: int) -> list[Rate]:
    """Write and read slices in each way, in turns.

    Args:
        path: Of a directory, made and cleared as by a daemon.
        slice_bytes: Of one.
        slices: How many a turn.
        rounds: Turns of each way.

    Raises:
        ConfigError: The directory can't be used.
    """
    body = [torch.randint(0, 256, (slice_bytes,), dtype=torch.uint8)]
    ways: dict[str, Callable[[], tuple[float, float]]] = {
        "plain": lambda: _plain(path, slice_bytes, slices),
        "direct": lambda: _tier(path, body, slices, direct=True),
        "buffered": lambda: _tier(path, body, slices, direct=False),
    }
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, turn in ways.items():
            seconds[way].append(turn())
    total = slice_bytes * slices / MEGA
    return [
        Rate(
            way,
            statistics.median(total / out_s for out_s, _ in turns),
            statistics.median(total / in_s for _, in_s in turns),
        )
        for way, turns in seconds.items()
    ]


def table(rates: list[Rate]) -> Table:
    """Rates and what they are of the plain ones."""
    plain = rates[0]
    shown = Table("way", "out MB/s", "of plain", "in MB/s", "of plain")
    for rate in rates:
        shown.add_row(
            rate.way,
            f"{rate.out_mb_s:.0f}",
            f"{rate.out_mb_s / plain.out_mb_s:.2f}",
            f"{rate.in_mb_s:.0f}",
            f"{rate.in_mb_s / plain.in_mb_s:.2f}",
        )
    return shown


def _tier(path: Path, body: list[torch.Tensor], slices: int, *, direct: bool) -> tuple[float, float]:
    """Seconds out and in."""
    folder = SpillFolder(path)
    folder.direct &= direct
    tier = SpillTier(folder, slices * (body[0].numel() + (1 << 20)))
    try:
        target = [torch.zeros_like(body[0])]
        began_s = time.perf_counter()
        writes = [tier.write(f"slice {number}", SEALED, body) for number in range(slices)]
        for write in writes:
            if write is not None:
                write.wait()
        out_s = time.perf_counter() - began_s
        files = [write.file for write in writes if write is not None and write.kept]
        began_s = time.perf_counter()
        reads = [tier.read(file, SEALED, target) for file in files]
        for read in reads:
            read.wait()
        in_s = time.perf_counter() - began_s
        if len(files) < slices or any(read.error for read in reads) or not torch.equal(body[0], target[0]):
            raise OSError("the disk has not kept what was written: is it full?")
        return out_s, in_s
    finally:
        tier.close()


def _plain(path: Path, slice_bytes: int, slices: int) -> tuple[float, float]:
    """Seconds out and in."""
    path.mkdir(mode=0o700, exist_ok=True)
    names = [path / f"plain-{number}" for number in range(slices)]
    buffer = mmap.mmap(-1, PIECE_BYTES)
    buffer.write(os.urandom(PIECE_BYTES))
    pieces = -(-slice_bytes // PIECE_BYTES)
    try:
        began_s = time.perf_counter()
        for name in names:
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
            for piece in range(pieces):
                os.pwrite(fd, buffer, piece * PIECE_BYTES)
            os.close(fd)
        out_s = time.perf_counter() - began_s
        began_s = time.perf_counter()
        for name in names:
            fd = os.open(name, os.O_RDONLY | os.O_DIRECT)
            for piece in range(pieces):
                os.preadv(fd, [buffer], piece * PIECE_BYTES)
            os.close(fd)
        return out_s, time.perf_counter() - began_s
    finally:
        for name in names:
            name.unlink(missing_ok=True)
