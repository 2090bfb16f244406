"""A decode step of the engine's batch against its floor, and the step's attention alone."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from batond.bench.gpu.timing import Spread, Stopwatch, repeat, settle
from batond.bench.gpu.witness import Seen, watch
from batond.daemon.engine.batch.ring_rule import Ring, Rule

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.bench.gpu.ceilings import Ceilings
    from batond.bench.gpu.sizes import Cell, Sizes
    from batond.daemon.engine.batch.protocol import Batch
    from batond.daemon.engine.model.layout import RecordLayout, Slot

    #: Makes an empty decode batch as the engine has it, of so many rows and columns.
    NewBatch = Callable[[int, int], Batch]

#: The first step may capture and compile; the next ones settle clocks and allocator.
WARM_STEPS: Final = 5
#: Columns that a row needs beyond its context for the steps that are made, beside the timed ones.
_SPARE_COLUMNS: Final = 16
_TOKEN: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """Steps of one cell.

    Attributes:
        rows: Rows, all occupied.
        context: Tokens of each, on average over the timed steps, the new one included.
        step_ms: From the first to the last of the device's work for a step.
        floor_ms: Weights and KV at the copy bandwidth.
        ready_s: Of making the batch and its very first step, with whatever they capture and compile.
        seen: What ran, in the profiler's eyes.
    """

    rows: int
    context: float
    step_ms: Spread
    floor_ms: float
    ready_s: float
    seen: Seen | None

    @property
    def of_floor(self) -> float:
        """Part of the floor that is reached."""
        return self.floor_ms / self.step_ms.median


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Decode attention of all layers, without the rest of the model.

    Attributes:
        rows: Rows, all occupied.
        context: Tokens of each.
        time_ms: All layers, in one captured graph.
        kv_bytes: Read.
        gb_s: Those by the median time.
        of_copy: The same by the copy bandwidth.
    """

    rows: int
    context: int
    time_ms: Spread
    kv_bytes: int
    gb_s: float
    of_copy: float


def spare_columns(rounds: int) -> int:
    """Columns of a cell's ring beyond its context."""
    return rounds + _SPARE_COLUMNS


def measure_step(
    new_batch: NewBatch, cell: Cell, sizes: Sizes, ceilings: Ceilings, *, rounds: int
) -> DecodeStep:
    """Fill a batch of the engine with made-up KV and decode.

    Args:
        new_batch: Makes the batch.
        cell: Rows and tokens of each, which the middle one of the timed steps has.
        sizes: Of the model.
        ceilings: Of the device.
        rounds: Steps timed.
    """
    began_s = time.perf_counter()
    batch = new_batch(cell.rows, cell.context + spare_columns(rounds))
    ready_s = time.perf_counter() - began_s
    first_tokens = max(1, cell.context - rounds // 2 - WARM_STEPS)
    fill(batch, range(cell.rows), first_tokens)
    tokens = {row: [_TOKEN] for row in range(cell.rows)}
    began_s = time.perf_counter()
    batch.step(tokens)
    settle(batch.device)
    ready_s += time.perf_counter() - began_s
    for _ in range(WARM_STEPS - 1):
        batch.step(tokens)
    stopwatch, cached = Stopwatch(batch.device), 0
    for _ in range(rounds):
        with stopwatch.lap():
            batch.step(tokens)
        cached += sum(batch.lengths)
    step_ms = Spread.of(stopwatch.take(), 1e3)
    return DecodeStep(
        rows=cell.rows,
        context=cached / rounds / cell.rows,
        step_ms=step_ms,
        floor_ms=1e3 * ceilings.step_floor_s(sizes, cached / rounds),
        ready_s=ready_s,
        seen=watch(batch.device, lambda: batch.step(tokens)),
    )


def fill(batch: Batch, rows: range, tokens: int) -> None:
    """Occupy rows with made-up KV, which costs what real one costs to read."""
    noise = torch.Generator(batch.device).manual_seed(1)
    kv = batch.layout.random(tokens, batch.device, noise)
    for row in rows:
        batch.embed(row, kv)


def measure_attention(
    layout: RecordLayout, heads: int, cell: Cell, ceilings: Ceilings, device: torch.device, *, rounds: int
) -> Attention:
    """Time the card's attention kernel over every layer of a full ring, as a graph: no launch is waited for.

    Args:
        layout: Of the records.
        heads: Query heads.
        cell: Rows and tokens.
        ceilings: Of the device.
        device: A card.
        rounds: Turns.

    Raises:
        ImportError: Triton is missing.
    """
    from batond.daemon.engine.batch.ranged_decode import decode_attention  # noqa: PLC0415 - needs Triton

    capacity = cell.context + spare_columns(rounds)
    storage = torch.empty(cell.rows, capacity, layout.record_bytes, dtype=torch.uint8, device=device)
    noise = torch.Generator(device).manual_seed(1)
    storage[:, : cell.context] = layout.random(cell.context, device, noise).tokens
    lengths = torch.full((cell.rows,), cell.context, dtype=torch.int32, device=device)
    cursor = torch.tensor([cell.context - 1], dtype=torch.int32, device=device)
    slots = layout.token_slots
    rings = [
        Ring(_view(storage, key), _view(storage, value), lengths, cursor, capacity)
        for key, value in zip(slots[::2], slots[1::2], strict=True)
    ]
    dim = rings[0].key.shape[3]
    query = torch.randn(cell.rows, heads, dim, device=device).to(rings[0].key.dtype)
    rule = Rule(scale=dim**-0.5)

    def attend() -> None:
        for ring in rings:
            decode_attention(query, ring, rule)

    replay = _captured(attend)
    time_ms = Spread.of(repeat(device, replay, rounds=rounds, warm_up=WARM_STEPS), 1e3)
    kv_bytes = cell.rows * cell.context * sum(slot.nbytes for slot in slots)
    gb_s = kv_bytes / time_ms.median / 1e6
    return Attention(
        rows=cell.rows,
        context=cell.context,
        time_ms=time_ms,
        kv_bytes=kv_bytes,
        gb_s=gb_s,
        of_copy=gb_s / ceilings.copy_gb_s.median,
    )


def _view(storage: torch.Tensor, slot: Slot) -> torch.Tensor:
    """One slot of all records, shape [rows, columns, heads, dim]; no copy."""
    numbers = storage[:, :, slot.offset : slot.offset + slot.nbytes].view(slot.dtype)
    return numbers.view(*storage.shape[:2], *slot.shape)


def _captured(work: Callable[[], None]) -> Callable[[], None]:
    """The same work as one graph."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()  # Compiles.
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay
