"""What steps and prompts cost, measured at a few sizes; with the schedule, that predicts a workload's time.

    step     fixed(graph) + column x columns of all rows + longest x columns of the row that has most
    prompt   between the sizes measured, in proportion; so between one row and all rows
    total    all prompts + all steps

The row that has most counts by itself: a kernel is not done before its longest row is.
"""

from __future__ import annotations

import bisect
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from batond.bench.mixes.modes import MODES
from batond.bench.mixes.schedule import Prompt, play

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batond.bench.mixes.modes import MixEngine, Mode
    from batond.bench.mixes.schedule import Stretch
    from batond.bench.workloads import Request

_PROMPT_ROUNDS: Final = 3
_WARM_STEPS: Final = 6
_STEP_ROUNDS: Final = 3
_ROUND_STEPS: Final = 8
_FILL_TOKENS: Final = 16
_SHAPED: Final = next(mode for mode in MODES if mode.shaped)
_PLAIN: Final = next(mode for mode in MODES if not mode.shaped and not mode.whole_batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """Steps of one size.

    Attributes:
        columns: That they read, all rows together.
        longest: Of the row that has most.
        seconds: Of one.
    """

    columns: int
    longest: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """A captured step's time by what it reads.

    Attributes:
        rows: It computes.
        fixed_s: Whatever it reads.
        column_s: A column.
        longest_s: A column of the row that has most.
        points: From which that was fitted.
    """

    rows: int
    fixed_s: float
    column_s: float
    longest_s: float
    points: tuple[StepPoint, ...]

    @classmethod
    def fit(cls, rows: int, points: Sequence[StepPoint]) -> StepCost:
        """The non-negative costs that miss the points least, relative to their times."""
        wanted = [0, 1, 2]
        while True:
            table = [[1.0, one.columns, one.longest] for one in points]
            scaled = torch.tensor(
                [
                    [row[place] / one.seconds for place in wanted]
                    for row, one in zip(table, points, strict=True)
                ],
                dtype=torch.float64,
            )
            # Columns count in thousands: the solver wants numbers of one size.
            size = scaled.abs().amax(dim=0)
            target = torch.ones(len(points), 1, dtype=torch.float64)
            found = torch.linalg.lstsq(scaled / size, target, driver="gelsd").solution[:, 0] / size
            costs = dict(zip(wanted, found.tolist(), strict=True))
            below = [place for place, cost in costs.items() if cost < 0]
            if not below:
                return cls(
                    rows=rows,
                    fixed_s=costs.get(0, 0.0),
                    column_s=costs.get(1, 0.0),
                    longest_s=costs.get(2, 0.0),
                    points=tuple(points),
                )
            wanted.remove(max(below))

    def seconds(self, stretch: Stretch) -> float:
        """Of all its steps."""
        return (
            stretch.steps * self.fixed_s
            + stretch.all_columns * self.column_s
            + stretch.all_longest * self.longest_s
        )

    @property
    def worst_miss(self) -> float:
        """How far a point is from what is fitted, relative."""

        def miss(one: StepPoint) -> float:
            fitted = self.fixed_s + self.column_s * one.columns + self.longest_s * one.longest
            return abs(fitted / one.seconds - 1)

        return max(map(miss, self.points))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCost:
    """Time of a prompt's forward, first token and handing over included.

    Attributes:
        rows: Of the forward; all but one are padding.
        points: Tokens and seconds, ascending.
    """

    rows: int
    points: tuple[tuple[int, float], ...]

    def seconds(self, tokens: int) -> float:
        """Of a prompt: in proportion between the points, and beyond them as between the nearest two."""
        if len(self.points) == 1:
            return self.points[0][1]
        place = bisect.bisect([size for size, _ in self.points], tokens)
        place = min(max(place, 1), len(self.points) - 1)
        (low, low_s), (high, high_s) = self.points[place - 1 : place + 1]
        return max(0.0, low_s + (high_s - low_s) * (tokens - low) / (high - low))


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Everything that a prediction needs.

    Attributes:
        rows: Of the batch.
        steps: By rows of the graph, ascending.
        prompts: In one row, and padded over all.
        reads_added: Whether steps read the columns that prompts leave in running rows.
    """

    rows: int
    steps: tuple[StepCost, ...]
    prompts: tuple[PromptCost, ...]
    reads_added: bool

    def predict(self, requests: Sequence[Request], mode: Mode) -> Prediction:
        """Time of a workload in a mode."""
        prediction = Prediction()
        for one in play(mode.order(requests), self.rows, mode, reads_added=self.reads_added):
            if isinstance(one, Prompt):
                prediction.prompt_s += self._prompt_s(one)
            else:
                cost = next(cost for cost in self.steps if cost.rows >= one.top_rows)
                prediction.step_s += cost.seconds(one)
                prediction.steps += one.steps
        return prediction

    def _prompt_s(self, prompt: Prompt) -> float:
        first, *others = (cost.seconds(prompt.tokens) for cost in self.prompts)
        if not others:
            return first
        return first + (others[-1] - first) * (prompt.rows - 1) / (self.prompts[-1].rows - 1)


@dataclass(slots=True)
class Prediction:
    """A workload's time in one mode.

    Attributes:
        prompt_s: All prompts.
        step_s: All decode steps.
        steps: How many.
    """

    prompt_s: float = 0.0
    step_s: float = 0.0
    steps: int = 0

    @property
    def seconds(self) -> float:
        """Together."""
        return self.prompt_s + self.step_s


@dataclass(frozen=True, slots=True)
class Meter:
    """Measures the costs on an idle engine.

    Args:
        bench: The engine.
        vocab_size: Prompts are random ids below it.
        tell: Hears what is being done.
    """

    bench: MixEngine
    vocab_size: int
    tell: Callable[[str], None]
    dice: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(3))

    def measure(self, prompt_tokens: Sequence[int], columns: Sequence[int]) -> Costs:
        """Everything.

        Args:
            prompt_tokens: Sizes of prompts, ascending.
            columns: Sizes of rows: a short one, a middle one, a long one.
        """
        rows = self.bench.rows
        steps = []
        for graph in self.bench.graph_rows:
            self.tell(f"steps of {graph} rows")
            points = [self._step(lengths) for lengths in step_shapes(graph, columns)]
            steps.append(StepCost.fit(graph, points))
        prompts = []
        for width in dict.fromkeys((1, rows)):
            self.tell(f"prompts in {width} row(s)")
            prompts.append(self._prompts(prompt_tokens, width))
        return Costs(
            rows=rows,
            steps=tuple(steps),
            prompts=tuple(prompts),
            reads_added=self.bench.shaping.reads_added,
        )

    def _step(self, lengths: Sequence[int]) -> StepPoint:
        """Steps over rows that read so many columns each."""
        bench, engine = self.bench, self.bench.engine
        bench.switch(_PLAIN)
        added = bench.shaping.reads_added  # Else rows are as long as their prompts.
        prompts = [min(length, _FILL_TOKENS) if added else length for length in lengths]
        queries = [bench.submit(self._prompt(prompt), 1 + self._steps + 1) for prompt in prompts]
        while not all(query.row is not None for query in queries):
            engine.step()
        for query, length, prompt in zip(queries, lengths, prompts, strict=True):
            bench.shaping.added[query.row or 0] = length - prompt
        for _ in range(_WARM_STEPS):
            engine.step()
        seconds = []
        for _ in range(_STEP_ROUNDS):
            began_s = bench.clock()
            for _ in range(_ROUND_STEPS):
                engine.step()
            seconds.append((bench.clock() - began_s) / _ROUND_STEPS)
        for query in queries:
            engine.cancel(query)
        return StepPoint(columns=sum(lengths), longest=max(lengths), seconds=statistics.median(seconds))

    @property
    def _steps(self) -> int:
        return _WARM_STEPS + _STEP_ROUNDS * _ROUND_STEPS + self.bench.rows  # They come one after the other.

    def _prompts(self, sizes: Sequence[int], rows: int) -> PromptCost:
        """Prompts in a forward of so many rows. Lengths differ a little, as they do in a workload."""
        bench = self.bench
        bench.switch(_SHAPED if rows > 1 else _PLAIN)
        bench.shaping.rows = rows
        points = []
        self._prompt_s(sizes[0])  # Libraries wake up.
        for size in sizes:
            times = [self._prompt_s(max(1, size - number)) for number in range(_PROMPT_ROUNDS)]
            points.append((size, statistics.median(times)))
        bench.shaping.rows = None
        bench.switch(_PLAIN)
        return PromptCost(rows=rows, points=tuple(points))

    def _prompt_s(self, tokens: int) -> float:
        query = self.bench.submit(self._prompt(tokens), 1)
        began_s = self.bench.clock()
        while query.live:
            self.bench.engine.step()
        return self.bench.clock() - began_s

    def _prompt(self, tokens: int) -> list[int]:
        return torch.randint(self.vocab_size, (tokens,), generator=self.dice).tolist()


def step_shapes(rows: int, columns: Sequence[int]) -> list[list[int]]:
    """Columns of each row, for the fit: all alike, and one row longer than the others."""
    short, middle, long = columns
    shapes = [[short] * rows, [middle] * rows]
    if rows > 1:
        shapes += [[long] + [short] * (rows - 1), [long] + [middle] * (rows - 1)]
    else:
        shapes.append([long])
    return shapes
