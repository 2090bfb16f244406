"""A regression check of scheduling, in steps: the same on every machine, and done in seconds.

    played   both tables at the published lengths, without computing anything: what a schedule comes to
    ring     an engine of a few weights runs short mixes in every method: it must take its schedule's steps
    padded   the same on padded tensors, whose columns follow from what is shaped, embedded and released

What is counted is compared with expected.json. Any difference is a fault, fewer steps too: look at it, then
`python -m batond.bench smoke --accept` takes it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from batond.bench import engine as engine_bench
from batond.bench.mixes.modes import MixEngine
from batond.bench.mixes.run import MIX_SEED
from batond.bench.mixes.schedule import Stretch, play
from batond.bench.paper.cases import METHODS, PAPER_MODES, cases
from batond.daemon.engine.model.causal import CausalModel
from batond.daemon.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from batond.bench.mixes.modes import Mode
    from batond.bench.workloads import Request

EXPECTED: Final = Path(__file__).with_name("expected.json")
#: Published lengths over those that are run, and queries of a mix: enough for every method to differ.
_SHORTER: Final = {1: 200, 2: 16}
_QUERIES: Final = 16
_BATCHES: Final = ((1, 8), (2, 4))
_PADDED: Final = (1, 8)
_VOCAB: Final = 64


@dataclass(frozen=True, slots=True)
class Count:
    """What a method took, in steps.

    Attributes:
        steps: Decode steps.
        idle_row_steps: Rows times steps that computed nothing for anybody.
        columns: Columns of all rows that all steps read; on padded tensors, columns of each row. -1 where an
            engine did not take its schedule's steps.
    """

    steps: int
    idle_row_steps: int
    columns: int


#: Counts of a method, by what was run ("ring table1-batch8") and name of the mode.
Counts = dict[str, dict[str, Count]]


@dataclass(slots=True)
class Verdict:
    """The comparison.

    Attributes:
        expected: As stored.
        found: As counted.
        faults: Differences, in words.
    """

    expected: Counts
    found: Counts
    faults: list[str] = field(default_factory=list)


def measure() -> Counts:
    """Count everything, on one thread."""
    found: Counts = {}
    for case in cases((1, 2), queries=120, mix_seed=MIX_SEED):
        requests = case.requests(_VOCAB)
        found[f"played {case.name}"] = {
            mode.name: played(mode.order(requests), case.rows, mode) for mode in PAPER_MODES
        }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # Tiny tensors: more threads only wait for each other.
    try:
        found.update(_on_engines())
    finally:
        torch.set_num_threads(threads)
    return found


def played(requests: Sequence[Request], rows: int, mode: Mode) -> Count:
    """What a schedule comes to, by arithmetic."""
    stretches = [one for one in play(requests, rows, mode) if isinstance(one, Stretch)]
    return Count(
        steps=sum(one.steps for one in stretches),
        idle_row_steps=sum(one.steps * (rows - one.occupied) for one in stretches),
        columns=sum(one.all_columns for one in stretches),
    )


def _on_engines() -> Iterator[tuple[str, dict[str, Count]]]:
    model = _model()
    short = cases(
        (1, 2), queries=_QUERIES, mix_shorter=_SHORTER[1], short_shorter=_SHORTER[2], mix_seed=MIX_SEED
    )
    for case in short:
        if (case.table, case.rows) not in _BATCHES:
            continue
        requests = case.requests(_VOCAB)
        longest = max(len(one.prompt_token_ids) + one.output_tokens for one in requests)
        bench = MixEngine(model, case.rows, longest)
        try:
            yield (
                f"ring {case.name}",
                {mode.name: _on_ring(bench, requests, mode) for mode in PAPER_MODES},
            )
        finally:
            bench.close()
        if (case.table, case.rows) == _PADDED:
            results = {name: engine_bench.run(model, requests, name, case.rows) for name in METHODS}
            yield (
                f"padded {case.name}",
                {
                    name: Count(one.decode_steps, one.idle_row_steps, one.padded_columns)
                    for name, one in results.items()
                },
            )


def _on_ring(bench: MixEngine, requests: Sequence[Request], mode: Mode) -> Count:
    """Columns, which a CPU's ring doesn't count, are those of the schedule, if it is this schedule."""
    outcome, schedule = (
        bench.run(requests, mode, lambda _: None),
        played(mode.order(requests), bench.rows, mode),
    )
    taken = (outcome.steps, outcome.idle_row_steps)
    same = taken == (schedule.steps, schedule.idle_row_steps)
    return Count(*taken, schedule.columns if same else -1)


def _model() -> CausalModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
    )
    return CausalModel(LlamaForCausalLM(config).eval(), "cpu")


def load(path: Path = EXPECTED) -> Counts:
    """What is expected.

    Raises:
        ConfigError: The file is missing or no such file.
    """
    try:
        stored: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        return {
            what: {mode: Count(**count) for mode, count in counts.items()} for what, counts in stored.items()
        }
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} holds no expectations: {error}", field="expected") from error


def store(found: Counts, path: Path = EXPECTED) -> None:
    """Expect what was found from now on.

    Raises:
        ConfigError: The file can't be written.
    """
    plain = {what: {mode: asdict(one) for mode, one in counts.items()} for what, counts in found.items()}
    try:
        path.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error}", field="expected") from error


def compare(expected: Counts, found: Counts) -> Verdict:
    """Find every difference, and engines that don't take their schedule's steps."""
    verdict = Verdict(expected, found)
    verdict.faults += [
        f"{what}, {mode}: {one.steps:,} steps, {one.idle_row_steps:,} row-steps idle: not its schedule's"
        for what, counts in found.items()
        for mode, one in counts.items()
        if one.columns < 0
    ]
    for what in [*expected, *(what for what in found if what not in expected)]:
        here, stored = found.get(what), expected.get(what)
        if here is None or stored is None:
            verdict.faults.append(f"{what}: {'not counted' if here is None else 'nothing is expected'}")
            continue
        verdict.faults += _differences(what, stored, here)
    return verdict


def _differences(what: str, stored: Mapping[str, Count], here: Mapping[str, Count]) -> Iterator[str]:
    for mode in dict.fromkeys([*stored, *here]):
        old, new = stored.get(mode), here.get(mode)
        if old is None or new is None:
            yield f"{what}, {mode}: {'not counted' if new is None else 'nothing is expected'}"
        elif old != new:
            changed = [
                f"{now:,} {name.replace('_', ' ')}, {asdict(old)[name]:,} expected"
                for name, now in asdict(new).items()
                if now != asdict(old)[name]
            ]
            yield f"{what}, {mode}: {'; '.join(changed)}"


def table(verdict: Verdict) -> Table:
    """Ratios in steps, found and expected."""
    found = Table(title="Scheduling, in steps", caption="ratio: steps of run to completion over this one's")
    found.add_column("what", no_wrap=True)
    found.add_column("method", no_wrap=True)
    for head in ("steps", "idle", "columns", "ratio", "expected", ""):
        found.add_column(head, justify="right")
    for what, counts in verdict.found.items():
        stored = verdict.expected.get(what, {})
        for mode, count in counts.items():
            found.add_row(
                what,
                METHODS.get(mode, mode),
                f"{count.steps:,}",
                f"{count.idle_row_steps:,}",
                f"{count.columns:,}",
                _ratio(counts, mode),
                _ratio(stored, mode),
                "ok" if stored.get(mode) == count else "CHANGED",
                end_section=mode == "decoupled",
            )
    return found


def _ratio(counts: Mapping[str, Count], mode: str) -> str:
    base, one = counts.get("run_to_completion"), counts.get(mode)
    return f"{base.steps / one.steps:.3f}" if base and one and one.steps else ""
