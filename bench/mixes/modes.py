"""Ways of batching on one engine, with the same kernels and graphs: what differs is scheduling alone.

run_to_completion   rows are given out when all are free, and idle until the longest output is done
pd                  the same, queries sorted by the length of their prompts
inline              a free row is taken at once; the newcomer's prompt is computed inside the batch, which
                    waits for it, padded over all rows that run, and leaves its columns in each of them
                    (vector shaping; iteration-level batching)
inline_ranged       the same, but rows read no columns but their own, as a ring allows
decoupled           a free row is taken at once, by a slice that was prefilled apart (vector embedding)

All are easier here than on padded tensors: prompts of the first two are computed without padding, and a row
reads no column of a longer mate. So ratios to `run_to_completion` are those of the schedule.

A padded prompt is stood for by as many copies of it: the same kernels compute it, without a mask. A running
row's added columns are read in each of its steps as its own are; what they hold is whatever stands in the
ring, so after the first of them tokens mean nothing, which forced lengths do not mind.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from batond.daemon.engine.batch.padded import PaddedBatch
from batond.daemon.engine.batch.ring import RingBatch
from batond.daemon.engine.local import LocalEngine
from batond.daemon.errors import ConfigError
from batond.daemon.requests.params import SamplingParams
from batond.daemon.scheduler.plan import Gate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from batond.bench.workloads import Request
    from batond.daemon.engine.batch.card_steps import CardSteps
    from batond.daemon.engine.batch.graphs import StepOutput
    from batond.daemon.engine.batch.prefill import PromptBatch
    from batond.daemon.engine.model.causal import CausalModel
    from batond.daemon.engine.queries.query import Query
    from batond.daemon.scheduler.plan import Plan

_HOST_POOL_BYTES: Final = 1 << 20  # Nobody is parked.
_TELL_EVERY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Mode:
    """How a workload is batched.

    Attributes:
        name: As in the tables.
        whole_batches: Rows are given out when all are free.
        shaped: Prompts are padded over all running rows.
        leaves_columns: They leave columns in them, which are read from then on.
        by_prompt: Queries are sorted by the length of their prompts.
    """

    name: str
    whole_batches: bool = False
    shaped: bool = False
    leaves_columns: bool = False
    by_prompt: bool = False

    def order(self, requests: Sequence[Request]) -> list[Request]:
        """The order in which queries get rows."""
        if not self.by_prompt:
            return list(requests)
        return sorted(requests, key=lambda request: len(request.prompt_token_ids))


MODES: Final = (
    Mode("run_to_completion", whole_batches=True),
    Mode("pd", whole_batches=True, by_prompt=True),
    Mode("inline", shaped=True, leaves_columns=True),
    Mode("inline_ranged", shaped=True),
    Mode("decoupled"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One workload in one mode.

    Attributes:
        seconds: From the first submit to the last token.
        prompt_s: Of it, steps in which a prompt was computed.
        steps: Decode steps.
        idle_row_steps: Rows times steps that computed nothing for anybody.
        output_tokens: Tokens emitted.
    """

    seconds: float
    prompt_s: float
    steps: int
    idle_row_steps: int
    output_tokens: int


class MixEngine:
    """An engine whose mode can be switched while it is idle: weights and graphs are made once.

    Args:
        model: The model.
        rows: Rows of the batch.
        columns: Columns of its ring.
        clock: Seconds, by which runs and costs are timed.

    Raises:
        ConfigError: No ring serves this model.
    """

    def __init__(
        self,
        model: CausalModel,
        rows: int,
        columns: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self.engine = LocalEngine(
            model,
            rows=rows,
            batch="ring",
            policy="fcfs",
            host_pool_bytes=_HOST_POOL_BYTES,
            chunk_tokens=None,
            ready_limit=rows,
            max_query_tokens=columns,
            session_bytes=0,
            arena="plain",
        )
        batch = self.engine.residency.batch
        if not isinstance(batch, RingBatch):
            raise ConfigError(f"the engine chose no ring: {self.engine.batch_reason}")
        self.rows, self.graph_rows = rows, tuple(batch.graph_rows) or (rows,)
        self.shaping = Shaping(self.engine, model)

    def switch(self, mode: Mode) -> None:
        """Batch as the mode has it; the engine is idle."""
        engine: Any = self.engine  # Nobody else changes these on a living engine.
        engine._gate = Gate.BATCH if mode.whole_batches else Gate.ITERATION  # noqa: SLF001
        engine._ready_limit = 0 if mode.shaped else self.rows  # noqa: SLF001 - shaped: when its row is free
        self.shaping.switch(on=mode.shaped, leaves_columns=mode.leaves_columns)

    def run(
        self,
        requests: Sequence[Request],
        mode: Mode,
        tell: Callable[[str], None],
        note: Callable[[float, int, int], None] | None = None,
    ) -> Outcome:
        """Run a workload, submitted at once.

        Args:
            requests: The queries, in order of arrival.
            mode: How to batch it.
            tell: Hears how far it is.
            note: Called after each step with seconds since the first submit, queries completed and tokens
                emitted so far.
        """
        self.switch(mode)
        engine, before = self.engine, self.engine.counters.copy()
        watch = _PromptWatch()
        engine.on_plan = watch.note
        began_s = told_s = self.clock()
        queries = [self.submit(one.prompt_token_ids, one.output_tokens) for one in mode.order(requests)]
        while engine.queries:
            step_s = self.clock()
            engine.step()
            now_s = self.clock()
            watch.seconds += (now_s - step_s) * watch.prompts
            if note is not None:
                emitted = engine.counters["output_tokens"] - before["output_tokens"]
                note(now_s - began_s, len(queries) - len(engine.queries), emitted)
            if now_s - told_s > _TELL_EVERY_S:
                told_s = now_s
                tell(f"{mode.name}: {len(engine.queries)} of {len(queries)} queries left")
        seconds = self.clock() - began_s
        engine.on_plan = None
        counts = engine.counters
        return Outcome(
            seconds=seconds,
            prompt_s=watch.seconds,
            steps=counts["decode_steps"] - before["decode_steps"],
            idle_row_steps=counts["idle_row_steps"] - before["idle_row_steps"],
            output_tokens=sum(len(query.output_token_ids) for query in queries),
        )

    def submit(self, prompt_token_ids: Sequence[int], output_tokens: int) -> Query:
        """Submit a greedy query that emits so many tokens."""
        sampling = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        return self.engine.submit(prompt_token_ids, sampling)

    def close(self) -> None:
        """Give all memory back."""
        self.engine.close()


class Shaping:
    """Makes an engine pay for a newcomer's prompt what vector shaping pays.

    Args:
        engine: Its queries are told apart by row.
        model: Its model.

    Attributes:
        added: Columns that prompts left in each row.
        rows: Rows of a prompt's forward; None is those that run and the newcomer's.
        reads_added: Whether steps read those columns: not without the card's kernel.
    """

    def __init__(self, engine: LocalEngine, model: CausalModel) -> None:
        self._residency, self._model = engine.residency, model
        self._alone = engine.residency._new_prefill_batch  # noqa: SLF001 - nobody else asks
        self._owners: list[Query | None] = [None] * engine.rows
        self._leaves_columns = False
        self.added = [0] * engine.rows
        self.rows: int | None = None
        batch: Any = engine.residency.batch
        self.reads_added = batch._on_card is not None  # noqa: SLF001 - the only door to what a step reads
        if self.reads_added:
            batch._on_card = _LongerRows(batch._on_card, self)  # noqa: SLF001 - likewise

    def switch(self, *, on: bool, leaves_columns: bool) -> None:
        """Begin or end; the engine is idle."""
        self._leaves_columns = leaves_columns
        self._owners = [None] * len(self._owners)
        self.added[:] = [0] * len(self.added)
        self._residency._new_prefill_batch = self._new_batch if on else self._alone  # noqa: SLF001

    def lengthen(self, lengths: Sequence[int]) -> list[int]:
        """What rows of these lengths read: newcomers' prompts have left their columns in who ran before."""
        self._note_newcomers()
        return [length and length + more for length, more in zip(lengths, self.added, strict=True)]

    def _note_newcomers(self) -> None:
        owners = self._residency.by_row
        if not self._leaves_columns or owners == self._owners:
            return
        came = [
            (row, query)
            for row, query in enumerate(owners)
            if query is not None and query is not self._owners[row]
        ]
        stayed = [row for row, query in enumerate(owners) if query is not None and query is self._owners[row]]
        for row in set(range(len(owners))).difference(stayed):
            self.added[row] = 0
        tokens = sum(len(query.prompt_token_ids) for _, query in came)
        for row in stayed:
            self.added[row] += tokens
        self._owners = list(owners)

    def _new_batch(self) -> PromptBatch:
        rows = len(self._residency.occupied) + 1 if self.rows is None else self.rows
        return _PaddedPrompt(self._model, rows, self._residency.batch.layout) if rows > 1 else self._alone()


class _PaddedPrompt(PaddedBatch):
    """A prompt in a batch as wide as the running one; each row computes the same."""

    def step(self, tokens: Mapping[int, Sequence[int]], *, all_positions: bool = False) -> torch.Tensor:
        """As of a batch of one row."""
        (new,) = tokens.values()
        return super().step(dict.fromkeys(range(self.rows), new), all_positions=all_positions)[:1]


class _LongerRows:
    """Lets steps read more columns of a row than it has tokens."""

    def __init__(self, steps: CardSteps, shaping: Shaping) -> None:
        self._steps, self._shaping = steps, shaping

    def run(self, tokens: Mapping[int, Sequence[int]], lengths: Sequence[int], cursor: int) -> StepOutput:
        """As `CardSteps.run`."""
        return self._steps.run(tokens, self._shaping.lengthen(lengths), cursor)

    def follow(self, rows: Sequence[int], lengths: Sequence[int], cursor: int) -> None:
        """As `run`, for a step that is launched before the tokens of the last one are known."""
        cast("Any", self._steps).follow(rows, self._shaping.lengthen(lengths), cursor)

    def __getattr__(self, name: str) -> Any:
        return getattr(cast("Any", self._steps), name)


class _PromptWatch:
    """Whether the step under way computes a prompt, and what such steps took."""

    def __init__(self) -> None:
        self.prompts, self.seconds = False, 0.0

    def note(self, plan: Plan) -> None:
        """A plan was made."""
        self.prompts = bool(plan.chunks)
