"""Memory of keys and values over time, for the same queries under several ways of batching.

run_to_completion   padded, inline, rows given out when all are free: the saw-tooth
padded_inline       padded; the newcomer's prompt goes through the batch step, and pads everybody
padded              padded; a prompt is computed apart and embedded
plain_ring          the ring, with all of its memory from the start
ring                the ring, with memory that follows its rows (elastic)

Counted is what the batch holds after each step, weighed by the time until the next: pages of rows, pooled
pages and a padded tensor's room for columns to come included; slices on their way to a row or to the host
are not.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.table import Table

from batond.daemon.engine import LocalEngine, SamplingParams
from batond.daemon.scheduler.plan import Gate
from batond.daemon.simulator.figures import load_plotter, save

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from batond.bench.workloads import Request
    from batond.daemon.engine.model.causal import CausalModel

MODES: dict[str, dict[str, Any]] = {
    "run_to_completion": {"batch": "padded", "prefill": "inline", "gate": Gate.BATCH},
    "padded_inline": {"batch": "padded", "prefill": "inline"},
    "padded": {"batch": "padded"},
    "plain_ring": {"batch": "ring", "arena": "plain"},
    "ring": {"batch": "ring", "arena": "elastic"},
}
MEBIBYTE = 1 << 20


@dataclass(slots=True)
class Curve:
    """What a batch held, step by step.

    Attributes:
        mode: Key of `MODES`.
        rows: Of the batch.
        ends_s: When each step was over, from the first submit on.
        held_bytes: Committed and pooled after it.
        live_bytes: Bytes of the tokens that rows own after it.
    """

    mode: str
    rows: int
    ends_s: list[float] = field(default_factory=list)
    held_bytes: list[int] = field(default_factory=list)
    live_bytes: list[int] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """From the first submit to the last token."""
        return self.ends_s[-1]

    @property
    def peak_bytes(self) -> int:
        """The most that was held."""
        return max(self.held_bytes)

    @property
    def byte_seconds(self) -> float:
        """Memory times time."""
        return self._over_time(self.held_bytes)

    @property
    def mean_bytes(self) -> float:
        """Held on average over time."""
        return self.byte_seconds / max(self.seconds - self.ends_s[0], 1e-9)

    @property
    def over_live(self) -> float:
        """Held bytes over those of live tokens, on average over time."""
        return self.byte_seconds / max(self._over_time(self.live_bytes), 1e-9)

    def figures(self) -> dict[str, Any]:
        """All figures, for a file."""
        return {
            "mode": self.mode,
            "rows": self.rows,
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
            "mean_bytes": self.mean_bytes,
            "byte_seconds": self.byte_seconds,
            "over_live": self.over_live,
            "ends_s": self.ends_s,
            "held_bytes": self.held_bytes,
            "live_bytes": self.live_bytes,
        }

    def _over_time(self, values: Sequence[int]) -> float:
        """What a step leaves is held until the next is over."""
        spans = zip(self.ends_s[:-1], self.ends_s[1:], values[:-1], strict=True)
        return sum((end - begin) * value for begin, end, value in spans)


def run(model: CausalModel, requests: Sequence[Request], mode: str, rows: int) -> Curve:
    """Run all requests, submitted at once, in one mode.

    Args:
        model: The model.
        requests: The queries, in order of arrival.
        mode: Key of `MODES`.
        rows: Batch size.
    """
    return measure(model, requests, mode, rows, MODES[mode])


def measure(
    model: CausalModel,
    requests: Sequence[Request],
    mode: str,
    rows: int,
    options: dict[str, Any],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Curve:
    """Run all requests, submitted at once.

    Args:
        model: The model.
        requests: The queries, in order of arrival.
        mode: What the curve is called.
        rows: Batch size.
        options: Of the engine.
        clock: Seconds.
    """
    longest = max(len(request.prompt_token_ids) + request.output_tokens for request in requests)
    engine = LocalEngine(model, rows=rows, policy="fcfs", max_query_tokens=longest, **options)
    began_s = clock()
    for request in requests:
        engine.submit(
            request.prompt_token_ids, SamplingParams(max_tokens=request.output_tokens, ignore_eos=True)
        )
    curve = Curve(mode, rows)
    batch = engine.residency.batch
    while engine.queries:
        engine.step()
        use = batch.memory
        curve.ends_s.append(clock() - began_s)
        curve.held_bytes.append(use.committed_bytes + use.pooled_bytes)
        curve.live_bytes.append(sum(batch.lengths) * batch.layout.record_bytes)
    engine.close()
    return curve


def report(curves: Sequence[Curve]) -> Table:
    """The table: memory of each mode, and how it compares with the first."""
    table = Table(title=f"KV memory of {curves[0].rows} rows")
    table.add_column("mode")
    for name in ("peak MiB", "mean MiB", "over live tokens", "MiB s", "ratio", "time s"):
        table.add_column(name, justify="right")
    for curve in curves:
        table.add_row(
            curve.mode,
            f"{curve.peak_bytes / MEBIBYTE:.2f}",
            f"{curve.mean_bytes / MEBIBYTE:.2f}",
            f"{curve.over_live:.2f}",
            f"{curve.byte_seconds / MEBIBYTE:.2f}",
            f"{curve.byte_seconds / curves[0].byte_seconds:.2f}",
            f"{curve.seconds:.2f}",
        )
    return table


def plot(path: Path, curves: Sequence[Curve]) -> None:
    """Draw what each mode holds over time, and the bytes of its live tokens.

    Raises:
        ConfigError: Matplotlib is missing, the ending names no format, or the file can't be written.
    """
    figure = load_plotter()(figsize=(9, 2 * len(curves)), layout="constrained")
    for axes, curve in zip(
        figure.subplots(len(curves), sharex=True, squeeze=False)[:, 0], curves, strict=True
    ):
        for name, values in (("held", curve.held_bytes), ("live tokens", curve.live_bytes)):
            axes.step(curve.ends_s, [value / MEBIBYTE for value in values], where="post", label=name)
        axes.set(ylabel="MiB of KV", title=curve.mode, ylim=(0, None))
        axes.legend(loc="upper right")
    axes.set(xlabel="seconds")
    save(figure, path)
