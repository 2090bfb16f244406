"""The card's arena on a card, and what it costs there: `pytest -m gpu -s tests/engine/batch/arenas`, by hand.

`test_arenas.py` runs its tests on the card as well.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from batond.daemon.engine.batch.arenas.arena import ArenaShape
from batond.daemon.engine.batch.arenas.card import CardArena
from batond.daemon.engine.batch.arenas.choice import elastic_arena, plain_arena, why_not_elastic
from batond.daemon.engine.batch.arenas.cuda_driver import CudaDriver
from batond.daemon.engine.batch.card_steps import WHOLE_CARD
from batond.daemon.engine.batch.ring import RingBatch
from batond.daemon.engine.model.causal import CausalModel
from batond.daemon.engine.proof.trial import probe_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]

MIB, GIB = 1 << 20, 1 << 30
LLAMA_2_7B = 512 << 10  # Bytes of a token.


@pytest.fixture
def device() -> torch.device:
    torch.zeros(1, device="cuda")  # Makes the context.
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def make_arena(device: torch.device) -> Iterator[Callable[..., CardArena]]:
    made: list[CardArena] = []

    def make(rows: int, capacity: int, **options: Any) -> CardArena:
        made.append(CardArena(ArenaShape(rows, capacity, LLAMA_2_7B), CudaDriver(device), **options))
        return made[-1]

    yield make
    for arena in made:
        arena.check_integrity()
        arena.close()


def free_bytes(device: torch.device) -> int:
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info(device)[0])


def neighbours_free_bytes(device: torch.device) -> int:
    """What another process sees."""
    asks = f"import torch; print(torch.cuda.mem_get_info({device.index})[0])"
    found = subprocess.run([sys.executable, "-c", asks], check=True, capture_output=True, text=True)
    return int(found.stdout)


def test_a_card_can_be_elastic(device: torch.device) -> None:
    assert why_not_elastic(device, kernels=True) == ""


@pytest.mark.usefixtures("whole_card")
def test_memory_comes_and_goes_for_every_process(
    make_arena: Callable[..., CardArena], device: torch.device
) -> None:
    """M5: 64 GiB of addresses take nothing; what is released and trimmed, a neighbour can have."""
    before = free_bytes(device)
    arena = make_arena(32, 4096)
    assert before - free_bytes(device) < 256 * MIB
    idle, seen_idle = free_bytes(device), neighbours_free_bytes(device)
    arena.commit(3, 100, 100 + 4096 // 2)
    arena.tensor[3, 100 : 100 + 2048] = 7
    used = arena.use.committed_bytes
    assert abs(idle - free_bytes(device) - used) < 64 * MIB
    assert abs(seen_idle - neighbours_free_bytes(device) - used) < 128 * MIB
    arena.release(3, [])
    arena.trim()
    assert abs(idle - free_bytes(device)) < 64 * MIB
    assert abs(seen_idle - neighbours_free_bytes(device)) < 128 * MIB


def test_a_captured_step_stays_valid_while_pages_come_and_go(
    make_arena: Callable[..., CardArena], device: torch.device
) -> None:
    arena = make_arena(2, 256)
    part = arena.tensor[1, 10:50].view(torch.int64)
    arena.commit(1, 0, 64)
    part.zero_()
    side = torch.cuda.Stream(device)
    graph = torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        part.add_(1)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        part.add_(1)
    for turn in range(5):
        arena.release(1, [])
        arena.trim()
        arena.commit(0, 0, 200 - turn)  # Takes other memory first.
        arena.commit(1, 10, 50)
        part.fill_(turn)
        for _ in range(3):
            graph.replay()
        assert bool((part == turn + 3).all())
        arena.release(0, [])


@pytest.mark.usefixtures("whole_card")
def test_a_full_card_says_so_and_the_books_stand(
    make_arena: Callable[..., CardArena], device: torch.device
) -> None:
    """M6: more rows than the card holds; the one that does not fit changes nothing."""
    room = free_bytes(device)
    rows = room // (4096 * LLAMA_2_7B) + 2
    arena = make_arena(rows, 4096)

    def fill() -> None:
        for row in range(rows):
            arena.commit(row, 0, 4096)

    with pytest.raises(torch.OutOfMemoryError):
        fill()
    taken, part = divmod(arena.use.committed_bytes, 4096 * LLAMA_2_7B)
    assert 0 < taken < rows
    assert part == 0
    arena.check_integrity()
    arena.release(0, [])
    arena.commit(taken, 0, 4000)
    arena.tensor[taken, :4000] = 3
    torch.cuda.synchronize()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_an_engine_says_the_same_with_memory_that_follows_its_rows(
    family: str, play: Callable[..., Any]
) -> None:
    """R2, M5: parks, resumes and wraps, over captured steps."""
    said = {}
    for arena in ("plain", "elastic"):
        said[arena], engine = play(family, device="cuda", arena=arena, session_bytes=0)
        use = engine.residency.batch.memory
        assert use.elastic == (arena == "elastic"), engine.batch_reason
        assert bool(use.committed_bytes) == (arena == "plain")
    assert said["elastic"] == said["plain"]


@pytest.mark.usefixtures("whole_card")
def test_what_calls_of_the_driver_cost(device: torch.device) -> None:
    """Prints microseconds a call; docs/performance.md says what was expected."""
    driver = CudaDriver(device)
    address = driver.reserve(GIB)
    for mib in (2, 4, 8, 32):
        nbytes, times = mib * MIB, {}
        for _ in range(20):
            handle = timed(times, "create", lambda n=nbytes: driver.create(n))
            timed(times, "map", lambda n=nbytes, h=handle: driver.map(address, n, h))
            timed(times, "access", lambda n=nbytes: driver.set_access(address, n))
            timed(times, "unmap", lambda n=nbytes: driver.unmap(address, n))
            timed(times, "destroy", lambda h=handle: driver.destroy(h))
        costs = ", ".join(f"{name} {statistics.median(all_us):.1f}" for name, all_us in times.items())
        print(f"{mib} MiB, us a call: {costs}")  # noqa: T201 - the figures are what it is for
    driver.unreserve(address, GIB)


def timed(times: dict[str, list[float]], name: str, call: Callable[[], Any]) -> Any:
    began_s = time.perf_counter()
    found = call()
    times.setdefault(name, []).append(1e6 * (time.perf_counter() - began_s))
    return found


@pytest.mark.usefixtures("whole_card")
def test_what_a_step_costs_against_a_plain_arena(device: torch.device) -> None:
    """Issue 7: at most 1 % more; printed, because a shared card's clock is no proof. Llama-2-7B, 8 layers."""
    config = LlamaConfig(num_hidden_layers=8, max_position_embeddings=2048)
    with torch.device(device):
        model = CausalModel(LlamaForCausalLM(config).to(torch.bfloat16).eval(), str(device))
    layout = probe_layout(model)
    rows = 32
    rings = {
        name: RingBatch(model, rows, layout, 1024, card=WHOLE_CARD, new_arena=make)
        for name, make in (("plain", plain_arena), ("elastic", elastic_arena))
    }
    kv = layout.random(300, device, torch.Generator().manual_seed(1))
    for ring in rings.values():
        for row in range(rows):
            ring.embed(row, kv)
    seconds: dict[str, list[float]] = {name: [] for name in rings}
    tokens = {row: [5] for row in range(rows)}
    for turn in range(600):
        for name, ring in rings.items():
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            ring.step(tokens)
            torch.cuda.synchronize()
            if turn > 20:
                seconds[name].append(time.perf_counter() - began_s)
    plain, elastic = (1e3 * statistics.mean(seconds[name]) for name in ("plain", "elastic"))
    found = f"plain {plain:.3f}, elastic {elastic:.3f}, ratio {elastic / plain:.4f}"
    print(f"ms a step: {found}")  # noqa: T201 - the figure is what it is for
    assert elastic < 1.5 * plain
    for ring in rings.values():
        ring.close()
