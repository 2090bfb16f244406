"""An urgent query on the whole engine: idle, and with every row taken by less urgent ones.

The engine runs in this process and is called step by step, so an arrival never finds a step half done, nor
one begun before its time: in a daemon up to one step more passes. A token counts when the step that made it
has ended, as it is sent then.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from batond.bench.gpu.timing import Spread
from batond.daemon.errors import StateError
from batond.daemon.requests.params import SamplingParams
from batond.daemon.wire.messages import QueryState

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.engine.local import LocalEngine
    from batond.daemon.engine.queries.query import Query

URGENT_TOKENS: Final = 512
_URGENT: Final = "interactive"
_FILL: Final = "batch"
_ANSWER_TOKENS: Final = 3
_SETTLE_STEPS: Final = 3
_WARM_UP: Final = 2
#: More steps than any of this takes: who waits longer waits for ever.
_MOST_STEPS: Final = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """How soon urgent queries are answered.

    Attributes:
        first_ms: From the submit to the first token, which the prompt's last chunk gives.
        second_ms: From the submit to the second token, which needs a row.
        same_step: How often the row was there in the step of the first token, and the second one came with
            it: both times are one then.
        parks: Rows taken for them.
    """

    first_ms: Spread
    second_ms: Spread
    same_step: int
    parks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Urgent:
    """Urgent queries of one length, and what a park costs the others.

    Attributes:
        rows: Of the engine, all taken.
        prompt_tokens: Of an urgent query.
        row_tokens: Of the rows in the middle of it all.
        engine_step_ms: A whole step of the engine, plan, tokens and books included, nobody coming or going.
        idle: On an idle engine.
        full: With all rows taken.
        park_ms: Time that the batch loses by parking a row.
        resume_ms: Time that it loses by taking it back.
        parked_tokens: Of the parked rows, the median.
    """

    rows: int
    prompt_tokens: int
    row_tokens: int
    engine_step_ms: Spread
    idle: Answers
    full: Answers
    park_ms: Spread
    resume_ms: Spread
    parked_tokens: int

    @property
    def of_bound(self) -> float:
        """Worst first token on the full engine by one step + 1.3 times the idle engine's median."""
        return self.full.first_ms.worst / (self.engine_step_ms.median + 1.3 * self.idle.first_ms.median)


class EngineBench:
    """Submits to an engine and times its steps.

    Args:
        engine: With nothing in it.
        vocab_size: Prompts are random ids below it.
        rounds: Of each measurement.
    """

    def __init__(self, engine: LocalEngine, vocab_size: int, rounds: int) -> None:
        self._engine, self._vocab_size, self._rounds = engine, vocab_size, rounds
        self._dice = torch.Generator().manual_seed(7)

    def run(self, prompt_tokens: int, parked_tokens: int, tell: Callable[[str], None]) -> Urgent:
        """Measure everything.

        Args:
            prompt_tokens: Of an urgent query.
            parked_tokens: About so many tokens the rows have when they are parked.
            tell: Hears what is being done.
        """
        engine = self._engine
        tell("urgent queries on an idle engine")
        idle = self._answers(prompt_tokens)
        tell(f"filling {engine.rows} rows")
        self._fill(parked_tokens)
        tell("parks and resumes of a full engine")
        step_ms = Spread.of([self._step_s() for _ in range(self._rounds)], 1e3)
        park_ms, resume_ms, parked = self._parks(step_ms.median / 1e3)
        tell("urgent queries on a full engine")
        row_tokens = max(engine.residency.batch.lengths)
        full = self._answers(prompt_tokens)
        for query in list(engine.queries.values()):
            engine.cancel(query)
        return Urgent(
            rows=engine.rows,
            prompt_tokens=prompt_tokens,
            row_tokens=row_tokens,
            engine_step_ms=step_ms,
            idle=idle,
            full=full,
            park_ms=park_ms,
            resume_ms=resume_ms,
            parked_tokens=parked,
        )

    def _answers(self, prompt_tokens: int) -> Answers:
        """Urgent queries one after the other; between two, everybody else is back in a row."""
        others = len(self._engine.queries)
        first_s, second_s, later_steps = [], [], []
        for number in range(_WARM_UP + self._rounds):
            if number == _WARM_UP:
                parks = self._engine.counters["parks"]
            began_s = time.perf_counter()
            query = self._submit(prompt_tokens, _ANSWER_TOKENS, _URGENT)
            self._until(partial(_has_tokens, query, 1))
            first_s.append(time.perf_counter() - began_s)
            later_steps.append(self._engine.counters["steps"])
            self._until(partial(_has_tokens, query, 2))
            second_s.append(time.perf_counter() - began_s)
            later_steps[-1] = self._engine.counters["steps"] - later_steps[-1]
            self._until(lambda: len(self._engine.queries) == self._running() == others)
            self._settle()
        return Answers(
            first_ms=Spread.of(first_s[_WARM_UP:], 1e3),
            second_ms=Spread.of(second_s[_WARM_UP:], 1e3),
            same_step=later_steps[_WARM_UP:].count(0),
            parks=self._engine.counters["parks"] - parks,
        )

    def _settle(self) -> None:
        """Some steps of those who are there; when the last one ends, the next query has come."""
        for _ in range(_SETTLE_STEPS - 1):
            self._engine.step()
        self._engine.arrivals = lambda: True
        self._engine.step()
        self._engine.arrivals = None

    def _fill(self, tokens: int) -> None:
        """Take all rows with queries that go on until all is measured, and are past their quantum."""
        engine = self._engine
        quantum = engine.planner.limits.quantum_tokens
        prompt_tokens = max(1, tokens - engine.rows - quantum)
        queries = [
            self._submit(prompt_tokens, engine.max_query_tokens - prompt_tokens, _FILL)
            for _ in range(engine.rows)
        ]
        self._until(
            lambda: (
                self._running() == engine.rows
                and all(query.since_admission_tokens > quantum for query in queries)
            )
        )

    def _parks(self, step_s: float) -> tuple[Spread, Spread, int]:
        """Park one row after the other by hand and take it back; what the others lose by it.

        Args:
            step_s: Of a step in which nobody comes or goes.
        """
        engine, lost_out, lost_back, tokens = self._engine, [], [], []
        running = [query for _, query in engine.residency.occupied]
        for number in range(_WARM_UP + self._rounds):
            query = running[number % len(running)]
            tokens.append(engine.residency.batch.lengths[query.row or 0])
            began_s = time.perf_counter()
            engine.park(query)
            engine.step()
            lost_out.append(time.perf_counter() - began_s - step_s)
            for _ in range(_SETTLE_STEPS):
                engine.step()
            began_s, steps = time.perf_counter(), 0
            engine.resume(query)
            while query.state is not QueryState.RUNNING:
                engine.step()
                steps += 1
            lost_back.append(time.perf_counter() - began_s - steps * step_s)
            for _ in range(_SETTLE_STEPS):
                engine.step()
        return (
            Spread.of(lost_out[_WARM_UP:], 1e3),
            Spread.of(lost_back[_WARM_UP:], 1e3),
            sorted(tokens)[len(tokens) // 2],
        )

    def _submit(self, prompt_tokens: int, output_tokens: int, sla_class: str) -> Query:
        prompt = torch.randint(self._vocab_size, (prompt_tokens,), generator=self._dice).tolist()
        sampling = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        return self._engine.submit(prompt, sampling, sla_class=sla_class)

    def _running(self) -> int:
        return len(self._engine.residency.occupied)

    def _step_s(self) -> float:
        began_s = time.perf_counter()
        self._engine.step()
        return time.perf_counter() - began_s

    def _until(self, reached: Callable[[], bool]) -> None:
        for _ in range(_MOST_STEPS):
            if reached():
                return
            self._engine.step()
        raise StateError(f"the engine did not get on in {_MOST_STEPS} steps")


def _has_tokens(query: Query, count: int) -> bool:
    return len(query.output_token_ids) >= count
