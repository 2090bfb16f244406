"""Real copies beside real kernels, and real page locks. Run by hand: `pytest -m gpu tests/offload`."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from batond.offload.copies import StreamCopier, copier_for
from batond.offload.errors import CopyFailedError, SliceCorruptError
from batond.offload.pinning import CudaPinner
from batond.offload.pool import HostPool
from batond.offload.slice import KVSlice
from batond.offload.store import ParkedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]

MIB = 1 << 20
RECORD_BYTES = 4096
SPIN_CYCLES = 200_000_000  # About 0.1 s of a busy stream.


@pytest.fixture
def cuda_store() -> Iterator[Callable[..., ParkedStore]]:
    """Return the factory of stores over page-locked pools."""
    made: list[ParkedStore] = []

    def make(capacity_bytes: int = 256 * MIB, chunk_bytes: int = 8 * MIB + 4096) -> ParkedStore:
        pool = HostPool(capacity_bytes, chunk_bytes=chunk_bytes, pin=True)
        made.append(ParkedStore(pool, copier_for("cuda"), poison=True))
        return made[-1]

    yield make
    for store in made:
        store.close()
        store.check_integrity()
        store.pool.close()
    torch.cuda.synchronize()


def cuda_kv(seed: int, n_tokens: int) -> KVSlice:
    generator = torch.Generator("cuda").manual_seed(seed)
    size = n_tokens * RECORD_BYTES + 1000
    flat = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda", generator=generator)
    return KVSlice(
        flat[: n_tokens * RECORD_BYTES].view(n_tokens, RECORD_BYTES), flat[n_tokens * RECORD_BYTES :]
    )


def equal(left: KVSlice, right: KVSlice) -> bool:
    return torch.equal(left.tokens, right.tokens) and torch.equal(left.state, right.state)


def park(store: ParkedStore, owner: str, kv: KVSlice) -> None:
    store.finish_store(store.begin_store(owner, kv, "layout"))


def test_memory_is_page_locked_as_cuda_sees_it(cuda_store: Any) -> None:
    store = cuda_store(64 * MIB + 17, 16 * MIB)
    store.pool.warm_up().join(60)
    assert store.pool.pin_error is None
    assert store.pool.pinned_bytes == 64 * MIB + 17
    held = store.pool.reserve(store.pool.capacity_bytes)
    assert all(view.is_pinned() for view in held.views())
    store.pool.release(held)


def test_unlocked_memory_can_be_locked_again(cuda_store: Any) -> None:
    for _ in range(3):
        pool = HostPool(32 * MIB, chunk_bytes=8 * MIB, pin=True)
        pool.warm_up().join(60)
        assert (pool.pin_error, pool.pinned_bytes) == (None, 32 * MIB)
        pool.close()


def test_a_refused_lock_stays_out_of_later_launches() -> None:
    pinner = CudaPinner()
    with pytest.raises(RuntimeError):
        pinner.pin(0, 4096)
    assert torch.ones(8, device="cuda").sum().item() == 8
    torch.cuda.synchronize()
    pinner.close()


def test_shuffled_parks_of_large_slices(cuda_store: Any) -> None:
    """R4."""
    chance = random.Random(4)
    store = cuda_store()
    parked: dict[str, int] = {}
    for number in range(200):
        if len(parked) > 8 or (parked and chance.random() < 0.4):
            owner = chance.choice(list(parked))
            back = store.finish_load(store.begin_load(owner, "cuda"))
            assert equal(back, cuda_kv(int(owner), parked.pop(owner)))
            store.discard(owner)
        else:
            parked[str(number)] = chance.randrange(1, 4000)
            park(store, str(number), cuda_kv(number, parked[str(number)]))
        store.check_integrity()


def test_a_store_waits_for_the_kernels_that_produce_its_source(cuda_store: Any) -> None:
    """R5."""
    store = cuda_store()
    want = cuda_kv(1, 1000)
    source = KVSlice(torch.zeros_like(want.tokens), torch.zeros_like(want.state))
    torch.cuda._sleep(SPIN_CYCLES)
    source.tokens.copy_(want.tokens)
    source.state.copy_(want.state)
    ticket = store.begin_store("a", source, "layout")
    assert not ticket.done
    store.finish_store(ticket)
    assert equal(store.finish_load(store.begin_load("a", "cuda")), want)


def test_a_store_from_a_side_stream(cuda_store: Any) -> None:
    """R5."""
    store = cuda_store()
    want = cuda_kv(1, 1000)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        torch.cuda._sleep(SPIN_CYCLES)
        source = KVSlice(want.tokens.clone(), want.state.clone())
        ticket = store.begin_store("a", source, "layout")
    store.finish_store(ticket)
    assert equal(store.finish_load(store.begin_load("a", "cuda")), want)


def test_a_load_spares_memory_that_earlier_kernels_still_read(cuda_store: Any) -> None:
    """R5: the target is a block that was freed while a queued kernel has yet to read it."""
    store = cuda_store()
    park(store, "a", cuda_kv(1, 2000))
    torch.cuda.empty_cache()
    before = torch.full((2000, RECORD_BYTES), 7, dtype=torch.uint8, device="cuda")
    address = before.data_ptr()
    torch.cuda.synchronize()
    torch.cuda._sleep(SPIN_CYCLES)
    total = before.sum(dtype=torch.int64)
    del before
    ticket = store.begin_load("a", "cuda")
    assert ticket.kv.tokens.data_ptr() == address, "the test needs the block to be used again"
    back = store.finish_load(ticket)
    assert int(total) == 7 * 2000 * RECORD_BYTES
    assert equal(back, cuda_kv(1, 2000))


def test_sources_dropped_in_flight_stay_whole(cuda_store: Any) -> None:
    """R5: the caller forgets the slice while its copy waits behind a busy stream."""
    store = cuda_store()
    tickets = []
    for number in range(8):
        kv = cuda_kv(number, 500)
        torch.cuda._sleep(SPIN_CYCLES // 8)
        tickets.append(store.begin_store(str(number), kv, "layout"))
        del kv
        torch.full((500 * RECORD_BYTES + 1000,), 9, dtype=torch.uint8, device="cuda")
    for ticket in tickets:
        store.finish_store(ticket)
    for number in range(8):
        assert equal(store.finish_load(store.begin_load(str(number), "cuda")), cuda_kv(number, 500))


def test_cancel_while_a_copy_is_in_flight(cuda_store: Any) -> None:
    """C3."""
    store = cuda_store(32 * MIB)
    for number in range(500):
        kv = cuda_kv(number, 300)
        if number % 50 == 0:
            torch.cuda._sleep(SPIN_CYCLES // 20)
        if number % 2:
            park(store, "a", kv)
            ticket = store.begin_load("a", "cuda")
        else:
            ticket = store.begin_store("a", kv, "layout")
        assert store.forget("a")
        assert store.pool.used_bytes in {0, store.retiring_bytes}
        ticket.transfer.wait()
        store.collect()
        assert store.pool.used_bytes == 0
    assert store.stats.late_completions > 0
    park(store, "a", cuda_kv(77, 300))
    assert equal(store.finish_load(store.begin_load("a", "cuda")), cuda_kv(77, 300))


def test_a_flipped_bit_is_found(cuda_store: Any) -> None:
    """R6."""
    store = cuda_store()
    park(store, "a", cuda_kv(1, 5000))
    store._entries["a"].reservation.views()[1][1234] ^= 16
    with pytest.raises(SliceCorruptError):
        store.finish_load(store.begin_load("a", "cuda"))


def test_a_slice_on_another_device_is_refused(cuda_store: Any) -> None:
    store = cuda_store()
    kv = cuda_kv(1, 3)
    with pytest.raises(CopyFailedError, match="cpu"):
        store.begin_store("a", KVSlice(kv.tokens.cpu(), kv.state.cpu()), "layout")
    assert store.pool.used_bytes == 0
    with pytest.raises(ValueError, match="cpu"):
        StreamCopier("cpu")


def test_copies_run_beside_kernels(cuda_store: Any) -> None:
    """The call returns while stream and copy are busy; both directions reach page-locked speed."""
    store = cuda_store(600 * MIB, 64 * MIB)
    store.pool.warm_up().join(60)
    kv = KVSlice(
        torch.ones((128 * 1024, RECORD_BYTES), dtype=torch.uint8, device="cuda"),
        torch.empty(0, dtype=torch.uint8, device="cuda"),
    )
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    ticket = store.begin_store("a", kv, "layout")
    assert not ticket.done
    ticket.transfer.wait()
    out_s = time.perf_counter() - began_s
    store.finish_store(ticket)
    began_s = time.perf_counter()
    incoming = store.begin_load("a", "cuda")
    incoming.transfer.wait()
    in_s = time.perf_counter() - began_s
    store.finish_load(incoming)
    size = kv.nbytes
    print(f"out {size / out_s / 1e9:.1f} GB/s, in {size / in_s / 1e9:.1f} GB/s")  # noqa: T201 - for the record
    assert size / out_s > 5e9, "slower than page-locked memory on any bus of this decade"


#: Prints the longest NVML call in seconds, made between its start and the end of its input.
POLL_NVML = """
import sys, threading, time, pynvml
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
print("polling", flush=True)
longest_s = 0.0
while not ended.is_set():
    began_s = time.perf_counter()
    pynvml.nvmlDeviceGetMemoryInfo(handle)
    longest_s = max(longest_s, time.perf_counter() - began_s)
print(longest_s)
"""


def test_locking_a_big_pool_leaves_others_their_nvml() -> None:
    """M3: the longest NVML call of another process while 8 GiB are being locked stays under a second."""
    pytest.importorskip("pynvml")
    pool = HostPool(8 << 30, pin=True)
    command = [sys.executable, "-c", POLL_NVML]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as poller:
        assert poller.stdout is not None
        assert poller.stdout.readline() == "polling\n"
        pool.warm_up().join(120)
        output, _ = poller.communicate(timeout=60)
    longest_s = float(output)
    print(f"longest NVML call {longest_s * 1e3:.1f} ms")  # noqa: T201 - for the record
    assert pool.pinned_bytes == 8 << 30
    assert longest_s < 1
    pool.close()
