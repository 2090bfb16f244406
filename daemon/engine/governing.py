"""Keeps the engine's batch within what memory there is: measures, asks the governor, gives memory back.

What is decided is in `daemon/memory/governor.py`; here is what has hands: the readings' thread, what torch
holds, the pool of the arena.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from typing import TYPE_CHECKING, Final, Literal

import psutil
import torch

from batond.daemon.devices import numbered
from batond.daemon.errors import ConfigError
from batond.daemon.memory.governor import (
    Demand,
    Governor,
    MemoryLimits,
    MemoryStatus,
    OwnUse,
    Watermarks,
    beside_parked,
    other_bytes,
)
from batond.daemon.memory.nvml import NvmlSource
from batond.daemon.memory.readings import HostSource, ReadingLost
from batond.daemon.memory.watch import DEFAULT_INTERVAL_S, MemoryWatch, read_within
from batond.daemon.wire.messages import GovernorState

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.engine.batch.protocol import Batch
    from batond.daemon.memory.readings import MemorySource
    from batond.daemon.memory.watch import Sample
    from batond.daemon.wire.settings import MemorySettings

_log = logging.getLogger(__name__)

#: What torch has cached and doesn't use goes back to the driver from this size on, and at most so often: it
#: waits for the card, and the next allocations are slow.
LEAST_CACHE_BYTES: Final = 64 << 20
EMPTY_CACHE_EVERY_S: Final = 0.25

#: More than any context takes: a neighbour came while it was measured.
MOST_CONTEXT_BYTES: Final = 2 << 30

_PRESSED: Final = frozenset({GovernorState.SHRINKING, GovernorState.CRITICAL})


class Governing:
    """The memory of one engine under a governor. Made before the engine, attached to its batch by it.

    Args:
        source: Of readings of the memory that the batch lives in.
        governor: Decides.
        mode: "on" demands readings; "auto" stays off without them, and where the batch gives nothing back.
        interval_s: Between two readings.
        threaded: Read on a thread; otherwise each `limits` reads, which may take as long as the source likes.
        own_use: Tells what this process holds of the memory.
        clock: Monotonic, the source's.

    Attributes:
        on: Whether limits are set.
        why: Why, or why not, in words.
    """

    def __init__(
        self,
        source: MemorySource,
        governor: Governor,
        *,
        mode: Literal["auto", "on"] = "on",
        interval_s: float = DEFAULT_INTERVAL_S,
        threaded: bool = True,
        own_use: Callable[[Batch], OwnUse] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on, self.why = False, "not attached to a batch"
        self._source, self._governor, self._mode = source, governor, mode
        self._interval_s, self._threaded = interval_s, threaded
        self._measure, self._clock = own_use or measure_own_use, clock
        self._batch: Batch | None = None
        self._parked_bytes: Callable[[], int] = _none_parked
        self._largest_bytes = 0
        self._watch: MemoryWatch | None = None
        self._decided: tuple[Sample | None, Demand] | None = None
        self._limits: MemoryLimits | None = None
        self._allowed: MemoryLimits | None = None  # The same, beside what is parked in the same memory.
        self._seen: Sample | None = None
        self._emptied_s = -EMPTY_CACHE_EVERY_S

    @property
    def wait_s(self) -> float:
        """How long an idle engine may wait before it asks for the limits again."""
        return self._interval_s

    @property
    def status(self) -> MemoryStatus | None:
        """Limits and what they were made from; None while it is off."""
        if self._watch is None or self._allowed is None:
            return None
        if self._seen is None:
            return MemoryStatus(self._allowed, 0, 0, self._own_use(), 0, self._watch.losses)
        reading, own = self._seen.reading, self._seen.own
        return MemoryStatus(
            limits=self._allowed,
            total_bytes=reading.total_bytes,
            free_bytes=reading.free_bytes,
            own=own,
            other_bytes=other_bytes(reading, own),
            readings_lost=self._watch.losses,
        )

    def attach(self, batch: Batch, largest_bytes: int, pool_bytes: Callable[[], int] | None = None) -> None:
        """Begin to govern a batch, or find that there is nothing to govern.

        Args:
            batch: Of the engine; idle.
            largest_bytes: KV of the largest query that the engine takes.
            pool_bytes: Tells what the host pool holds of parked KV; called from the readings' thread, too.

        Raises:
            ConfigError: The governor is demanded, and the memory can't be read.
        """
        self._batch, self._largest_bytes = batch, largest_bytes
        if pool_bytes is not None and batch.device.type == "cpu":  # The pool lies in the same memory.
            self._parked_bytes = pool_bytes
        if batch.device.type == "cuda":
            torch.cuda.empty_cache()  # What probes and captures left behind is no peak of serving.
        watch = MemoryWatch(
            self._source,
            self._own_use,
            interval_s=self._interval_s,
            on_sample=self._relieve,
            clock=self._clock,
        )
        if self._mode == "auto" and not batch.memory.elastic:
            self.why = "off: this batch could give nothing back"
        elif self._begin(watch):
            self.on, self.why, self._watch = True, f"on, by {self._source.name}", watch
            if not batch.memory.elastic:
                _log.warning("the memory governor is on, but this batch gives back little")
        else:
            self.why = f"off: {self._source.name} can't be read: {watch.last_failure}"
        _log.log(logging.WARNING if watch.last_failure else logging.INFO, "memory governor %s", self.why)
        if self.on:
            return
        watch.close()
        if self._mode == "on":
            raise ConfigError(
                f"memory.governor is 'on', but {self._source.name} can't be read: {watch.last_failure}",
                reason="MEMORY_NOT_READABLE",
            )

    def _begin(self, watch: MemoryWatch) -> bool:
        if not self._threaded:
            return watch.sample()
        watch.start()
        return watch.wait_first()

    def limits(
        self, running: int, least_bytes: Callable[[], int], taken_bytes: int = 0, *, shortages: int = 0
    ) -> MemoryLimits | None:
        """What the batch may take from now on; gives back at once what it may not keep.

        Cheap where there is no new reading and nobody came or went.

        Args:
            running: Rows in use.
            least_bytes: Tells the KV that one row needs to go on; asked with each reading, and where it may
                matter.
            taken_bytes: KV that is written or promised, parked KV not included.
            shortages: How often no memory was found since the start.

        Returns:
            None while it is off.
        """
        watch, batch = self._watch, self._batch
        if watch is None or batch is None:
            return None
        if not self._threaded:
            watch.sample()
        sample = watch.latest()
        known = None if self._decided is None or self._decided[0] is not sample else self._decided[1]
        if known is None or self._binds():
            known = Demand(least_bytes())
        demand = Demand(known.least_bytes, batch.rows, running, shortages)
        # Blind, our own growth counts, and no new reading tells of it.
        if sample is None or self._decided != (sample, demand):
            self._decide(sample, demand, watch, batch)
        self._give_back(batch)
        self._allowed = self._beside_parked(known.least_bytes, taken_bytes)
        return self._allowed

    def _beside_parked(self, least_bytes: int, taken_bytes: int) -> MemoryLimits | None:
        limits, parked = self._limits, self._parked_bytes()
        if limits is None or limits.kv_budget_bytes is None or not parked:
            return limits
        budget = beside_parked(limits.kv_budget_bytes, parked, taken_bytes, least_bytes)
        return dataclasses.replace(limits, kv_budget_bytes=budget)

    def _binds(self) -> bool:
        """Whether a row that has grown since the last decision might not fit."""
        budget = None if self._allowed is None else self._allowed.kv_budget_bytes
        return budget is not None and budget <= self._largest_bytes

    def _decide(self, sample: Sample | None, demand: Demand, watch: MemoryWatch, batch: Batch) -> None:
        reading, own = (None, self._own_use()) if sample is None else (sample.reading, sample.own)
        before = self._limits
        limits = self._governor.decide(reading, own, demand, self._clock(), watch.trouble)
        self._decided, self._limits = (sample, demand), limits
        self._seen = sample or self._seen
        if before is None or before.state is not limits.state:
            level = logging.WARNING if limits.state is GovernorState.CRITICAL else logging.INFO
            _log.log(
                level,
                "memory %s: %s; %d of %d rows, %s bytes of KV",
                limits.state,
                limits.reason,
                limits.rows,
                batch.rows,
                limits.kv_budget_bytes,
            )

    def close(self) -> None:
        """End the readings."""
        watch, self._watch, self.on = self._watch, None, False
        if watch is not None:
            watch.close()

    def _relieve(self, sample: Sample) -> None:
        """On the readings' thread: a step may take long, and what is pooled can go without one."""
        batch = self._batch
        if batch is not None and batch.memory.pooled_bytes and self._governor.presses(sample.reading):
            batch.trim_soon()

    def _give_back(self, batch: Batch) -> None:
        limits = self._limits
        if limits is None or limits.keep_pooled_bytes is None:
            return
        if batch.memory.pooled_bytes > limits.keep_pooled_bytes:
            batch.trim(limits.keep_pooled_bytes)
        if limits.state in _PRESSED and batch.device.type == "cuda":
            self._empty_cache(batch.device)

    def _empty_cache(self, device: torch.device) -> None:
        now_s = self._clock()
        if now_s - self._emptied_s < EMPTY_CACHE_EVERY_S:
            return
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if unused >= LEAST_CACHE_BYTES:
            torch.cuda.empty_cache()
            self._emptied_s = now_s

    def _own_use(self) -> OwnUse:
        if self._batch is None:
            raise RuntimeError("not attached to a batch")
        own, parked = self._measure(self._batch), self._parked_bytes()
        if not parked:
            return own
        return dataclasses.replace(
            own, outside_bytes=max(0, own.outside_bytes - parked), parked_bytes=own.parked_bytes + parked
        )


def _none_parked() -> int:
    return 0


def measure_own_use(batch: Batch, context_bytes: int = 0) -> OwnUse:
    """What this process holds now of the memory that a batch lives in; called from the readings' thread.

    Args:
        batch: Of the engine.
        context_bytes: See `OwnUse`.
    """
    use, device = batch.memory, batch.device
    in_arena = use.committed_bytes + use.pooled_bytes
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device)
        outside = held if use.elastic else held - in_arena
    else:
        # Shared pages are files, such as weights that are mapped: the kernel drops them before anybody is
        # killed, and counts them as free.
        info = _this_process().memory_info()
        outside = info.rss - info.shared - in_arena
    return OwnUse(
        use.committed_bytes,
        use.pooled_bytes,
        max(0, outside),
        context_bytes,
        slack_bytes=_slack_bytes(batch) if use.elastic else 0,
    )


def _slack_bytes(batch: Batch) -> int:
    written = sum(batch.layout.nbytes(tokens) for tokens in batch.lengths if tokens)
    return max(0, batch.memory.committed_bytes - written)


@functools.cache
def _this_process() -> psutil.Process:
    return psutil.Process()


def make_governing(settings: MemorySettings, device_name: str, *, arena: str = "auto") -> Governing | None:
    """The governor that the settings ask for. On a card, call it before anything is loaded there.

    Args:
        settings: As configured.
        device_name: What the engine will decode on, in torch's words.
        arena: The ring's, as configured.

    Returns:
        None where it is off: as configured; by itself on a CPU, whose memory is everybody's, and on a card
        whose arena is not asked to be elastic: NVML, which may hang, is not asked in vain.
    """
    mode = settings.governor
    on_card = torch.device(device_name).type == "cuda"
    if mode == "off" or (mode == "auto" and (not on_card or arena != "elastic")):
        return None
    device = numbered(device_name)
    source: MemorySource = HostSource()
    context_bytes = 0
    if on_card:
        properties = torch.cuda.get_device_properties(device)
        uuid = getattr(properties, "uuid", "")  # Other makers' cards have none, and no NVML.
        card = functools.partial(NvmlSource, str(uuid), int(properties.total_memory))
        # Each with a source of its own: should the first hang, it may come back while the watch reads.
        context_bytes, source = _measure_context(card(), device), card()
    marks = Watermarks(
        low=settings.low_watermark,
        high=settings.high_watermark,
        critical=settings.critical_watermark,
        reserve_bytes=None if settings.reserve_bytes < 0 else settings.reserve_bytes,
    )
    return Governing(
        source,
        Governor(marks),
        mode=mode,
        interval_s=settings.sample_ms / 1000,
        own_use=functools.partial(measure_own_use, context_bytes=context_bytes),
    )


def _measure_context(source: MemorySource, device: torch.device) -> int:
    """Bytes that this process's CUDA context takes; 0 where it can't be told, then they count as others'."""
    try:
        before = read_within(source)
        torch.zeros(1, device=device)
        torch.cuda.synchronize(device)
        taken = before.free_bytes - read_within(source).free_bytes - torch.cuda.memory_reserved(device)
    except ReadingLost:
        return 0
    return taken if 0 < taken <= MOST_CONTEXT_BYTES else 0
