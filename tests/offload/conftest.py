"""Factories of slices and stores, and copiers that wait and fail on cue."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Protocol

import pytest
import torch

from batond.offload.copies import InlineCopier
from batond.offload.pool import HostPool
from batond.offload.slice import KVSlice
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
