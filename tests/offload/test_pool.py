"""The host pool: exact sizes, extents over chunk borders, warm-up and page locks."""

from __future__ import annotations

import gc
import random
import threading

import pytest
import torch

from batond.offload.errors import HostPoolFullError, OffloadStateError, ReservationError
from batond.offload.extents import Extent, ExtentAllocator
from batond.offload.pool import HostPool, Reservation


class FakePinner:
    """Records page locks; refuses after `fail_after` of them; can be held back."""

    def __init__(self, fail_after: int = 1 << 30) -> None:
        self.locked: dict[int, int] = {}
        self.calls: list[int] = []
        self.closed = False
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self._left = fail_after

    def pin(self, address: int, nbytes: int) -> None:
        """Lock."""
        self.entered.set()
        assert self.gate.wait(30)
        self.calls.append(nbytes)
        if not self._left:
            raise RuntimeError("no more locks")
        self._left -= 1
        self.locked[address] = nbytes

    def unpin(self, address: int) -> None:
        """Unlock."""
        del self.locked[address]

    def close(self) -> None:
        """Note the end."""
        self.closed = True


def fill(reservation: Reservation, value: int) -> None:
    for view in reservation.views():
        view.fill_(value)


def content(reservation: Reservation) -> list[int]:
    return torch.cat(reservation.views()).tolist()


@pytest.mark.parametrize("capacity", [1, 999, 1000, 1001, 3 * 1000 + 17, (1 << 12) + 1])
def test_a_pool_holds_exactly_the_bytes_configured(capacity: int) -> None:
    """M2."""
    pool = HostPool(capacity, chunk_bytes=1000)
    held = pool.reserve(capacity)
    assert sum(view.numel() for view in held.views()) == capacity
    assert (pool.used_bytes, pool.free_bytes, pool.allocated_bytes) == (capacity, 0, capacity)
    with pytest.raises(HostPoolFullError):
        pool.reserve(1)
    pool.check_integrity()
    pool.release(held)
    with pytest.raises(HostPoolFullError) as caught:
        pool.reserve(capacity + 1)
    assert caught.value.details["free_bytes"] == str(capacity)
    assert pool.used_bytes == 0
    pool.close()


def test_a_pool_of_nothing_is_legal() -> None:
    pool = HostPool(0, pin=True, pinner=FakePinner())
    pool.warm_up().join(30)
    held = pool.reserve(0)
    assert held.views() == []
    with pytest.raises(HostPoolFullError):
        pool.reserve(1)
    pool.release(held)
    pool.check_integrity()
    pool.close()


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        HostPool(-1)
    with pytest.raises(ValueError, match="0"):
        HostPool(1, chunk_bytes=0)
    with pytest.raises(ValueError, match="-3"):
        HostPool(1).reserve(-3)


def test_memory_is_made_chunk_by_chunk_when_needed() -> None:
    pool = HostPool(3500, chunk_bytes=1000)
    assert pool.allocated_bytes == 0
    first = pool.reserve(10)
    assert pool.allocated_bytes == 1000
    second = pool.reserve(2000)
    assert pool.allocated_bytes == 3000
    pool.release(first)
    pool.release(second)
    pool.close()
    assert pool.allocated_bytes == 0


def test_fragmentation_never_refuses_what_fits_by_bytes() -> None:
    pool = HostPool(1000, chunk_bytes=130)
    held = [pool.reserve(100) for _ in range(10)]
    for number, reservation in enumerate(held):
        fill(reservation, number)
    for reservation in held[::2]:
        pool.release(reservation)
    spread = pool.reserve(500)
    assert len(spread.extents) == 5
    fill(spread, 77)
    assert content(spread) == [77] * 500
    for number in range(1, 10, 2):
        assert content(held[number]) == [number] * 100
    pool.check_integrity()
    assert pool.free_bytes == 0


def test_released_neighbours_become_one_range_again() -> None:
    pool = HostPool(300, chunk_bytes=100)
    held = [pool.reserve(100) for _ in range(3)]
    for at in (0, 2, 1):
        pool.release(held[at])
        pool.check_integrity()
    assert pool.reserve(300).extents == (Extent(0, 300),)


def test_the_first_range_that_holds_it_whole_is_taken() -> None:
    pool = HostPool(400)
    held = [pool.reserve(size) for size in (50, 100, 100, 150)]
    pool.release(held[0])
    pool.release(held[2])
    assert pool.reserve(80).extents == (Extent(150, 80),)


def test_double_release_changes_nothing() -> None:
    pool, other = HostPool(100), HostPool(100)
    held = pool.reserve(60)
    with pytest.raises(ReservationError):
        other.release(held)
    pool.release(held)
    again = pool.reserve(60)
    with pytest.raises(ReservationError, match="released already"):
        pool.release(held)
    with pytest.raises(ReservationError):
        held.views()
    assert pool.used_bytes == 60
    pool.check_integrity()
    pool.release(again)


def test_close_refuses_while_bytes_are_held() -> None:
    pool = HostPool(100)
    held = pool.reserve(60)
    with pytest.raises(OffloadStateError, match="60 bytes"):
        pool.close()
    pool.release(held)
    pool.close()
    pool.close()
    with pytest.raises(OffloadStateError):
        pool.reserve(1)
    with pytest.raises(OffloadStateError):
        pool.warm_up()


def test_warm_up_keeps_what_was_written_before() -> None:
    pool = HostPool(5000, chunk_bytes=1000)
    held = pool.reserve(1500)
    fill(held, 9)
    pool.warm_up().join(30)
    assert pool.allocated_bytes == 5000
    assert content(held) == [9] * 1500
    assert pool.warm_up() is pool.warm_up()


def test_chunks_are_locked_one_by_one_and_unlocked_at_close() -> None:
    """M3, the part that needs no card: no lock call is larger than a chunk."""
    pinner = FakePinner()
    pool = HostPool(3500, chunk_bytes=1000, pin=True, pinner=pinner)
    held = pool.reserve(1500)
    assert pool.pinned_bytes == 2000
    pool.warm_up().join(30)
    assert pinner.calls == [1000, 1000, 1000, 500]
    assert pool.pinned_bytes == 3500
    assert held.views()[0].data_ptr() in pinner.locked
    pool.release(held)
    pool.close()
    assert (pinner.locked, pinner.closed, pool.pinned_bytes) == ({}, True, 0)


def test_a_pool_that_is_dropped_unlocks_its_memory() -> None:
    pinner = FakePinner()
    pool = HostPool(2000, chunk_bytes=1000, pin=True, pinner=pinner)
    pool.warm_up().join(30)
    assert len(pinner.locked) == 2
    del pool
    gc.collect()
    assert (pinner.locked, pinner.closed) == ({}, True)


def test_a_refused_lock_leaves_a_working_pool(caplog: pytest.LogCaptureFixture) -> None:
    """M4."""
    pinner = FakePinner(fail_after=1)
    pool = HostPool(3000, chunk_bytes=1000, pin=True, pinner=pinner)
    held = pool.reserve(3000)
    fill(held, 5)
    assert content(held) == [5] * 3000
    assert pool.pinned_bytes == 1000
    assert pool.pin_error == "no more locks"
    assert caplog.text.count("page-locked") == 1
    pool.release(held)
    pool.close()
    assert pinner.locked == {}


def test_warm_up_holds_up_only_who_needs_the_same_chunk() -> None:
    """M3, the part that needs no card: accounting goes on while a lock call runs."""
    pinner = FakePinner()
    pool = HostPool(3000, chunk_bytes=1000, pin=True, pinner=pinner)
    held = pool.reserve(500)
    pinner.entered.clear()
    pinner.gate.clear()
    warmer = pool.warm_up()
    assert pinner.entered.wait(30)
    more = pool.reserve(200)
    assert pool.used_bytes == 700
    pool.release(more)
    pool.check_integrity()
    assert pinner.calls == [1000], "the second lock call is still under way"
    pinner.gate.set()
    warmer.join(30)
    assert (pinner.calls, pool.pin_error) == ([1000] * 3, None)
    pool.release(held)
    pool.close()


def test_close_stops_the_warm_up() -> None:
    pinner = FakePinner()
    pool = HostPool(100_000, chunk_bytes=1000, pin=True, pinner=pinner)
    pinner.gate.clear()
    warmer = pool.warm_up()
    assert pinner.entered.wait(30)
    closer = threading.Thread(target=pool.close)
    closer.start()
    assert pool._closing.wait(30)
    pinner.gate.set()
    closer.join(30)
    assert not closer.is_alive()
    assert not warmer.is_alive()
    assert len(pinner.calls) == 1
    assert pinner.locked == {}


def test_no_memory_for_a_chunk_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    pool = HostPool(3000, chunk_bytes=1000)
    held = pool.reserve(500)
    monkeypatch.setattr("batond.offload.pool.mmap.mmap", refuse)
    with pytest.raises(MemoryError):
        pool.reserve(1500)
    assert pool.used_bytes == 500
    pool.check_integrity()
    pool.warm_up().join(30)
    assert pool.allocated_bytes == 1000
    pool.release(held)


def test_threads_share_a_pool() -> None:
    pool = HostPool(1 << 16, chunk_bytes=1000)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        held: list[Reservation] = []
        try:
            for _ in range(300):
                if held and chance.random() < 0.5:
                    reservation = held.pop(chance.randrange(len(held)))
                    assert set(content(reservation)) <= {seed}
                    pool.release(reservation)
                else:
                    held.append(pool.reserve(chance.randrange(1, 1500)))
                    fill(held[-1], seed)
                pool.check_integrity()
            for reservation in held:
                pool.release(reservation)
        except HostPoolFullError:
            for reservation in held:
                pool.release(reservation)
        except BaseException as error:  # noqa: BLE001 - reported by the main thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert pool.used_bytes == 0
    pool.check_integrity()


def test_integrity_finds_what_is_wrong() -> None:
    allocator = ExtentAllocator(100)
    allocator.take(30)
    allocator.check_integrity([Extent(0, 30)])
    with pytest.raises(AssertionError, match="gap"):
        allocator.check_integrity([Extent(0, 20)])
    with pytest.raises(AssertionError, match="overlaps"):
        allocator.check_integrity([Extent(0, 30), Extent(10, 5)])
    allocator.free_bytes += 1
    with pytest.raises(AssertionError, match="free_bytes"):
        allocator.check_integrity([Extent(0, 30)])


def test_the_head_of_a_reservation_is_read_while_the_whole_is_held() -> None:
    pool = HostPool(100, chunk_bytes=30)
    hole, _kept = pool.reserve(10), pool.reserve(10)
    pool.release(hole)
    whole = pool.reserve(90)
    head = whole.head(35)
    assert head.nbytes == sum(view.numel() for view in head.views()) == 35
    starts = [(view.data_ptr(), view.numel()) for view in whole.views()]
    assert [view.data_ptr() for view in head.views()] == [start for start, _ in starts[: len(head.views())]]
    assert (head.head(5).nbytes, whole.head(0).views()) == (5, [])
    for nbytes in (-1, 91):
        with pytest.raises(ValueError, match="has no first"):
            whole.head(nbytes)
    with pytest.raises(ReservationError):
        pool.release(head)
    pool.release(whole)
    with pytest.raises(ReservationError):
        head.views()
    pool.check_integrity()
