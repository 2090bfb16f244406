"""The same queries without and with forced parks: every token must be the same.

    undisturbed   all are submitted, and run until done
    disturbed     the same; before each step some running ones are parked by hand, some parked ones resumed

Rows are as many in both, and the engine is `deterministic`: in half precision a kernel's rounding follows
from its shape, so that shapes must not follow from who is there. What is left to find is a token that a park
or a resume has changed.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from batond.bench.gpu import machine
from batond.bench.gpu.run import DTYPES
from batond.bench.gpu.sizes import SHAPES
from batond.bench.mixes.run import build
from batond.bench.workloads import Request
from batond.daemon.engine.local import LocalEngine
from batond.daemon.errors import ConfigError
from batond.daemon.requests.params import SamplingParams
from batond.daemon.wire.messages import QueryState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from batond.daemon.engine.queries.query import Query

_TELL_EVERY_S: Final = 5.0
_PARK_SHARE: Final = 0.03  # Of the running queries, before each step.
_RESUME_SHARE: Final = 0.2  # Of the parked ones.
_PROMPT_TOKENS: Final = (8, 96)
_OUTPUT_TOKENS: Final = (16, 64)
_POOL_BYTES: Final = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to run.

    Attributes:
        queries: How many.
        rows: Rows of the batch.
        shape: Name of the model's shape.
        layers: Layers of it; None is all.
        dtype: Of weights and KV.
        device: "cuda", "cuda:1", ... or "cpu".
        seed: Of prompts, lengths and parks.
        shorter: All lengths are divided by this.
    """

    queries: int = 1000
    rows: int = 32
    shape: str = "llama-2-7b"
    layers: int | None = 4
    dtype: str = "bfloat16"
    device: str = "cuda"
    seed: int = 0
    shorter: int = 1

    def __post_init__(self) -> None:
        """Refuse what has no meaning.

        Raises:
            ConfigError: An option has none.
        """
        if self.shape not in SHAPES:
            raise ConfigError(f"--shape must be one of {', '.join(SHAPES)}, not {self.shape!r}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        least = min(self.queries, self.rows, self.shorter, 1 if self.layers is None else self.layers)
        if least < 1:
            raise ConfigError("--queries, --rows, --shorter and --layers must be at least 1")

    def requests(self) -> list[Request]:
        """Prompts and forced output lengths."""
        dice = random.Random(self.seed)  # noqa: S311 - a repeatable workload, not a secret
        vocab_size = SHAPES[self.shape].vocab_size

        def length(bounds: tuple[int, int]) -> int:
            return max(2, dice.randint(*bounds) // self.shorter)

        return [
            Request(
                tuple(dice.randrange(3, vocab_size) for _ in range(length(_PROMPT_TOKENS))),
                length(_OUTPUT_TOKENS),
            )
            for _ in range(self.queries)
        ]


DEFAULTS: Final = Options()


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A query that came out otherwise.

    Attributes:
        number: Of the query.
        place: Of the first token that differs.
        parks: How often it was parked.
        before: Places after which it was parked.
    """

    number: int
    place: int
    parks: int
    before: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class Report:
    """What came of it.

    Attributes:
        queries: How many.
        tokens: Output tokens that were compared.
        parks: Made by hand.
        parked: Queries that were parked at least once.
        recomputed_tokens: Tokens whose KV did not come back from the host: parks are copies, as a rule.
        mismatches: Queries whose tokens differ.
        seconds: Undisturbed, disturbed.
        batch: What the engine chose, and why.
        machine: Card, driver, versions.
    """

    queries: int
    tokens: int
    parks: int
    parked: int
    recomputed_tokens: int
    mismatches: list[Mismatch]
    seconds: tuple[float, float]
    batch: str
    machine: dict[str, str]

    @property
    def passed(self) -> bool:
        """Whether something was parked, and nothing differs."""
        return self.parks > 0 and not self.mismatches

    def lines(self) -> list[str]:
        """For people."""
        said = [", ".join(f"{name} {value}" for name, value in self.machine.items())]
        said += [f"batch {self.batch}"]
        said += [
            f"MISMATCH: query {one.number} differs from token {one.place} on; parked after {one.before}"
            for one in self.mismatches[:10]
        ]
        plain_s, parked_s = self.seconds
        said.append(
            f"{'OK' if self.passed else 'FAILED'}: {self.queries} queries, {self.tokens:,} tokens,"
            f" {self.parks:,} parks of {self.parked} queries, {self.recomputed_tokens:,} tokens computed"
            f" again; {len(self.mismatches)} queries differ; {plain_s:.1f} s undisturbed,"
            f" {parked_s:.1f} s with parks"
        )
        return said


def run(options: Options, tell: Callable[[str], None]) -> Report:
    """Run the queries twice and compare.

    Args:
        options: What to run.
        tell: Hears what is being done.

    Raises:
        ConfigError: There is no such device.
        UnsupportedModelError: The model can't be served deterministically.
    """
    device = machine.require_device(options.device)
    requests = options.requests()
    columns = max(len(one.prompt_token_ids) + one.output_tokens for one in requests) + 1
    tell(f"engine of {options.rows} rows and {columns} columns")
    model = build(options.shape, options.layers, DTYPES[options.dtype], columns, device)
    engine = LocalEngine(
        model,
        rows=options.rows,
        batch="ring",
        policy="fcfs",
        host_pool_bytes=_POOL_BYTES,
        max_query_tokens=columns,
        ready_limit=options.rows,
        session_bytes=0,
        deterministic=True,
    )
    try:
        tell(f"{len(requests)} queries, undisturbed")
        plain, plain_s = _run(engine, requests, None, tell)
        before = engine.counters.copy()
        tell(f"{len(requests)} queries, with parks")
        disturber = _Disturber(engine, options.seed)
        parked, parked_s = _run(engine, requests, disturber, tell)
        engine.check_integrity()
        return Report(
            queries=len(requests),
            tokens=sum(len(query.output_token_ids) for query in parked),
            parks=disturber.parks,
            parked=sum(query.parks > 0 for query in parked),
            recomputed_tokens=engine.counters["recomputed_tokens"] - before["recomputed_tokens"],
            mismatches=list(_mismatches(plain, parked, disturber)),
            seconds=(plain_s, parked_s),
            batch=engine.batch_reason,
            machine=machine.describe(device),
        )
    finally:
        engine.close()


def _run(
    engine: LocalEngine,
    requests: Sequence[Request],
    disturber: _Disturber | None,
    tell: Callable[[str], None],
) -> tuple[list[Query], float]:
    """Run all queries; returns them in order, and the seconds it took."""
    began_s = told_s = time.perf_counter()
    queries = [
        engine.submit(
            one.prompt_token_ids, SamplingParams(max_tokens=one.output_tokens, ignore_eos=True), seed=number
        )
        for number, one in enumerate(requests)
    ]
    while engine.queries:
        if disturber is not None:
            disturber.disturb()
        engine.step()
        if time.perf_counter() - told_s > _TELL_EVERY_S:
            told_s = time.perf_counter()
            tell(f"{len(engine.queries)} of {len(queries)} queries left")
    return queries, time.perf_counter() - began_s


class _Disturber:
    """Parks running queries by hand and resumes parked ones, by dice.

    Attributes:
        parks: How many it made.
        places: Output tokens that a query had when it was parked, by its id.
    """

    def __init__(self, engine: LocalEngine, seed: int) -> None:
        self._engine, self._dice = engine, random.Random(seed)  # noqa: S311 - for a schedule, no secret
        self._held: list[Query] = []
        self.parks = 0
        self.places: dict[str, list[int]] = {}

    def disturb(self) -> None:
        """Before a step."""
        for _, query in self._engine.residency.occupied:
            if self._dice.random() < _PARK_SHARE:
                self._engine.park(query)
                self._held.append(query)
                self.places.setdefault(query.query_id, []).append(len(query.output_token_ids))
                self.parks += 1
        # Without anybody else to step for, all come back: nothing would move.
        share = _RESUME_SHARE if self._engine.busy else 1.0
        staying = []
        for query in self._held:
            if query.state is QueryState.PARKED and self._dice.random() < share:
                self._engine.resume(query)
            elif query.live:
                staying.append(query)
        self._held = staying


def _mismatches(plain: Sequence[Query], parked: Sequence[Query], disturber: _Disturber) -> Iterator[Mismatch]:
    for number, (one, other) in enumerate(zip(plain, parked, strict=True)):
        if one.output_token_ids == other.output_token_ids:
            continue
        pairs = zip(one.output_token_ids, other.output_token_ids, strict=False)
        shorter = min(len(one.output_token_ids), len(other.output_token_ids))
        place = next((place for place, (left, right) in enumerate(pairs) if left != right), shorter)
        places = tuple(disturber.places.get(other.query_id, ()))
        yield Mismatch(number, place, other.parks, places)
