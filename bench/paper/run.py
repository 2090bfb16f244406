"""Run the columns of the tables: each method on the same kernels and graphs, and what arithmetic predicts.

    1  an engine is made, its costs are measured, each method runs the same queries        times, curves
    2  each method runs them on padded tensors, the paper's own, and on the ring           KV memory
    3  plain transformers runs them in static batches                                      the absolute run

What a machine has no time for is predicted from costs of the same run, and said to be.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from batond.bench import memory
from batond.bench.gpu import machine
from batond.bench.gpu.run import DTYPES
from batond.bench.gpu.sizes import SHAPES
from batond.bench.mixes.costs import Meter
from batond.bench.mixes.modes import MixEngine
from batond.bench.mixes.run import (
    LONG_PROMPT_TOKENS,
    PROMPT_TOKENS,
    SPARE_COLUMNS,
    build,
    make_model,
)
from batond.bench.mixes.schedule import Stretch, most_columns, play
from batond.bench.paper import plain
from batond.bench.paper.cases import PAPER_MODES
from batond.bench.paper.options import CLOCKS
from batond.bench.paper.series import Series
from batond.daemon.scheduler.plan import Gate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from batond.bench.memory import Curve
    from batond.bench.mixes.costs import Costs, Prediction
    from batond.bench.mixes.modes import Mode, Outcome
    from batond.bench.paper.cases import Case
    from batond.bench.paper.options import Options
    from batond.bench.paper.plain import PlainRun
    from batond.bench.workloads import Request

_WARM_TOKENS: Final = 3
_WARM_PROMPT: Final = 64
_GATED: Final = {"gate": Gate.BATCH}
_APART: Final = {"prefill": "decoupled", "chunk_tokens": None}
#: Engines whose memory is drawn: the methods on padded tensors, and what the engine serves with.
MEMORY_MODES: Final[dict[str, dict[str, Any]]] = {
    "run_to_completion": {"batch": "padded", "prefill": "inline", **_GATED},
    "pd": {"batch": "padded", **_APART, **_GATED},
    "inline": {"batch": "padded", "prefill": "inline"},
    "decoupled": {"batch": "padded", **_APART},
    "ring": {"batch": "ring", "arena": "elastic", **_APART},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRun:
    """One method in one column.

    Attributes:
        mode: Name of `PAPER_MODES`.
        outcome: What came of the queries that were run; None if none were.
        series: Over time; None likewise.
        spread_s: Shortest and longest of all rounds; None likewise.
        predicted: For the same queries.
        whole: For the whole workload at these lengths.
        published_steps: Decode steps that the whole workload takes at the published lengths.
    """

    mode: str
    outcome: Outcome | None
    series: Series | None
    spread_s: tuple[float, float] | None
    predicted: Prediction
    whole: Prediction
    published_steps: int


@dataclass(slots=True, kw_only=True)
class CaseReport:
    """One column.

    Attributes:
        case: Which.
        layers: Of the model.
        prompt_tokens: Of the whole workload.
        output_tokens: Of the whole workload.
        run_queries: Queries that were run.
        costs: Measured before.
        methods: In the tables' order.
        memory: By name of `MEMORY_MODES`.
        plain: Plain transformers.
        seconds: All of it.
    """

    case: Case
    layers: int
    prompt_tokens: int
    output_tokens: int
    run_queries: int
    costs: Costs
    methods: list[MethodRun] = field(default_factory=list)
    memory: list[Curve] = field(default_factory=list)
    plain: PlainRun | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperReport:
    """Everything so far.

    Attributes:
        options: What was asked for.
        machine: Device, driver, versions.
        cases: Each column that is done.
    """

    options: Options
    machine: dict[str, str]
    cases: list[CaseReport]


def run(options: Options, tell: Callable[[str], None]) -> Iterator[PaperReport]:
    """Run the columns one after the other; what is done so far comes after each.

    Args:
        options: What to run.
        tell: Hears what is being done.

    Raises:
        ConfigError: There is no such device, or a ring doesn't fit into it.
    """
    device = machine.require_device(options.device)
    report = PaperReport(options=options, machine=machine.describe(device), cases=[])
    for case in options.cases():

        def say(what: str, case: Case = case) -> None:
            tell(f"{case.title}: {what}")

        began_s = time.perf_counter()
        runner = _CaseRunner(case, options, device, say)
        found = runner.methods()
        if found.run_queries and options.memory:
            runner.memory(found)
        if options.plain_seconds:
            runner.plain(found)
        found.seconds = time.perf_counter() - began_s
        report.cases.append(found)
        yield report


class _CaseRunner:
    """Runs one column.

    Args:
        case: Which.
        options: What was asked for.
        device: Where.
        tell: Hears what is being done.
    """

    def __init__(
        self, case: Case, options: Options, device: torch.device, tell: Callable[[str], None]
    ) -> None:
        self._case, self._options, self._device, self._tell = case, options, device, tell
        self._clock = CLOCKS[options.clock]
        self._vocab_size = SHAPES[options.shape].vocab_size
        self._whole = case.requests(self._vocab_size)
        # Without a card's kernel no step reads the columns that prompts leave in rows.
        self._reads_added = device.type == "cuda"
        self._columns = SPARE_COLUMNS + max(
            most_columns(mode.order(self._whole), case.rows, mode, reads_added=self._reads_added)
            for mode in PAPER_MODES
        )

    def methods(self) -> CaseReport:
        """Measure costs, then run each method on the same engine."""
        case, whole = self._case, self._whole
        self._tell(f"engine of {case.rows} rows and {self._columns} columns")
        model = build(*self._shape, self._columns, self._device)
        bench = MixEngine(model, case.rows, self._columns, self._clock)
        try:
            costs = Meter(bench, self._vocab_size, self._tell).measure(
                self._prompt_sizes(), self._row_sizes()
            )
            some = self._affordable(costs)
            self._warm(bench)
            report = CaseReport(
                case=case,
                layers=model.config.num_hidden_layers,
                prompt_tokens=sum(len(one.prompt_token_ids) for one in whole),
                output_tokens=sum(one.output_tokens for one in whole),
                run_queries=len(some),
                costs=costs,
            )
            runs = self._rounds(bench, costs, some) if some else {}
            report.methods = [
                self._method(costs, some, mode, runs.get(mode.name, [])) for mode in PAPER_MODES
            ]
        finally:
            bench.close()
            del bench, model
            self._tidy()
        return report

    def memory(self, report: CaseReport) -> None:
        """Run the same queries on padded tensors, and see what they hold."""
        some = self._case.requests(self._vocab_size, queries=report.run_queries)
        by_name = {mode.name: mode for mode in PAPER_MODES}
        for name, options in MEMORY_MODES.items():
            self._tell(f"KV memory: {name}")
            ordered = by_name[name].order(some) if name in by_name else some
            positions = self._longest_padded(some)
            model = build(*self._shape, positions, self._device)
            curve = memory.measure(model, ordered, name, self._case.rows, options, clock=self._clock)
            report.memory.append(curve)
            del model
            self._tidy()

    def plain(self, report: CaseReport) -> None:
        """Run the same queries, or the whole workload if none were, on plain transformers."""
        some = self._case.requests(self._vocab_size, queries=report.run_queries or None)
        self._tell(f"plain transformers: {len(some)} queries")
        longest = 2 * max(len(one.prompt_token_ids) + one.output_tokens for one in some)
        model = plain.plain_model(lambda: make_model(*self._shape, longest, self._device))
        report.plain = plain.run(
            model,
            some,
            self._case.rows,
            seconds=self._options.plain_seconds,
            tell=self._tell,
            clock=self._clock,
        )
        del model
        self._tidy()

    @property
    def _shape(self) -> tuple[str, int | None, torch.dtype]:
        return self._options.shape, self._options.layers, DTYPES[self._options.dtype]

    def _rounds(
        self, bench: MixEngine, costs: Costs, some: Sequence[Request]
    ) -> dict[str, list[tuple[Outcome, Series]]]:
        """Every method, in turns: what drifts on a machine drifts for all of them."""
        runs: dict[str, list[tuple[Outcome, Series]]] = {mode.name: [] for mode in PAPER_MODES}
        for number in range(self._options.rounds):
            for mode in PAPER_MODES:
                predicted_s = costs.predict(some, mode).seconds
                self._tell(
                    f"{mode.name}, round {number + 1}: {len(some)} queries, predicted {predicted_s:.1f} s"
                )
                series = Series()
                runs[mode.name].append((bench.run(some, mode, self._tell, series.note), series))
        return runs

    def _method(
        self, costs: Costs, some: Sequence[Request], mode: Mode, runs: Sequence[tuple[Outcome, Series]]
    ) -> MethodRun:
        """A method from its runs: that of the median time, the later one of two."""
        case = self._case
        by_time = sorted(runs, key=lambda one: one[0].seconds)
        outcome, series = by_time[len(by_time) // 2] if by_time else (None, None)
        published = case.at_published_lengths().requests(self._vocab_size)
        played = play(mode.order(published), case.rows, mode, reads_added=self._reads_added)
        return MethodRun(
            mode=mode.name,
            outcome=outcome,
            series=None if series is None else series.thinned(),
            spread_s=(by_time[0][0].seconds, by_time[-1][0].seconds) if by_time else None,
            predicted=costs.predict(some, mode),
            whole=costs.predict(self._whole, mode),
            published_steps=sum(one.steps for one in played if isinstance(one, Stretch)),
        )

    def _warm(self, bench: MixEngine) -> None:
        """A few tokens in every method: what is made or loaded at its first use is there."""
        few = [
            replace(one, prompt_token_ids=one.prompt_token_ids[:_WARM_PROMPT], output_tokens=_WARM_TOKENS)
            for one in self._whole[: 2 * self._case.rows]
        ]
        for mode in PAPER_MODES:
            bench.run(few, mode, self._tell)

    def _affordable(self, costs: Costs) -> list[Request]:
        """As many queries, all kinds by their shares, as all methods together run in the time."""
        for count in range(self._case.queries, 0, -self._case.share):
            some = self._case.requests(self._vocab_size, queries=count)
            if self._options.rounds * self._all_s(costs, some) <= self._options.seconds:
                return some
        return []

    @staticmethod
    def _all_s(costs: Costs, some: Sequence[Request]) -> float:
        return sum(costs.predict(some, mode).seconds for mode in PAPER_MODES)

    def _prompt_sizes(self) -> list[int]:
        """Prompts whose time is measured, up to the workload's longest."""
        longest = max(len(one.prompt_token_ids) for one in self._whole)
        sizes = (*PROMPT_TOKENS, *(self._case.scale * tokens for tokens in LONG_PROMPT_TOKENS))
        shorter = {max(1, size // self._case.shorter) for size in sizes}
        return sorted({*(size for size in shorter if size < longest), longest})

    def _row_sizes(self) -> tuple[int, int, int]:
        """Rows over which steps are timed: short, middle, long."""
        short, middle = self._case.step_columns
        # Without a card's kernel rows are as long as their prompts: filling a long one takes long.
        longest = max(len(one.prompt_token_ids) for one in self._whole)
        return short, middle, max(self._columns - SPARE_COLUMNS if self._reads_added else longest, middle + 1)

    def _longest_padded(self, some: Sequence[Request]) -> int:
        """Columns that a padded row may come to, those that prompts leave in it included."""
        return SPARE_COLUMNS + sum(len(one.prompt_token_ids) + one.output_tokens for one in some)

    def _tidy(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
