"""The mixes in one run: an engine is made for each, its costs are measured, then each mode runs the queries.

The published model and all its queries take hours in four modes. Fewer layers and fewer queries keep what
is compared: a step's parts shrink alike, and the schedule is that of the queries that are run. What the whole
workload would take is predicted from the same costs.
"""

from __future__ import annotations

import copy
import gc
import math
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import torch
from transformers import AutoModelForCausalLM

from batond.bench import workloads
from batond.bench.gpu import machine
from batond.bench.gpu.run import DTYPES
from batond.bench.gpu.sizes import SHAPES
from batond.bench.mixes.costs import Costs, Meter, Prediction
from batond.bench.mixes.modes import MODES, MixEngine, Outcome
from batond.bench.mixes.schedule import most_columns
from batond.daemon.engine.model.causal import CausalModel
from batond.daemon.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedModel

    from batond.bench.workloads import Request

#: Of 3000 seeds, the one whose 120 queries come nearest to the tokens of the mix that vLLM was measured with:
#: 149,403 of prompts and 142,217 of outputs (docs/performance.md).
MIX_SEED: Final = 2817
#: Columns beyond those that a schedule needs: of measurements.
SPARE_COLUMNS: Final = 256
#: Between the sizes of captured forwards, of which a prompt takes the next larger: so it is on average.
PROMPT_TOKENS: Final = (48, 96, 160, 320, 640, 1280, 2600)
LONG_PROMPT_TOKENS: Final = (3500, 4500)
_SHORT_COLUMNS: Final = 64
_MIDDLE_COLUMNS: Final = 2048
#: Queries are taken by the four kinds' shares: long-short, short-long, short-short twice.
_SHARE: Final = 4


@dataclass(frozen=True, slots=True)
class Mix:
    """A published workload.

    Attributes:
        name: In tables.
        rows: Of the batch.
        scale: All lengths are so many times as long.
        over_whole: Published time of run-to-completion over decoupled.
        over_inline: Published time of inline over decoupled, on a card with dearer prompts.
    """

    name: str
    rows: int
    scale: int
    over_whole: float
    over_inline: float


MIXES: Final = {
    "single": Mix("single", rows=8, scale=1, over_whole=2.49, over_inline=1.29),
    "doubled": Mix("doubled", rows=4, scale=2, over_whole=1.86, over_inline=1.75),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to run.

    Attributes:
        mixes: Names of `MIXES`.
        shape: Name of the model's shape.
        layers: Layers of it; None is all.
        dtype: Of weights and KV.
        device: "cuda", "cuda:1", ... or "cpu", where times mean nothing.
        queries: Of the workload.
        modes: Names of `MODES` to run; the others are only predicted.
        seconds: Time that these modes of a mix may be predicted to take: a workload of as many queries is
            run as that allows, none if it is 0.
        seed: Of lengths, order and token ids.
        shorter: All lengths are divided by this.
    """

    mixes: tuple[str, ...] = ("single", "doubled")
    shape: str = "llama-2-7b"
    layers: int | None = 4
    dtype: str = "bfloat16"
    device: str = "cuda"
    queries: int = 120
    modes: tuple[str, ...] = tuple(mode.name for mode in MODES)
    seconds: float = 60.0
    seed: int = MIX_SEED
    shorter: int = 1

    def __post_init__(self) -> None:
        """Refuse what has no meaning.

        Raises:
            ConfigError: An option has none.
        """
        if (unknown := set(self.mixes).difference(MIXES)) or not self.mixes:
            said = ", ".join(sorted(unknown)) or "nothing"
            raise ConfigError(f"--mix must be of {', '.join(MIXES)}, not {said}")
        known = [mode.name for mode in MODES]
        if unknown := set(self.modes).difference(known):
            raise ConfigError(f"--mode must be of {', '.join(known)}, not {', '.join(sorted(unknown))}")
        if self.shape not in SHAPES:
            raise ConfigError(f"--shape must be one of {', '.join(SHAPES)}, not {self.shape!r}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.queries < 1 or self.shorter < 1 or (self.layers is not None and self.layers < 1):
            raise ConfigError("--queries, --shorter and --layers must be at least 1")
        if not self.seconds >= 0:
            raise ConfigError(f"--seconds must be at least 0, not {self.seconds}")

    def requests(self, mix: Mix) -> list[Request]:
        """The whole workload."""
        vocab_size = SHAPES[self.shape].vocab_size
        whole = workloads.mix(vocab_size, queries=self.queries, scale=mix.scale, seed=self.seed)
        return [
            replace(
                one,
                prompt_token_ids=one.prompt_token_ids[:: self.shorter],
                output_tokens=math.ceil(one.output_tokens / self.shorter),
            )
            for one in whole
        ]


DEFAULTS: Final = Options()


@dataclass(frozen=True, slots=True)
class ModeRun:
    """One mode of a mix.

    Attributes:
        mode: Its name.
        outcome: What came of the queries that were run; None if none were.
        predicted: For the same queries.
        whole: For the whole workload.
    """

    mode: str
    outcome: Outcome | None
    predicted: Prediction
    whole: Prediction


@dataclass(slots=True, kw_only=True)
class MixReport:
    """One mix.

    Attributes:
        mix: Which.
        layers: Of the model that was run.
        queries: Of the whole workload, and its tokens.
        run_queries: Of those that were run.
        costs: Measured before.
        modes: Each mode.
        batch: What the engine chose, and why.
        ready_s: Of making the engine.
        seconds: All of it.
    """

    mix: Mix
    layers: int
    queries: int
    prompt_tokens: int
    output_tokens: int
    run_queries: int
    costs: Costs
    modes: list[ModeRun] = field(default_factory=list)
    batch: str = ""
    ready_s: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MixesReport:
    """Everything.

    Attributes:
        options: What was asked for.
        machine: Card, driver, versions.
        mixes: Each mix.
    """

    options: Options
    machine: dict[str, str]
    mixes: list[MixReport]


def run(options: Options, tell: Callable[[str], None]) -> MixesReport:
    """Run the mixes, one after the other.

    Args:
        options: What to run.
        tell: Hears what is being done.

    Raises:
        ConfigError: There is no such device, or a ring doesn't fit into it.
    """
    device = machine.require_device(options.device)
    about = machine.describe(device)
    reports = [_run_mix(MIXES[name], options, device, tell) for name in options.mixes]
    return MixesReport(options=options, machine=about, mixes=reports)


def _run_mix(mix: Mix, options: Options, device: torch.device, tell: Callable[[str], None]) -> MixReport:
    began_s = time.perf_counter()

    def say(what: str) -> None:
        tell(f"{mix.name}: {what}")

    whole = options.requests(mix)
    on_card = device.type == "cuda"
    # What prompts leave in rows is many times what rows have: of a whole model it may not fit.
    columns = SPARE_COLUMNS + max(
        most_columns(mode.order(whole), mix.rows, mode, reads_added=on_card)
        for mode in MODES
        if not mode.leaves_columns or (options.seconds and mode.name in options.modes)
    )
    say(f"engine of {mix.rows} rows and {columns} columns")
    model = build(options.shape, options.layers, DTYPES[options.dtype], columns, device)
    layers: int = model.config.num_hidden_layers
    bench = MixEngine(model, mix.rows, columns)
    try:
        ready_s = time.perf_counter() - began_s
        longest = columns - SPARE_COLUMNS if on_card else max(len(one.prompt_token_ids) for one in whole)
        costs = Meter(bench, model.vocab_size, say).measure(
            _shorter((*PROMPT_TOKENS, *(mix.scale * tokens for tokens in LONG_PROMPT_TOKENS)), options),
            (
                _SHORT_COLUMNS // options.shorter + 1,
                _MIDDLE_COLUMNS * mix.scale // options.shorter + 1,
                longest,
            ),
        )
        some = _affordable(mix, options, costs)
        report = MixReport(
            mix=mix,
            layers=layers,
            queries=len(whole),
            prompt_tokens=sum(len(one.prompt_token_ids) for one in whole),
            output_tokens=sum(one.output_tokens for one in whole),
            run_queries=len(some),
            costs=costs,
            batch=bench.engine.batch_reason,
            ready_s=ready_s,
        )
        for mode in MODES:
            predicted = costs.predict(some, mode)
            outcome = None
            if some and mode.name in options.modes:
                say(f"{mode.name}: {len(some)} queries, predicted {predicted.seconds:.1f} s")
                outcome = bench.run(some, mode, say)
            report.modes.append(ModeRun(mode.name, outcome, predicted, costs.predict(whole, mode)))
    finally:
        bench.close()
        del bench, model
        gc.collect()
        if on_card:
            torch.cuda.empty_cache()
    report.seconds = time.perf_counter() - began_s
    return report


def _shorter(sizes: Sequence[int], options: Options) -> list[int]:
    return sorted({max(1, size // options.shorter) for size in sizes})


def _affordable(mix: Mix, options: Options, costs: Costs) -> list[Request]:
    """As many queries, all kinds by their shares, as all modes together run in the time."""
    for count in range(options.queries, 0, -_SHARE):
        some = replace(options, queries=count).requests(mix)
        modes = [mode for mode in MODES if mode.name in options.modes]
        if sum(costs.predict(some, mode).seconds for mode in modes) <= options.seconds:
            return some
    return []


def build(
    shape: str, layers: int | None, dtype: torch.dtype, positions: int, device: torch.device
) -> CausalModel:
    """A shape with so many layers and positions and random weights, made on the device.

    Args:
        shape: Name of `SHAPES`.
        layers: None is all.
        dtype: Of the weights.
        positions: That the model is made for.
        device: Where it is.
    """
    return CausalModel(make_model(shape, layers, dtype, positions, device), device)


def make_model(
    shape: str, layers: int | None, dtype: torch.dtype, positions: int, device: torch.device
) -> PreTrainedModel:
    """The same as transformers makes it."""
    torch.manual_seed(0)
    config = copy.deepcopy(SHAPES[shape])
    config.max_position_embeddings = positions
    if layers is not None:
        config.num_hidden_layers = layers
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model
