"""Copies of a parked row: how fast against page-locked memory, and what a decode step loses beside them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from batond.bench.gpu.decode import WARM_STEPS, fill, spare_columns
from batond.bench.gpu.timing import Spread, Stopwatch, settle
from batond.offload.copies import copier_for
from batond.offload.pool import HostPool
from batond.offload.store import ParkedStore

if TYPE_CHECKING:
    from batond.bench.gpu.ceilings import Ceilings
    from batond.bench.gpu.decode import NewBatch
    from batond.daemon.engine.batch.protocol import Batch
    from batond.offload.slice import KVSlice

PARKED_TOKENS: Final = 1024
_SLICES: Final = 2  # One on its way out and one on its way in.
_WARM_UP: Final = 2
_TOKEN: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class OneWay:
    """Copies in one direction.

    Attributes:
        time_ms: From the call to the last byte.
        gb_s: Bytes by the median time.
        of_copy: The same by the rate of a plain page-locked copy.
        finish_ms: The host's work behind the copy: checksum and books.
    """

    time_ms: Spread
    gb_s: float
    of_copy: float
    finish_ms: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Parking:
    """One row's slice on its way out and back.

    Attributes:
        tokens: Of the slice.
        nbytes: Of the slice.
        out: Device to host.
        back: Host to device.
        extract_ms: Of making the slice of the row, on the device.
        embed_ms: Of writing it into a row, on the device.
        rows: Of the batch that decodes.
        step_ms: Its step alone.
        beside_ms: Its step with copies under way in both directions.
    """

    tokens: int
    nbytes: int
    out: OneWay
    back: OneWay
    extract_ms: Spread
    embed_ms: Spread
    rows: int
    step_ms: Spread
    beside_ms: Spread

    @property
    def slowdown(self) -> float:
        """Part by which a step is longer beside copies."""
        return self.beside_ms.median / self.step_ms.median - 1


def measure(new_batch: NewBatch, rows: int, tokens: int, ceilings: Ceilings, *, rounds: int) -> Parking:
    """Measure copies through the engine's own store and pool.

    Args:
        new_batch: Makes the engine's batch.
        rows: Of the batch.
        tokens: Of each row.
        ceilings: Of the device.
        rounds: Parks timed.
    """
    batch = new_batch(rows, tokens + spare_columns(2 * rounds))
    fill(batch, range(rows), tokens)
    extract_ms, embed_ms = _on_device(batch, rounds)
    kv = batch.extract(0)
    pool = HostPool(_SLICES * kv.nbytes, pin=batch.device.type == "cuda")
    pool.warm_up().join()
    store = ParkedStore(pool, copier_for(batch.device))
    try:
        out, back = _copies(store, kv, batch.layout.digest, ceilings, rounds)
        step_ms, beside_ms = _steps(batch, store, kv, rounds)
    finally:
        store.close()
        pool.close()
    return Parking(
        tokens=tokens,
        nbytes=kv.nbytes,
        out=out,
        back=back,
        extract_ms=extract_ms,
        embed_ms=embed_ms,
        rows=rows,
        step_ms=step_ms,
        beside_ms=beside_ms,
    )


def _on_device(batch: Batch, rounds: int) -> tuple[Spread, Spread]:
    """Times of taking a row out and of writing it back."""
    out, back = Stopwatch(batch.device), Stopwatch(batch.device)
    for _ in range(_WARM_UP + rounds):
        with out.lap():
            kv = batch.extract(0)
        batch.free(0)
        with back.lap():
            batch.embed(0, kv)
    return Spread.of(out.take()[_WARM_UP:], 1e3), Spread.of(back.take()[_WARM_UP:], 1e3)


def _copies(
    store: ParkedStore, kv: KVSlice, digest: str, ceilings: Ceilings, rounds: int
) -> tuple[OneWay, OneWay]:
    """Park and resume one slice again and again; nothing else runs."""
    times: tuple[list[float], ...] = ([], [], [], [])
    for _ in range(_WARM_UP + rounds):
        settle(kv.tokens.device)
        marks = [time.perf_counter()]
        ticket = store.begin_store("row", kv, digest)
        ticket.transfer.wait()
        marks.append(time.perf_counter())
        store.finish_store(ticket)
        marks.append(time.perf_counter())
        incoming = store.begin_load("row", kv.tokens.device, layout_hash=digest)
        incoming.transfer.wait()
        marks.append(time.perf_counter())
        store.finish_load(incoming)
        marks.append(time.perf_counter())
        store.discard("row")
        for place, kept in enumerate(times):
            kept.append(marks[place + 1] - marks[place])
    out, stored, back, loaded = (kept[_WARM_UP:] for kept in times)

    def one_way(seconds: list[float], behind: list[float], ceiling: Spread) -> OneWay:
        time_ms = Spread.of(seconds, 1e3)
        gb_s = kv.nbytes / time_ms.median / 1e6
        return OneWay(
            time_ms=time_ms, gb_s=gb_s, of_copy=gb_s / ceiling.median, finish_ms=Spread.of(behind, 1e3)
        )

    return one_way(out, stored, ceilings.to_host_gb_s), one_way(back, loaded, ceilings.to_device_gb_s)


def _steps(batch: Batch, store: ParkedStore, kv: KVSlice, rounds: int) -> tuple[Spread, Spread]:
    """Steps alone and beside copies in both directions, in turn."""
    digest = batch.layout.digest
    tokens = {row: [_TOKEN] for row in range(batch.rows)}
    store.finish_store(store.begin_store("parked", kv, digest))
    alone, beside = Stopwatch(batch.device), Stopwatch(batch.device)

    def step(stopwatch: Stopwatch) -> None:
        with stopwatch.lap():
            batch.step(tokens)

    for _ in range(WARM_STEPS):
        batch.step(tokens)
    for _ in range(rounds):
        settle(batch.device)
        step(alone)
        settle(batch.device)
        outgoing = store.begin_store("leaving", kv, digest)
        incoming = store.begin_load("parked", batch.device)
        step(beside)
        for ticket in (outgoing, incoming):
            ticket.transfer.wait()
        store.forget("leaving")
        store.abort(incoming)
    return Spread.of(alone.take(), 1e3), Spread.of(beside.take(), 1e3)
