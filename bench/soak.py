"""The soak: random schedules on tiny models of different cache kinds; every query must equal its solo run.

Each schedule has a number; model, engine and moves follow from it alone, so a mismatch can be played again.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import random
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from batond.bench.draws import LONGEST_QUERY_TOKENS, Draws, byte_tokenizer
from batond.bench.families import family_names, make_family
from batond.bench.model_support import solo_tokens
from batond.bench.schedules import play
from batond.bench.solo import SoloRuns, compare
from batond.daemon.engine.local import LocalEngine
from batond.daemon.errors import ConfigError, UnsupportedModelError
from batond.daemon.requests.params import SamplingParams
from batond.daemon.scheduler.planner import PlannerLimits
from batond.daemon.wire.messages import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from batond.bench.schedules import Request, Schedule

#: One of each cache kind: full, sliding, mixed with soft caps, mixed with sinks, convolution, recurrent and
#: delta rule beside attention.
FAMILIES = ("llama", "mistral", "gemma2", "gpt_oss", "lfm2", "falcon_h1", "qwen3_next")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ANCHORED_SCHEDULES = 3  # Of each family: their greedy solo runs are compared with transformers' own.
PROGRESS_S = 5.0
TASK_SCHEDULES = 10
_ROOMY_BYTES = 1 << 22


#: What is counted, in the words of the summary.
_LABELS = {
    "schedules": "schedules",
    "queries": "queries",
    "tokens": "tokens",
    "copied": "parks with a copy",
    "dropped": "without",
    "cancel": "cancelled",
    "anchored": "solo runs equal generate",
    "ties": "ties within rounding",
}


@dataclass(frozen=True, slots=True)
class Setup:
    """Arguments of an engine that schedules are played on.

    Attributes:
        rows: Rows of the batch.
        chunk_tokens: Most prompt tokens between two steps.
        host_pool_bytes: Host RAM for parked queries; a small one makes queries lose their KV.
        ready_limit: Prefilled queries kept ahead.
        kv_budget_tokens: Most tokens in the batch; None is no bound.
        quantum_tokens: Least tokens between getting a row and losing it.
    """

    rows: int
    chunk_tokens: int | None = 5
    host_pool_bytes: int = _ROOMY_BYTES
    ready_limit: int = 1
    kv_budget_tokens: int | None = None
    quantum_tokens: int = 1


def setups(rows: int) -> tuple[Setup, ...]:
    """Engines that differ in what they keep and when; the third has hardly room for parked KV."""
    return (
        Setup(rows),
        Setup(rows, chunk_tokens=None, ready_limit=3, kv_budget_tokens=90),
        Setup(rows, host_pool_bytes=1 << 12, quantum_tokens=4),
        Setup(1, chunk_tokens=3, ready_limit=0),
    )


@dataclass(frozen=True, slots=True)
class Options:
    """What to soak.

    Attributes:
        schedules: How many.
        seed: Number of the first.
        batch: As for `LocalEngine`.
        families: Taken in turn.
        rows: Rows of the larger batches.
        dtype: Name of the models' number format; anything but float32 needs a deterministic engine.
        device: Where they run.
        workers: Processes.
    """

    schedules: int
    seed: int = 0
    batch: str = "auto"
    families: tuple[str, ...] = FAMILIES
    rows: int = 3
    dtype: str = "float32"
    device: str = "cpu"
    workers: int = 1

    def __post_init__(self) -> None:
        """Refuse what can't be soaked, by name.

        Raises:
            ConfigError: An option has no meaning.
        """
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if min(self.schedules, self.rows, self.workers) < 1:
            raise ConfigError("schedules, rows and workers must be at least 1")
        unknown = set(self.families) - set(family_names())
        if unknown or not self.families:
            raise ConfigError(f"families must be model types of transformers, not {sorted(unknown)}")

    @property
    def deterministic(self) -> bool:
        """Whether every number must come out the same whatever the load."""
        return self.dtype != "float32"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A schedule that went otherwise than alone.

    Attributes:
        number: Of the schedule.
        family: Its model.
        faults: What differed, in words.
        schedule: What was played.
    """

    number: int
    family: str
    faults: tuple[str, ...]
    schedule: Schedule

    def describe(self, options: Options) -> str:
        """The faults, the schedule, and how to play it again."""
        command = (
            f"python -m batond.bench soak --seed {self.number} --schedules 1 --family {self.family}"
            f" --batch {options.batch} --rows {options.rows} --dtype {options.dtype}"
            f" --device {options.device}"
        )
        faults = "\n".join(f"  {fault}" for fault in self.faults)
        title = f"MISMATCH in schedule {self.number} ({self.family}):"
        return f"{title}\n{faults}\n{self.schedule}\n  again: {command}"


@dataclass(slots=True)
class Report:
    """What a soak found.

    Attributes:
        counts: Schedules, queries, tokens and moves.
        batches: Kind of batch by family.
        skipped: Families that the engine refuses, and why.
        mismatches: Schedules that went wrong.
        seconds: Time taken.
    """

    counts: Counter[str] = field(default_factory=Counter)
    batches: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    mismatches: list[Mismatch] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, part: Report) -> None:
        """Take over what a part of the soak found."""
        self.counts.update(part.counts)
        self.batches |= part.batches
        self.skipped |= part.skipped
        self.mismatches += part.mismatches

    @property
    def passed(self) -> bool:
        """Whether something was compared, and nothing differed."""
        return bool(self.counts["schedules"]) and not self.mismatches

    def summary(self) -> str:
        """One line."""
        counts, rate = self.counts, self.counts["schedules"] / max(self.seconds, 1e-9)
        parts = [f"{counts[name]} {label}" for name, label in _LABELS.items()]
        parts.append(f"{len(self.mismatches)} mismatches; {rate:.1f} schedules/s")
        return f"{'OK' if self.passed else 'FAILED'}: {', '.join(parts)}"


def run(options: Options, say: Callable[[str], None]) -> Report:
    """Play the schedules and compare.

    Args:
        options: What to play.
        say: Told of progress and mismatches, a line or a few at a time.
    """
    report, began_s, said_s = Report(), time.monotonic(), time.monotonic()
    for part in _play_all(options):
        report.add(part)
        report.seconds = time.monotonic() - began_s
        for mismatch in part.mismatches:
            say(mismatch.describe(options))
        if time.monotonic() - said_s > PROGRESS_S:
            said_s = time.monotonic()
            say(f"... {report.summary()}")
    return report


def _play_all(options: Options) -> Iterator[Report]:
    """Play all schedules here or in other processes; a report for each few."""
    tasks = list(_tasks(options))
    if options.workers == 1:
        yield from (_play_some(options, family, numbers) for family, numbers in tasks)
        return
    with contextlib.ExitStack() as stack:
        context = multiprocessing.get_context("spawn")  # Torch's threads don't survive a fork.
        workers = [
            stack.enter_context(concurrent.futures.ProcessPoolExecutor(1, context, _one_thread))
            for _ in range(options.workers)
        ]
        # A family stays where its engines and solo runs are.
        home = {family: place for place, family in enumerate(options.families)}
        parts = [
            workers[(home[family] + place // len(home) * len(home)) % len(workers)].submit(
                _play_some, options, family, numbers
            )
            for place, (family, numbers) in enumerate(tasks)
        ]
        yield from (part.result() for part in concurrent.futures.as_completed(parts))


def _one_thread() -> None:
    torch.set_num_threads(1)  # Tiny tensors: more threads only wait for each other.


def _tasks(options: Options) -> Iterator[tuple[str, list[int]]]:
    """Some numbers of one family at a time, the families in turn."""
    count, numbers = len(options.families), range(options.seed, options.seed + options.schedules)
    for first in range(0, len(numbers), TASK_SCHEDULES * count):
        several = numbers[first : first + TASK_SCHEDULES * count]
        for place, family in enumerate(options.families):
            mine = [number for number in several if number % count == place]
            if mine:
                yield family, mine


_stands: dict[tuple[Options, str], _Stand | UnsupportedModelError] = {}  # Of this process.


def _play_some(options: Options, family: str, numbers: Sequence[int]) -> Report:
    """Play some schedules of a family in this process."""
    stand = _stands.get((options, family))
    if stand is None:
        try:
            stand = _Stand(family, options)
        except UnsupportedModelError as error:
            stand = error
        _stands[options, family] = stand
    if isinstance(stand, UnsupportedModelError):
        return Report(skipped={family: stand.message})
    report = Report(batches={family: stand.batch_kind})
    for number in numbers:
        mismatch = stand.play(number, report.counts)
        report.mismatches += [] if mismatch is None else [mismatch]
    return report


class _Stand:
    """One family: its model, its engines, and the solo runs of its requests."""

    def __init__(self, family: str, options: Options) -> None:
        self.family, self.options = family, options
        self._model = make_family(family).to(device=options.device, dtype=DTYPES[options.dtype])
        self._tokenizer = byte_tokenizer()
        self._setups = setups(options.rows)
        self._engines: dict[Setup, LocalEngine] = {}
        self._solos: dict[Setup, SoloRuns] = {}
        # In fp32 one undisturbed run serves all: how it was cut into chunks must not matter.
        self._plain = Setup(options.rows, chunk_tokens=None)
        first = self.engine(self._setups[0])
        self.batch_kind = first.batch_kind
        self._draws = Draws(first)
        self._anchored = 0

    def engine(self, setup: Setup) -> LocalEngine:
        """The engine of a setup; made when first asked for."""
        if setup not in self._engines:
            self._engines[setup] = self._make(setup)
        return self._engines[setup]

    def play(self, number: int, counts: Counter[str]) -> Mismatch | None:
        """Play the schedule of a number and compare all its queries."""
        rng = random.Random(number)  # noqa: S311 - for schedules, not for secrets
        setup = rng.choice(self._setups)
        schedule = self._draws.schedule(rng)
        try:
            faults = list(self._faults(setup, schedule, counts))
        except Exception:  # noqa: BLE001 - whatever an engine dies of is a finding
            self._engines.pop(setup, None)  # It is in an unknown state.
            faults = traceback.format_exc().splitlines()[-12:]
        counts["schedules"] += 1
        return Mismatch(number, self.family, (str(setup), *faults), schedule) if faults else None

    def _faults(self, setup: Setup, schedule: Schedule, counts: Counter[str]) -> Iterable[str]:
        solo = self._solo(setup)
        player = play(self.engine(setup), schedule, solo.outcome)
        for place, arrival in enumerate(schedule.arrivals):
            verdict = compare(player, place, arrival.request, solo, exact=self.options.deterministic)
            yield from (f"query {place}: {fault}" for fault in verdict.faults)
            counts["ties"] += verdict.ties
            counts["queries"] += 1
            counts["tokens"] += len(player.queries[place].output_token_ids)
        counts.update(player.counts)
        if self._anchored < ANCHORED_SCHEDULES and not self.options.deterministic:
            self._anchored += 1
            for place, arrival in enumerate(schedule.arrivals):
                if (plain := _plain_greedy(arrival.request)) is not None:
                    counts["anchored"] += 1
                    yield from (f"query {place}: {fault}" for fault in self._anchor_faults(plain, solo))

    def _anchor_faults(self, request: Request, solo: SoloRuns) -> Iterable[str]:
        """Compare a solo run with transformers' own `generate`."""
        found = solo.outcome(request)
        expected = solo_tokens(self._model, request.prompt_token_ids, request.sampling.max_tokens)
        stops = set(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            stops |= self.engine(self._setups[0]).model.eos_token_ids
        ends = [place + 1 for place, token in enumerate(expected) if token in stops]
        expected = expected[: ends[0]] if ends else expected
        if list(found.token_ids) != expected:
            yield f"alone it gave {list(found.token_ids)}, transformers gives {expected}"
        if found.finish_reason is not (FinishReason.STOP if ends else FinishReason.LENGTH):
            yield f"alone it ended by {found.finish_reason}"

    def _solo(self, setup: Setup) -> SoloRuns:
        plain = setup if self.options.deterministic else self._plain
        if plain not in self._solos:
            self._solos[plain] = SoloRuns(self._make(plain))
        return self._solos[plain]

    def _make(self, setup: Setup) -> LocalEngine:
        options: dict[str, Any] = {"deterministic": True} if self.options.deterministic else {}
        if setup.kv_budget_tokens is not None:
            layout = self.engine(self._setups[0]).residency.batch.layout
            options["kv_budget_bytes"] = layout.nbytes(setup.kv_budget_tokens)
        return LocalEngine(
            self._model,
            self._tokenizer,
            rows=setup.rows,
            batch=self.options.batch,
            device=self.options.device,
            host_pool_bytes=setup.host_pool_bytes,
            chunk_tokens=setup.chunk_tokens,
            ready_limit=setup.ready_limit,
            max_query_tokens=LONGEST_QUERY_TOKENS,  # A small ring wraps often.
            limits=PlannerLimits(quantum_tokens=setup.quantum_tokens, max_parks=64),
            poison=True,
            **options,
        )


def _plain_greedy(request: Request) -> Request | None:
    """The request, less what only adds to its answer, if it is greedy and nothing bends its logits."""
    sampling = request.sampling
    kept = SamplingParams(
        max_tokens=sampling.max_tokens,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=sampling.stop_token_ids,
    )
    return replace(request, sampling=kept) if sampling.temperature == 0.0 else None
