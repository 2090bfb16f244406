"""What a decode step costs on the ring and on padded tensors, on the same model, in one run.

Rows are filled with made-up keys and values, which cost the same as real ones. The two batches take turns, a
few steps each, so that whatever else the machine does falls on both.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table

from batond.daemon.engine.batch.padded import PaddedBatch
from batond.daemon.engine.batch.ring import RingBatch
from batond.daemon.engine.model.recipe import Recipe
from batond.daemon.engine.proof.trial import probe_layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batond.daemon.engine.batch.protocol import Batch
    from batond.daemon.engine.model.causal import CausalModel
    from batond.offload.slice import KVSlice

STEPS_IN_TURN = 4


@dataclass(slots=True)
class Mix:
    """Rows of given lengths, and what their steps took.

    Attributes:
        name: For the table.
        lengths: Cached tokens of each row.
        seconds: Of each step, by kind of batch.
    """

    name: str
    lengths: list[int]
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"padded": [], "ring": []})

    def median_ms(self, kind: str) -> float:
        """Median time of a step."""
        return 1e3 * statistics.median(self.seconds[kind])

    @property
    def ratio(self) -> float:
        """How many times as fast the ring is."""
        return self.median_ms("padded") / self.median_ms("ring")


def mixes(short: int = 16, long: int = 1024) -> list[Mix]:
    """The cases. An empty ring starts with its first row: a longer one that follows wraps over the end."""
    return [
        Mix(f"8 x {short}", [short] * 8),
        Mix(f"8 x {long}", [long] * 8),
        Mix(f"{long}, 7 x {short}", [long] + [short] * 7),
        Mix(f"7 x {short}, {long} (wraps)", [short] * 7 + [long]),
        Mix(f"4 x ({short}, {long}) (wrap)", [short, long] * 4),
        Mix(f"{long}, 31 x {short}", [long] + [short] * 31),
        Mix(f"{long}, 63 x {short}", [long] + [short] * 63),
    ]


def measure(model: CausalModel, cases: Sequence[Mix], rounds: int) -> None:
    """Fill in the cases' seconds."""
    model.recipe = Recipe()
    layout = probe_layout(model)
    noise = torch.Generator().manual_seed(1)
    slices = {
        length: layout.random(length, model.device, noise) for mix in cases for length in set(mix.lengths)
    }
    for mix in cases:
        rows = len(mix.lengths)
        batches: dict[str, Any] = {
            "padded": PaddedBatch(model, rows, layout),
            "ring": RingBatch(model, rows, layout, 2 * max(mix.lengths)),
        }
        for number in range(rounds + 1):
            for kind in sorted(batches, reverse=bool(number % 2)):
                taken = _steps(batches[kind], [slices[length] for length in mix.lengths])
                if number:  # The first round warms up.
                    mix.seconds[kind] += taken


def report(cases: Sequence[Mix], title: str) -> Table:
    """The table."""
    table = Table(title=title)
    for head in ("rows and tokens", "padded, ms a step", "ring, ms a step", "ring is ... times as fast"):
        table.add_column(head, justify="left" if head == "rows and tokens" else "right")
    for mix in cases:
        table.add_row(
            mix.name, f"{mix.median_ms('padded'):.1f}", f"{mix.median_ms('ring'):.1f}", f"{mix.ratio:.2f}"
        )
    return table


def _steps(batch: Batch, slices: Sequence[KVSlice]) -> list[float]:
    """Fill the rows, decode a few steps, and empty them again."""
    for row, kv in enumerate(slices):
        batch.embed(row, kv)
    taken = []
    for _ in range(STEPS_IN_TURN):
        began_s = time.perf_counter()
        batch.step({row: [5] for row in range(len(slices))})
        if batch.device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began_s)
    for row in range(len(slices)):
        batch.free(row)
    return taken
