"""What a run of the published evaluation is asked for."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from batond.bench.gpu.run import DTYPES
from batond.bench.gpu.sizes import SHAPES
from batond.bench.mixes.run import MIX_SEED
from batond.bench.paper.cases import cases
from batond.daemon.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.bench.paper.cases import Case

#: How time is told: of the wall, or of this process alone, which other work on the machine hardly moves.
CLOCKS: Final[dict[str, Callable[[], float]]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to run.

    Attributes:
        tables: Of 1 and 2.
        batches: Batch sizes; None is those of the tables.
        shape: Name of the model's shape.
        layers: Layers of it; None is all.
        dtype: Of weights and KV.
        device: "cuda", "cuda:1", ... or "cpu".
        queries: Of Table 1.
        mix_shorter: Divides all lengths of Table 1.
        short_shorter: Divides all lengths of Table 2.
        seconds: Time that the methods of a column may be predicted to take together: as many queries are run
            as that allows.
        memory: Whether KV memory is measured.
        plain_seconds: Time of plain transformers in a column; 0 leaves it out.
        seed: Of Table 2.
        mix_seed: Of Table 1.
        clock: Name of `CLOCKS`.
        rounds: Each method runs so often, in turns; the run of the median time counts.
    """

    tables: tuple[int, ...] = (1, 2)
    batches: tuple[int, ...] | None = None
    shape: str = "tiny"
    layers: int | None = None
    dtype: str = "float32"
    device: str = "cpu"
    queries: int = 120
    mix_shorter: int = 1
    short_shorter: int = 1
    seconds: float = 120.0
    memory: bool = True
    plain_seconds: float = 60.0
    seed: int = 0
    mix_seed: int = MIX_SEED
    clock: str = "wall"
    rounds: int = 1

    def __post_init__(self) -> None:
        """Refuse what has no meaning.

        Raises:
            ConfigError: An option has none.
        """
        if not self.tables or set(self.tables).difference((1, 2)):
            raise ConfigError(
                f"--tables must be of 1, 2, not {', '.join(map(str, self.tables)) or 'nothing'}"
            )
        if self.shape not in SHAPES:
            raise ConfigError(f"--shape must be one of {', '.join(SHAPES)}, not {self.shape!r}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.clock not in CLOCKS:
            raise ConfigError(f"--clock must be one of {', '.join(CLOCKS)}, not {self.clock!r}")
        if min(self.queries, self.mix_shorter, self.short_shorter, self.layers or 1, self.rounds) < 1:
            raise ConfigError(
                "--queries, --mix-shorter, --short-shorter, --layers and --rounds must be at least 1"
            )
        if not (self.seconds >= 0 and self.plain_seconds >= 0):
            raise ConfigError("--seconds and --plain-seconds must be at least 0")
        if not self.cases():
            raise ConfigError(f"tables {self.tables} have no batch of {self.batches}; see --help")

    def cases(self) -> list[Case]:
        """The columns of the tables."""
        return cases(
            self.tables,
            self.batches,
            queries=self.queries,
            mix_shorter=self.mix_shorter,
            short_shorter=self.short_shorter,
            mix_seed=self.mix_seed,
            short_seed=self.seed,
        )
