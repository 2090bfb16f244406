"""The mixes on a tiny model: each mode computes what it says, and the prediction counts just that."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

from batond.bench import __main__ as command
from batond.bench import workloads
from batond.bench.gpu.sizes import SHAPES
from batond.bench.mixes.costs import PromptCost, StepCost, StepPoint
from batond.bench.mixes.modes import MODES, MixEngine, Mode
from batond.bench.mixes.run import MIXES, Options, build
from batond.bench.mixes.schedule import Prompt, Stretch, most_columns, play
from batond.bench.schedule import list_schedule_steps
from batond.daemon.engine.batch.graphs import StepGraphs, StepOutput
from batond.daemon.engine.batch.padded import PaddedBatch
from batond.daemon.engine.batch.ring import RingBatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from batond.bench.workloads import Request

ROWS = 3
BY_NAME = {mode.name: mode for mode in MODES}


def request(prompt: int, output: int) -> Request:
    return workloads.Request(tuple(range(3, 3 + prompt)), output)


class _CardStandIn:
    """Takes the place of the card's steps: notes what a step would read, and computes nothing."""

    def __init__(self, rows: int) -> None:
        self.graphs = StepGraphs()
        self.remark = ""
        self.read: list[list[int]] = []
        self._output = StepOutput(torch.zeros(rows, 1024), torch.full((rows,), 7))

    def run(self, tokens: Mapping[int, Sequence[int]], lengths: Sequence[int], cursor: int) -> StepOutput:
        assert set(tokens) == {row for row, length in enumerate(lengths) if length}
        assert cursor >= 0
        self.read.append([length for length in lengths if length])
        return self._output

    def likeliest(self) -> list[int]:
        return self._output.likeliest.tolist()


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return build("tiny", 1, torch.float32, 512, torch.device("cpu"))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[_CardStandIn]]:
    """Stands in for the card of the ring that the engine serves with, which is the last one made."""
    made: list[_CardStandIn] = []
    init = RingBatch.__init__

    def with_card(self: RingBatch, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        if self.rows == ROWS and self.capacity > 400:
            made.append(_CardStandIn(ROWS))
            self._on_card = made[-1]  # type: ignore[assignment]

    monkeypatch.setattr(RingBatch, "__init__", with_card)
    return made


def test_the_published_mix() -> None:
    mix = workloads.mix(1000, queries=40, scale=2)
    assert mix == workloads.mix(1000, queries=40, scale=2)
    lengths = [(len(one.prompt_token_ids), one.output_tokens) for one in mix]
    kinds = [tuple("long" if length >= 7000 else "short" for length in pair) for pair in lengths]
    assert [kinds.count(kind) for kind in (("long", "short"), ("short", "long"), ("short", "short"))] == [
        10,
        10,
        20,
    ]
    assert all(64 <= one <= 1024 or 7000 <= one <= 9000 for pair in lengths for one in pair)


def test_a_schedule_played_by_hand() -> None:
    """Two rows: b comes where a was, and its prompt leaves its columns in the row that runs."""
    queries = [request(4, 3), request(5, 6), request(3, 2)]
    shaped = [
        Prompt(4, 1),
        Prompt(5, 1),
        Stretch(steps=2, occupied=2, top_rows=2, columns=11, longest=6),
        Prompt(3, 2),
        Stretch(steps=1, occupied=2, top_rows=2, columns=4 + (5 + 2 + 3) + 1, longest=11),
        Stretch(steps=2, occupied=1, top_rows=2, columns=5 + 3 + 3 + 1, longest=12),
    ]
    assert list(play(queries, 2, BY_NAME["inline"])) == shaped
    assert shaped[2].all_columns == 11 + 13  # type: ignore[union-attr]
    assert shaped[-1].all_longest == 12 + 13  # type: ignore[union-attr]
    assert most_columns(queries, 2, BY_NAME["inline"]) == 14
    whole = [one.steps for one in play(queries, 2, BY_NAME["run_to_completion"]) if isinstance(one, Stretch)]
    assert whole == [2, 3, 1]
    steps = [one.steps for one in play(queries, 2, BY_NAME["decoupled"]) if isinstance(one, Stretch)]
    assert sum(steps) == list_schedule_steps([2, 5, 1], 2)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_the_engine_computes_what_is_predicted(
    mode: Mode, model: Any, card: list[_CardStandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step by step: rows and columns that a card's kernel reads, and rows of every prompt."""
    requests = [
        request(len(one.prompt_token_ids) // 64 + 1, one.output_tokens // 64 + 1)
        for one in workloads.mix(1000, queries=12, seed=1)
    ]
    bench = MixEngine(model, ROWS, 500)
    prompts: list[tuple[int, int]] = []
    step = PaddedBatch.step

    def note(self: PaddedBatch, tokens: Mapping[int, Sequence[int]], **options: Any) -> torch.Tensor:
        prompts.append((len(tokens[0]), self.rows))
        return step(self, tokens, **options)

    monkeypatch.setattr(PaddedBatch, "step", note)
    if bench.engine._prompts._packer is not None:
        monkeypatch.setattr(bench.engine._prompts, "_packer", None)  # Packs are no batch of their own.
    outcome = bench.run(requests, mode, lambda _: None)
    steps = card[-1].read
    played = list(play(mode.order(requests), ROWS, mode))
    stretches = [one for one in played if isinstance(one, Stretch)]
    expected = [
        (one.occupied, one.columns + n * one.occupied, one.longest + n)
        for one in stretches
        for n in range(one.steps)
    ]
    assert [(len(read), sum(read), max(read)) for read in steps] == expected
    assert prompts == [(one.tokens, one.rows) for one in played if isinstance(one, Prompt)]
    assert outcome.steps == len(expected)
    assert outcome.idle_row_steps == sum(ROWS - len(read) for read in steps)
    assert outcome.output_tokens == sum(one.output_tokens for one in requests)
    bench.close()


def test_costs_are_found_again() -> None:
    points = [
        StepPoint(columns=columns, longest=longest, seconds=1e-3 + 2e-8 * columns + 5e-8 * longest)
        for columns, longest in ((512, 64), (16384, 2048), (5000, 4500), (19000, 4800))
    ]
    cost = StepCost.fit(8, points)
    assert cost.fixed_s == pytest.approx(1e-3)
    assert (cost.column_s, cost.longest_s) == (pytest.approx(2e-8), pytest.approx(5e-8))
    assert cost.worst_miss < 1e-6
    flat = StepCost.fit(1, [StepPoint(columns=n, longest=n, seconds=2e-3 - n * 1e-7) for n in (1, 100, 900)])
    assert (flat.column_s, flat.longest_s) == (0, 0)
    assert flat.fixed_s == pytest.approx(2e-3, rel=0.05)
    prompt = PromptCost(rows=1, points=((10, 1.0), (20, 2.0), (40, 6.0)))
    assert [prompt.seconds(tokens) for tokens in (5, 10, 15, 30, 50)] == [0.5, 1.0, 1.5, 4.0, 8.0]


def test_the_whole_run_on_a_tiny_model(tmp_path: Path) -> None:
    output = tmp_path / "mixes.json"
    words = ["mixes", "--device", "cpu", "--shape", "tiny", "--layers", "1", "--dtype", "float32"]
    words += ["--shorter", "500", "--queries", "8", "--mix", "doubled", "--output", str(output)]
    words += ["--mode", "run_to_completion,inline,decoupled"]
    done = CliRunner().invoke(command.app, words)
    assert done.exit_code == 0, done.output
    (mix,) = json.loads(output.read_text())["mixes"]
    assert (mix["run_queries"], mix["queries"], mix["layers"]) == (8, 8, 1)
    assert [one["mode"] for one in mix["modes"]] == [mode.name for mode in MODES]
    for one in mix["modes"]:
        assert one["predicted"]["seconds"] > 0
        if one["mode"] in {"pd", "inline_ranged"}:
            assert one["outcome"] is None
            continue
        assert one["outcome"]["steps"] == one["predicted"]["steps"] == one["whole"]["steps"]
        assert one["outcome"]["seconds"] > 0
    assert "decoupled over inline:" in done.output
    assert "published 1.75" in done.output
    assert "nothing about speed" in done.output


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--mix", "tripled"], "--mix must be of single, doubled, not tripled"),
        (["--mode", "decoupled,offline"], "--mode must be of run_to_completion, .*, not offline"),
        (["--shape", "llama-9"], "--shape must be one of llama-2-7b, llama-3-8b, tiny"),
        (["--dtype", "int4"], "--dtype must be one of bfloat16, float16, float32"),
    ],
)
def test_what_has_no_meaning_is_refused(words: list[str], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "mixes", *words])
    with pytest.raises(SystemExit, match=why):
        command.main()


def test_shorter_keeps_the_mix() -> None:
    options = Options(shape="tiny", shorter=10, queries=20)
    whole = Options(shape="tiny", queries=20).requests(MIXES["single"])
    for one, same in zip(options.requests(MIXES["single"]), whole, strict=True):
        assert len(one.prompt_token_ids) == -(-len(same.prompt_token_ids) // 10)
        assert one.output_tokens == -(-same.output_tokens // 10)
    assert SHAPES["tiny"].max_position_embeddings == 8192, "shapes stay as published"
