"""A driver of virtual memory that fails on cue, over plain host memory."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch

from batond.daemon.engine.batch.arenas.arena import ArenaShape
from batond.daemon.engine.batch.arenas.card import CardArena
from batond.daemon.engine.batch.arenas.cuda_driver import CudaDriver
from batond.daemon.engine.batch.arenas.driver import DriverError
from batond.daemon.engine.batch.arenas.host import HostArena
from batond.daemon.engine.batch.arenas.plain import PlainArena

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

POISON = 0xFF  # Of any float a NaN.


class FakeFence:
    """Passed when the test says so, or when somebody waits for it and the card is not held up."""

    def __init__(self, *, passed: bool, held_up: threading.Event) -> None:
        self.passed = threading.Event()
        self.waited = threading.Event()
        self._held_up = held_up
        if passed:
            self.passed.set()

    def done(self) -> bool:
        return self.passed.is_set()

    def wait(self) -> None:
        self.waited.set()
        if self._held_up.is_set():
            self.passed.wait(30)
        self.passed.set()


class FakeDriver:
    """Address space is a mapping of the test's; what has no memory behind it holds poison, and must keep it.

    It is stricter than a card's: whatever a caller has no business to do raises AssertionError.
    """

    granularity = 4096

    def __init__(self, card_bytes: int = 1 << 50, *, poison: bool = True) -> None:
        self.card_bytes, self.poison = card_bytes, poison
        self.calls: Counter[str] = Counter()
        self.memory: dict[int, int] = {}  # Bytes by handle.
        self.mapped: dict[int, tuple[int, int]] = {}  # Bytes and handle by address.
        self.placed: set[int] = set()
        self.accessible: set[int] = set()
        self.reserved: dict[int, Any] = {}
        self.fences: list[FakeFence] = []
        self.busy = False  # New fences are not passed at once.
        self.held_up = threading.Event()  # Nor by waiting.
        self.threads: set[int] = set()
        self._handles = itertools.count(1)
        self._cues: dict[str, dict[int, Exception]] = {}

    def cue(self, name: str, error: Exception, *, after: int = 0, times: int = 1) -> None:
        """Let calls of a method fail, after so many that don't."""
        first = self.calls[name] + after
        self._cues.setdefault(name, {}).update(dict.fromkeys(range(first, first + times), error))

    @property
    def used_bytes(self) -> int:
        return sum(self.memory.values())

    def attach(self) -> None:
        self.threads.add(threading.get_ident())

    def reserve(self, nbytes: int) -> int:
        self._called("reserve")
        space = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
        address = ctypes.addressof(ctypes.c_char.from_buffer(space))
        self.reserved[address] = space
        if self.poison:
            ctypes.memset(address, POISON, nbytes)
        return address

    def unreserve(self, address: int, nbytes: int) -> None:
        self._called("unreserve")
        assert nbytes == len(self.reserved[address])
        assert not any(address <= mapped < address + nbytes for mapped in self.mapped)
        del self.reserved[address]

    def create(self, nbytes: int) -> int:
        self._called("create")
        assert nbytes % self.granularity == 0
        if self.used_bytes + nbytes > self.card_bytes:
            raise torch.OutOfMemoryError("the card is full")
        handle = next(self._handles)
        self.memory[handle] = nbytes
        return handle

    def destroy(self, handle: int) -> None:
        self._called("destroy")
        assert handle not in self.placed
        del self.memory[handle]

    def map(self, address: int, nbytes: int, handle: int) -> None:
        self._called("map")
        assert address not in self.mapped
        assert handle not in self.placed
        assert self.memory[handle] == nbytes
        self.mapped[address] = (nbytes, handle)
        self.placed.add(handle)

    def set_access(self, address: int, nbytes: int) -> None:
        self._called("set_access")
        end = address + nbytes
        while address < end:  # Several pieces, side by side.
            piece_bytes = self.mapped[address][0]
            if self.poison and address not in self.accessible:  # What its last owner left.
                ctypes.memset(address, POISON, piece_bytes)
            self.accessible.add(address)
            address += piece_bytes
        assert address == end

    def unmap(self, address: int, nbytes: int) -> None:
        self._called("unmap")
        mapped_bytes, handle = self.mapped.pop(address)
        assert mapped_bytes == nbytes
        self.placed.remove(handle)
        self.accessible.discard(address)
        if self.poison:
            ctypes.memset(address, POISON, nbytes)

    def fence(self) -> FakeFence:
        self._called("fence")
        self.fences.append(FakeFence(passed=not self.busy, held_up=self.held_up))
        return self.fences[-1]

    def finish(self) -> None:
        """Let the card do all its work."""
        for fence in self.fences:
            fence.passed.set()

    def tensor(self, address: int, size: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
        self._called("tensor")
        assert address in self.accessible  # Torch asks the driver whose it is.
        return torch.frombuffer(self.reserved[address], dtype=torch.uint8).as_strided(size, strides)

    def stray_bytes(self) -> int:
        """How many bytes without memory behind them were written."""
        (start, space), *_ = self.reserved.items()
        raw = torch.frombuffer(space, dtype=torch.uint8) != POISON
        for address, (nbytes, _) in self.mapped.items():
            raw[address - start : address - start + nbytes] = False
        return int(raw.sum())

    def _called(self, name: str) -> None:
        error = self._cues.get(name, {}).get(self.calls[name])
        self.calls[name] += 1
        if error is not None:
            raise error


REFUSED = DriverError("no")
FULL = torch.OutOfMemoryError("full")
SHAPE = ArenaShape(rows=3, capacity=100, record_bytes=384)


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def fake_driver() -> type[FakeDriver]:
    return FakeDriver


@pytest.fixture
def make_card_arena(driver: FakeDriver) -> Iterator[Callable[..., CardArena]]:
    """Card arenas on the fake driver, without a thread if not asked for."""
    made: list[CardArena] = []

    def make(shape: ArenaShape = SHAPE, on: FakeDriver = driver, **options: Any) -> CardArena:
        made.append(CardArena(shape, on, **{"background": False, **options}))
        return made[-1]

    yield make
    for arena in made:
        arena.check_integrity()
        arena.close()


_CARD = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")],
)


@pytest.fixture(params=["plain", "host", "card", _CARD])
def arena(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Every arena; that of a card on the fake driver, and on a card."""
    made: Any
    if request.param == "plain":
        made = PlainArena(SHAPE, torch.device("cpu"))
    elif request.param == "host":
        made = HostArena(SHAPE)
    elif request.param == "card":
        made = CardArena(SHAPE, FakeDriver(), background=False)
    else:
        made = CardArena(SHAPE, CudaDriver(torch.device("cuda", torch.cuda.current_device())))
    yield made
    made.check_integrity()
    made.close()
