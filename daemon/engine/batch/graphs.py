"""The decode step, captured once for each of a few row counts and replayed from then on.

An eager forward costs the host far more than the card: a launch for each of a thousand kernels. A captured
one costs one launch. It computes the first b rows of the batch, b from a short list; the largest b is
captured first and serves for all where time or memory end the list early.
"""

from __future__ import annotations

import bisect
import logging
import time
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from batond.daemon.engine.model.causal import MODEL_ERRORS, first_line
from batond.daemon.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_log = logging.getLogger(__name__)

#: Above, one bucket every so many rows: a step's time hardly depends on a few rows more.
_DENSE_ROWS = 8
#: Part of the card's free memory that captured steps may take at most.
_MEMORY_SHARE = 0.1


def row_buckets(rows: int) -> tuple[int, ...]:
    """Row counts worth a captured step of their own, ascending; the last is all rows.

    Powers of two, and the numbers half-way between them from 16 on.
    """
    sizes = {rows}
    size = 1
    while size < rows:
        sizes.add(size)
        if size > _DENSE_ROWS and size * 3 // 2 < rows:
            sizes.add(size * 3 // 2)
        size *= 2
    return tuple(sorted(sizes))


class StepOutput(NamedTuple):
    """What a step computes.

    Attributes:
        logits: float32, shape [rows, vocabulary].
        likeliest: The token id of each row's greatest logit; int64, shape [rows].
    """

    logits: torch.Tensor
    likeliest: torch.Tensor


class Replay(Protocol):
    """A captured step.

    Attributes:
        output: What the last `replay` computed; written anew by the next.
    """

    output: StepOutput

    def replay(self) -> None:
        """Run it on the current stream."""


@dataclass(frozen=True, slots=True)
class CaptureLimits:
    """What capturing may take at a start.

    Attributes:
        nbytes: No capture is begun once more than this of the card's memory went into them.
        seconds: No capture is begun if this would be passed, by the time that the last one took.
    """

    nbytes: int
    seconds: float = 60.0


@dataclass(slots=True)
class StepGraphs:
    """Captured steps, by the number of rows they compute.

    Attributes:
        sizes: Row counts, ascending.
        why_no_more: Why some row counts were not captured; "" where all were.
        seconds: Time that capturing took.
        nbytes: Memory of the card that it took.
    """

    sizes: list[int] = field(default_factory=list)
    why_no_more: str = ""
    seconds: float = 0.0
    nbytes: int = 0
    _by_rows: dict[int, Replay] = field(default_factory=dict)

    def run(self, needed_rows: int) -> StepOutput | None:
        """Replay the smallest step that computes the first `needed_rows` rows.

        Returns:
            What it computed, overwritten by the next; None if there is no such step.
        """
        place = bisect.bisect_left(self.sizes, needed_rows)
        if place == len(self.sizes):
            return None
        step = self._by_rows[self.sizes[place]]
        step.replay()
        return step.output

    def add(self, rows: int, step: Replay) -> None:
        """Take a captured step in."""
        bisect.insort(self.sizes, rows)
        self._by_rows[rows] = step


def capture_steps(
    sizes: Sequence[int],
    capture: Callable[[int], Replay],
    limits: CaptureLimits,
    *,
    free_bytes: Callable[[], int],
    clock: Callable[[], float] = time.monotonic,
) -> StepGraphs:
    """Capture the step for each row count, the largest first, as long as the limits allow.

    Args:
        sizes: Row counts.
        capture: Captures one.
        limits: Of time and memory.
        free_bytes: Free memory of the card.
        clock: Seconds.

    Returns:
        What was captured: at least the largest, or nothing.
    """
    graphs = StepGraphs()
    began_s, free_before = clock(), free_bytes()
    last_s = 0.0
    for rows in sorted(sizes, reverse=True):
        if graphs.sizes and graphs.seconds + last_s > limits.seconds:
            graphs.why_no_more = f"capturing more would take longer than {limits.seconds:g} s"
        elif graphs.sizes and graphs.nbytes > limits.nbytes:
            graphs.why_no_more = f"captured steps take {graphs.nbytes} bytes already"
        if graphs.why_no_more:
            break
        try:
            graphs.add(rows, capture(rows))
        except (*MODEL_ERRORS, UnsupportedModelError) as error:
            said = first_line(error)
            graphs.why_no_more = f"{type(error).__name__}: {said}"
            break
        last_s, graphs.seconds = clock() - began_s - graphs.seconds, clock() - began_s
        graphs.nbytes = max(0, free_before - free_bytes())
        _log.info("captured the step of size %d in %.1f s", rows, last_s)
    return graphs


def capture_on_card(
    run_of: Callable[[int], Callable[[], StepOutput]], sizes: Sequence[int], device: torch.device
) -> StepGraphs:
    """Capture steps as CUDA graphs that share their memory: one at a time runs.

    Args:
        run_of: Makes the step over the first so many rows.
        sizes: Row counts.
        device: The card.
    """
    pool = torch.cuda.graph_pool_handle()

    def free_bytes() -> int:
        return int(torch.cuda.mem_get_info(device)[0])

    return capture_steps(
        sizes,
        lambda rows: CudaStep(run_of(rows), pool),
        CaptureLimits(nbytes=int(free_bytes() * _MEMORY_SHARE)),
        free_bytes=free_bytes,
    )


class CudaStep:
    """A step captured as a CUDA graph.

    Args:
        run: The whole step: reads and writes tensors that stay where they are, and returns what it computed.
        pool: Memory that captured steps share: one at a time runs.

    Attributes:
        output: What the last replay computed.

    Raises:
        RuntimeError: The step waits for the card half-way, or can't be captured for another reason.
    """

    def __init__(self, run: Callable[[], StepOutput], pool: Any) -> None:
        self._run = run  # The graph reads tensors that hang on it.
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()  # Kernels are compiled, libraries take their workspaces.
            _run_without_waiting(run)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may page-lock memory meanwhile.
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                self.output = run()
        finally:
            torch.cuda.synchronize()  # A failed capture leaves the card usable; else this says so.

    def replay(self) -> None:
        """Run it on the current stream."""
        self._graph.replay()


def _run_without_waiting(run: Callable[[], StepOutput]) -> None:
    """Run the step once; a wait for the card raises here, where it harms less than in a capture."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # That it does not find all waits: the capture finds the rest.
        torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
