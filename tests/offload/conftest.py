"""Factories of slices and stores, and copiers that wait and fail on cue."""

from __future__ import annotations

import errno
import hashlib
import threading
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest
import torch

from batond.offload.copies import InlineCopier
from batond.offload.folder import SpillFolder
from batond.offload.pool import HostPool
from batond.offload.slice import KVSlice
from batond.offload.spill import SpillTier
from batond.offload.store import ParkedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batond.offload.copies import Copier, Transfer
    from batond.offload.pool import Reservation

RECORD_BYTES = 48
STATE_BYTES = 40


class DelayedTransfer:
    """Moves its bytes when the test says so, or when somebody waits for it."""

    def __init__(self, move: Callable[[], Transfer], *, fails: bool) -> None:
        self._move = move
        self._fails = fails
        self._over = False
        self.waits = 0

    def complete(self) -> None:
        """Let the copy happen now."""
        if not self._over:
            self._over = True
            if not self._fails:
                self._move()

    def done(self) -> bool:
        """Whether it has happened."""
        return self._over

    def wait(self) -> None:
        """Let it happen, as a stream would by itself."""
        self.waits += 1
        self.complete()
        if self._fails:
            raise RuntimeError("the copy died")


class DelayedCopier:
    """Copies later: nothing has moved until the transfer is completed.

    Attributes:
        transfers: All transfers, oldest first.
        fails: Whether transfers started from now on die.
    """

    def __init__(self) -> None:
        self.transfers: list[DelayedTransfer] = []
        self.fails = False
        self._inline = InlineCopier()

    def store(self, kv: KVSlice, reservation: Reservation) -> Transfer:
        """Plan a copy to host."""
        return self._later(lambda: self._inline.store(kv, reservation))

    def load(self, reservation: Reservation, kv: KVSlice) -> Transfer:
        """Plan a copy to device."""
        return self._later(lambda: self._inline.load(reservation, kv))

    def _later(self, move: Callable[[], Transfer]) -> Transfer:
        transfer = DelayedTransfer(move, fails=self.fails)
        self.transfers.append(transfer)
        return transfer

    def complete_all(self) -> None:
        """Let everything happen."""
        for transfer in self.transfers:
            transfer.complete()


class FailingCopier:
    """Refuses to start copies after `fail_after` good ones."""

    def __init__(self, fail_after: int) -> None:
        self.left = fail_after
        self._inline = InlineCopier()

    def store(self, kv: KVSlice, reservation: Reservation) -> Transfer:
        """Copy to host, or fail."""
        self._count()
        return self._inline.store(kv, reservation)

    def load(self, reservation: Reservation, kv: KVSlice) -> Transfer:
        """Copy to device, or fail."""
        self._count()
        return self._inline.load(reservation, kv)

    def _count(self) -> None:
        if not self.left:
            raise RuntimeError("the copy engine is on fire")
        self.left -= 1


class CueFolder(SpillFolder):
    """A real directory whose calls wait and fail on cue.

    Attributes:
        fails: From the name of a call to how many of it succeed before one fails, and how it fails.
        gate: Reads and writes wait here; open at first.
        entered: Set once one waits.
        calls: How often each was made.
    """

    def __init__(self, path: Path) -> None:
        self.fails: dict[str, tuple[int, int]] = {}
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self.calls: Counter[str] = Counter()
        super().__init__(path)

    def create(self, name: str) -> int:
        """Create, or fail."""
        self._cue("create")
        return super().create(name)

    def open(self, name: str) -> int:
        """Open, or fail."""
        self._cue("open")
        return super().open(name)

    def write(self, fd: int, piece: memoryview, offset: int) -> int:
        """Write, or fail; fault 0 is a short write."""
        self._wait()
        return super().write(fd, piece[:4096] if self._cue("write") else piece, offset)

    def read(self, fd: int, piece: memoryview, offset: int) -> int:
        """Read, or fail; fault 0 is the end of the file."""
        self._wait()
        return 0 if self._cue("read") else super().read(fd, piece, offset)

    def publish(self, name: str) -> None:
        """Publish, or fail."""
        self._cue("publish")
        super().publish(name)

    def _wait(self) -> None:
        self.entered.set()
        assert self.gate.wait(30)

    def _cue(self, call: str) -> bool:
        self.calls[call] += 1
        good, fault = self.fails.get(call, (-1, 0))
        if good < 0:
            return False
        self.fails[call] = (good - 1, fault)
        if good:
            return False
        if fault:
            raise OSError(fault, "on cue")
        return True


class MemoryFolder:
    """Files in a dictionary; fails on cue, and breaks what the test tells it to.

    Attributes:
        files: Bytes by name; unfinished ones end with `.part`.
        fault: The next write or read fails with it; 0 is none.
    """

    path = Path("/in/memory")

    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}
        self.fault = 0
        self._count = 0
        self._open: dict[int, bytearray] = {}

    def new_name(self, owner_id: str) -> str:
        """Name a file."""
        self._count += 1
        return f"{self._count} {owner_id}"

    def free_bytes(self) -> int:
        """There is always room."""
        return 1 << 40

    def create(self, name: str) -> int:
        """Begin a file."""
        self.files[f"{name}.part"] = bytearray()
        return self._opened(f"{name}.part")

    def open(self, name: str) -> int:
        """Open a file."""
        if name not in self.files:
            raise FileNotFoundError(errno.ENOENT, "no such file")
        return self._opened(name)

    def write(self, fd: int, piece: memoryview, offset: int) -> int:
        """Write."""
        self._cue()
        self._open[fd][offset : offset + len(piece)] = piece
        return len(piece)

    def read(self, fd: int, piece: memoryview, offset: int) -> int:
        """Read."""
        self._cue()
        found = self._open[fd][offset : offset + len(piece)]
        piece[: len(found)] = found
        return len(found)

    def settle(self, fd: int) -> None:
        """Nothing to do."""

    def shut(self, fd: int) -> None:
        """Close."""
        del self._open[fd]

    def publish(self, name: str) -> None:
        """Rename."""
        self.files[name] = self.files.pop(f"{name}.part")

    def remove(self, name: str) -> None:
        """Remove."""
        self.files.pop(name, None)
        self.files.pop(f"{name}.part", None)

    def close(self) -> None:
        """Everything is closed by then."""
        assert not self._open

    def _opened(self, name: str) -> int:
        self._count += 1
        self._open[self._count] = self.files[name]
        return self._count

    def _cue(self) -> None:
        fault, self.fault = self.fault, 0
        if fault:
            raise OSError(fault, "on cue")


class LaterFuture(Future[Any]):
    """A job that runs when the test says so, or when somebody waits for it."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__()
        self._work = work

    def run(self) -> None:
        """Do it now."""
        if not self.done():
            self._work()
            self.set_result(None)

    def result(self, timeout: float | None = None) -> Any:
        """Do it, if nobody has."""
        self.run()
        return super().result(timeout)


class LaterExecutor:
    """Keeps jobs until they are run; those of one executor in any order.

    Attributes:
        jobs: What was submitted and not taken.
    """

    def __init__(self) -> None:
        self.jobs: list[LaterFuture] = []

    def submit(self, work: Callable[..., object], *args: object) -> LaterFuture:
        """Keep a job."""
        self.jobs.append(LaterFuture(lambda: work(*args)))
        return self.jobs[-1]

    def shutdown(self, *, wait: bool) -> None:
        """Do all that is left."""
        assert wait
        for job in self.jobs:
            job.run()


class MakeKV(Protocol):
    """Makes a slice whose bytes only this owner has; the same owner and length give the same bytes."""

    def __call__(self, owner_id: str, n_tokens: int = 5, *, state_bytes: int = STATE_BYTES) -> KVSlice:
        """Make it."""


class MakeStore(Protocol):
    """Makes a poisoning store over a pool of its own; integrity is checked after the test."""

    def __call__(
        self, capacity_bytes: int = 1 << 16, copier: Copier | None = None, *, chunk_bytes: int = 1000
    ) -> ParkedStore:
        """Make it."""


@pytest.fixture
def make_kv() -> MakeKV:
    """Return the factory of slices."""

    def make(owner_id: str, n_tokens: int = 5, *, state_bytes: int = STATE_BYTES) -> KVSlice:
        size = n_tokens * RECORD_BYTES + state_bytes
        pattern = hashlib.shake_128(owner_id.encode()).digest(size)
        flat = torch.frombuffer(bytearray(pattern or b"x"), dtype=torch.uint8)
        tokens = flat[: n_tokens * RECORD_BYTES].view(n_tokens, RECORD_BYTES)
        return KVSlice(tokens.clone(), flat[n_tokens * RECORD_BYTES : size].clone())

    return make


@pytest.fixture
def make_store() -> Iterator[MakeStore]:
    """Return the factory of stores; afterwards check and close them all."""
    made: list[ParkedStore] = []

    def make(
        capacity_bytes: int = 1 << 16, copier: Copier | None = None, *, chunk_bytes: int = 1000
    ) -> ParkedStore:
        pool = HostPool(capacity_bytes, chunk_bytes=chunk_bytes)
        made.append(ParkedStore(pool, copier or InlineCopier(), poison=True))
        return made[-1]

    yield make
    for store in made:
        store.check_integrity()
        store.close()
        store.check_integrity()
        assert store.pool.used_bytes == 0
        store.pool.close()


@pytest.fixture
def delayed() -> DelayedCopier:
    """Return a copier whose copies happen when the test says so."""
    return DelayedCopier()


@pytest.fixture
def failing() -> Callable[[int], FailingCopier]:
    """Return the factory of copiers that fail after n copies."""
    return FailingCopier


@pytest.fixture
def same() -> Callable[[KVSlice, KVSlice], bool]:
    """Return the comparison of two slices, byte by byte."""
    return lambda left, right: torch.equal(left.tokens, right.tokens) and torch.equal(left.state, right.state)


@pytest.fixture
def cue_folder(tmp_path: Path) -> CueFolder:
    """Return a directory whose calls wait and fail on cue."""
    return CueFolder(tmp_path / "spill")


@pytest.fixture
def later_tier() -> Callable[[int], tuple[SpillTier, MemoryFolder, LaterExecutor]]:
    """Return the factory of tiers in memory, whose jobs run when the test says so."""

    def make(capacity_bytes: int) -> tuple[SpillTier, MemoryFolder, LaterExecutor]:
        folder, executor = MemoryFolder(), LaterExecutor()
        tier: Any = SpillTier(folder, capacity_bytes, piece_bytes=4096)  # type: ignore[arg-type]
        tier._out = tier._in = executor
        return tier, folder, executor

    return make


@pytest.fixture
def spill_store(cue_folder: CueFolder) -> Iterator[Callable[..., ParkedStore]]:
    """Return the factory of stores with a second tier in `cue_folder`; afterwards nothing is left there."""
    made: list[ParkedStore] = []

    def make(
        capacity_bytes: int = 1 << 16,
        *,
        spill_bytes: int = 1 << 24,
        copier: Copier | None = None,
        **tier: Any,
    ) -> ParkedStore:
        files = SpillTier(cue_folder, spill_bytes, **{"piece_bytes": 8192, **tier})
        pool = HostPool(capacity_bytes, chunk_bytes=1000)
        made.append(ParkedStore(pool, copier or InlineCopier(), poison=True, tier=files))
        return made[-1]

    yield make
    cue_folder.gate.set()
    for store in made:
        store.check_integrity()
        store.close()
        store.check_integrity()
        assert store.pool.used_bytes == 0
        assert (store.spill_use.used_bytes, store.spill_use.files) == (0, 0)
        assert not list(cue_folder.path.glob("*")) if cue_folder.path.exists() else True
        store.pool.close()
