"""The absolute run: plain transformers, static batches through `generate`, kernel by kernel, a growing cache.

    prompt   padded on the left to the batch's longest prompt
    step     the model's own forward: no graph, no compiled part, DynamicCache grows by a column
    batch    ends with its longest output; whoever is done earlier idles

This is how the paper ran its baseline. The engine has no part in it: not the attention, not the cache.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import StoppingCriteriaList

from batond.bench.paper.series import Series

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batond.bench.workloads import Request

_PAD = 0
_WARM_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRun:
    """What came of it.

    Attributes:
        seconds: From the first batch's start to the last one's end, or to when the time was over.
        batches: Done in that time, the one under way not counted.
        all_batches: Of the workload.
        steps: Decode steps.
        output_tokens: Emitted for queries that were not done yet.
        whole_s: Of the whole workload: measured where all of it was run, otherwise worked out from the steps
            and prompts that were.
        series: Over time; a query is completed when its batch is.
    """

    seconds: float
    batches: int
    all_batches: int
    steps: int
    output_tokens: int
    whole_s: float
    series: Series

    @property
    def complete(self) -> bool:
        """Whether the whole workload was run."""
        return self.batches == self.all_batches


class _Watch:
    """A stopping criterion: notes when each step of a batch is over, ends it when the time is over."""

    def __init__(self, clock: Callable[[], float], until_s: float) -> None:
        self.clock, self.until_s = clock, until_s
        self.ends_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:  # noqa: ARG002
        if input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)
        now_s = self.clock()
        self.ends_s.append(now_s)
        return torch.full((len(input_ids),), now_s > self.until_s, device=input_ids.device)

    @property
    def over(self) -> bool:
        """Whether the batch was cut off."""
        return bool(self.ends_s) and self.ends_s[-1] > self.until_s


@dataclass(frozen=True, slots=True)
class _Batch:
    """A static batch: columns of its padded prompts, and steps of its longest output."""

    requests: Sequence[Request]

    @property
    def columns(self) -> int:
        return max(len(one.prompt_token_ids) for one in self.requests)

    @property
    def tokens(self) -> int:
        return max(one.output_tokens for one in self.requests)

    def emitted(self, steps: int) -> int:
        """Tokens for queries that were not done yet, after so many steps, the prompt's own token counted."""
        return sum(min(one.output_tokens, steps) for one in self.requests)


def run(
    model: Any,
    requests: Sequence[Request],
    rows: int,
    *,
    seconds: float,
    tell: Callable[[str], None],
    clock: Callable[[], float] = time.perf_counter,
) -> PlainRun:
    """Run a workload in static batches, in order of arrival.

    Args:
        model: A causal language model of transformers, as it makes it; on its device.
        requests: The queries.
        rows: Batch size.
        seconds: When it is cut off; what is left is worked out.
        tell: Hears how far it is.
        clock: Seconds.
    """
    batches = [_Batch(requests[place : place + rows]) for place in range(0, len(requests), rows)]
    _generate(model, _Batch(requests[:rows]), _Watch(clock, math.inf), _WARM_TOKENS)
    series, costs = Series(), _Costs()
    began_s = clock()
    done = completed = emitted = steps = 0
    for batch in batches:
        watch, batch_s = _Watch(clock, began_s + seconds), clock()
        _generate(model, batch, watch, batch.tokens)
        costs.note(batch, batch_s, watch.ends_s)
        steps += len(watch.ends_s) - 1  # The first token comes from the prompt.
        for place, end_s in enumerate(watch.ends_s, 1):
            last = place == batch.tokens
            queries = completed + (len(batch.requests) if last else 0)
            series.note(end_s - began_s, queries, emitted + batch.emitted(place))
        emitted += batch.emitted(len(watch.ends_s))
        if len(watch.ends_s) < batch.tokens:
            break
        done, completed = done + 1, completed + len(batch.requests)
        tell(f"plain transformers: {done} of {len(batches)} batches")
        if watch.over:
            break
    took_s = clock() - began_s
    return PlainRun(
        seconds=took_s,
        batches=done,
        all_batches=len(batches),
        steps=steps,
        output_tokens=emitted,
        whole_s=took_s if done == len(batches) else sum(map(costs.seconds, batches)),
        series=series,
    )


def _generate(model: Any, batch: _Batch, watch: _Watch, tokens: int) -> None:
    """Emit so many tokens a row, whatever they are, unless the watch ends it."""
    columns, device = batch.columns, model.device
    prompts = [list(one.prompt_token_ids) for one in batch.requests]
    ids = [[_PAD] * (columns - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (columns - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    with torch.inference_mode():
        model.generate(
            input_ids=torch.tensor(ids, device=device),
            attention_mask=torch.tensor(mask, device=device),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=_PAD,
            stopping_criteria=StoppingCriteriaList([cast("Any", watch)]),
        )


class _Costs:
    """What was seen of prompts and steps, for what was not run: a step is a fixed time and one a column."""

    def __init__(self) -> None:
        self._prompt_tokens = 0
        self._prompt_s = 0.0
        self._steps: list[tuple[int, float]] = []

    def note(self, batch: _Batch, began_s: float, ends_s: Sequence[float]) -> None:
        rows = len(batch.requests)
        self._prompt_tokens += rows * batch.columns
        self._prompt_s += ends_s[0] - began_s
        self._steps += [
            (rows * (batch.columns + place), end - begin)
            for place, (begin, end) in enumerate(itertools.pairwise(ends_s), 1)
        ]

    def seconds(self, batch: _Batch) -> float:
        """Of a whole batch."""
        rows, steps = len(batch.requests), batch.tokens - 1
        prompt_s = self._prompt_s * rows * batch.columns / self._prompt_tokens
        fixed_s, column_s = self._fit
        columns = rows * (steps * batch.columns + steps * (steps + 1) // 2)
        return prompt_s + steps * fixed_s + columns * column_s

    @property
    def _fit(self) -> tuple[float, float]:
        if not self._steps:
            return 0.0, 0.0
        seen = torch.tensor(self._steps, dtype=torch.float64)
        mean = seen.mean(dim=0)
        apart = seen - mean
        spread = float((apart[:, 0] ** 2).sum())
        slope = float((apart[:, 0] * apart[:, 1]).sum()) / spread if spread else 0.0
        slope = min(max(slope, 0.0), float(mean[1] / mean[0]))  # Neither part can be below nothing.
        return float(mean[1]) - slope * float(mean[0]), slope


def plain_model(build: Callable[[], Any]) -> Any:
    """A model as transformers makes it, ready to generate.

    Args:
        build: Makes it on its device.
    """
    model = cast("Any", build()).eval()
    model.generation_config.eos_token_id = None  # Lengths are forced.
    return model
