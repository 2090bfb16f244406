"""`bench paper` on a tiny model: what it runs, counts, writes and draws, and what it leaves out."""

from __future__ import annotations

import csv
import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

from batond.bench import __main__ as command
from batond.bench.gpu.sizes import SHAPES
from batond.bench.mixes.run import make_model
from batond.bench.paper import figures, files, plain, tables
from batond.bench.paper import run as paper_bench
from batond.bench.paper.cases import PAPER_MODES, cases
from batond.bench.paper.options import Options
from batond.bench.paper.results import lines, over_inline, over_plain
from batond.bench.paper.run import MEMORY_MODES
from batond.bench.paper.series import Series, kept_points
from batond.bench.workloads import Request
from batond.daemon.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from batond.bench.paper.run import PaperReport

OPTIONS = Options(
    tables=(1,), batches=(8,), layers=1, mix_shorter=300, queries=12, seconds=1e6, plain_seconds=1e6, rounds=2
)


class _Ticks:
    """A clock that moves by one at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def report() -> PaperReport:
    """One small column, in everything."""
    *_, last = paper_bench.run(OPTIONS, lambda _: None)
    return last


@pytest.fixture(scope="module")
def tiny() -> Any:
    return plain.plain_model(lambda: make_model("tiny", 1, torch.float32, 128, torch.device("cpu")))


def test_the_columns_are_those_of_the_tables() -> None:
    found = cases((1, 2))
    assert [(case.table, case.rows, case.scale, case.queries) for case in found] == [
        (1, 4, 2, 120),
        (1, 8, 1, 120),
        *((2, rows, 1, 30) for rows in (2, 4, 6, 8, 10)),
    ]
    assert [case.published.over_whole for case in found] == [1.86, 2.49, 1.94, 1.89, 1.66, 1.61, 1.31]
    assert [case.published.over_inline for case in found] == [1.75, 1.29, None, None, None, None, None]
    assert [case.rows for case in cases((1, 2), (4,))] == [4, 4]


def test_shorter_columns_keep_their_queries() -> None:
    (doubled,) = cases((1,), (4,), mix_shorter=100, queries=8)
    for one, whole in zip(doubled.requests(64), doubled.at_published_lengths().requests(64), strict=True):
        assert len(one.prompt_token_ids) == math.ceil(len(whole.prompt_token_ids) / 100)
        assert one.output_tokens == math.ceil(whole.output_tokens / 100)
    (short,) = cases((2,), (6,), short_shorter=4)
    assert short.requests(64, queries=5) == short.requests(64)[:5]
    assert max(one.output_tokens for one in short.requests(64)) <= 65


def test_every_method_runs_the_same_queries_in_its_own_steps(report: PaperReport) -> None:
    (case,) = report.cases
    assert [one.mode for one in case.methods] == [mode.name for mode in PAPER_MODES]
    assert case.run_queries == 12
    for one in case.methods:
        assert one.outcome is not None
        assert one.series is not None
        assert one.outcome.steps == one.predicted.steps == one.whole.steps
        assert one.outcome.output_tokens == case.output_tokens
        assert (one.series.queries[-1], one.series.tokens[-1]) == (12, case.output_tokens)
        assert one.series.seconds[-1] <= one.outcome.seconds
        assert one.spread_s is not None
        assert one.spread_s[0] < one.spread_s[1] == one.outcome.seconds, "the later of two rounds"
        for values in (one.series.seconds, one.series.queries, one.series.tokens):
            assert values == sorted(values)
    assert [curve.mode for curve in case.memory] == list(MEMORY_MODES)
    assert all(min(curve.held_bytes[:-1]) > 0 for curve in case.memory if curve.mode == "decoupled")


def test_a_line_holds_outcome_prediction_and_published_figure(report: PaperReport) -> None:
    (case,) = report.cases
    found = {line.method: line for line in lines(case)}
    assert list(found) == [*(mode.name for mode in PAPER_MODES), "transformers"]
    base, last = found["run_to_completion"], found["decoupled"]
    assert base.ratio == base.predicted_ratio == base.step_ratio == base.padded_ratio == 1
    assert last.published_ratio == 2.49
    assert last.ratio == base.seconds / last.seconds  # type: ignore[operator]
    assert last.step_ratio == base.steps / last.steps  # type: ignore[operator]
    assert last.error == last.predicted_s / last.seconds - 1  # type: ignore[operator]
    assert [line.published_ratio for line in found.values()] == [None, None, None, 2.49, None], (
        "only known ones"
    )
    assert over_inline(case).published == 1.29
    assert over_plain(case) == found["transformers"].seconds / last.seconds  # type: ignore[operator]


def test_what_is_written_can_be_read_again(report: PaperReport, tmp_path: Path) -> None:
    files.require(tmp_path / "deep" / "er")
    written = files.write(tmp_path / "deep" / "er", report)
    results, progress, memory = (
        list(csv.DictReader(path.read_text().splitlines())) for path in written if path.suffix == ".csv"
    )
    assert [row["method"] for row in results][-2:] == ["decoupled", "transformers"]
    assert results[0]["published_ratio"] == ""
    assert float(results[3]["published_ratio"]) == 2.49
    assert {row["method"] for row in progress} == {row["method"] for row in results}
    assert {row["method"] for row in memory} == set(MEMORY_MODES)
    assert json.loads(written[-1].read_text())["cases"][0]["run_queries"] == 12
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="can't be written"):
        files.write(tmp_path / "file", report)
    with pytest.raises(ConfigError, match="can't be made"):
        files.require(tmp_path / "file")


def test_figures_are_drawn_with_titles_units_and_legends(report: PaperReport, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = figures.draw(tmp_path, report, ("svg", "png"))
    assert [path.name for path in written] == [
        "table1-batch8.svg",
        "table1-batch8.png",
        "ratios.svg",
        "ratios.png",
    ]
    assert all(path.stat().st_size > 5000 for path in written)
    with pytest.raises(ConfigError, match="can't be written"):
        figures.draw(tmp_path / "nowhere", report)
    with pytest.raises(ConfigError, match="--formats must be of svg, png, pdf, not gif"):
        figures.require(("png", "gif"))


def test_the_command_prints_what_it_found(
    report: PaperReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Options] = []

    def instead(options: Options, _: Any) -> Iterator[PaperReport]:
        asked.append(options)
        yield report

    monkeypatch.setattr(paper_bench, "run", instead)
    words = ["paper", "--device", "cpu", "--output", str(tmp_path), "--formats", "svg", "--batch", "8,10"]
    done = CliRunner().invoke(command.app, words)
    assert done.exit_code == 0, done.output
    (options,) = asked
    assert options.rounds == 3
    assert (options.shape, options.dtype, options.clock, options.mix_shorter) == (
        "tiny",
        "float32",
        "cpu",
        32,
    )
    assert options.batches == (8, 10)
    for said in ("2.49", "1.29 published", "plain transformers", "KV memory, ring", "On a CPU"):
        assert said in done.output
    assert (tmp_path / "results.csv").exists()
    assert (tmp_path / "ratios.svg").exists()


def test_a_workload_without_time_is_predicted_alone() -> None:
    """No seconds: nothing is run, nothing drawn, and no cell is made up."""
    options = Options(
        tables=(2,), batches=(2,), layers=1, short_shorter=20, seconds=0, plain_seconds=0, memory=False
    )
    (found,) = list(paper_bench.run(options, lambda _: None))
    (case,) = found.cases
    assert case.run_queries == 0
    for line in lines(case):
        assert line.seconds is line.ratio is line.padded_ratio is line.error is None
        assert line.whole_s > 0  # type: ignore[operator]
    assert over_plain(case) is None
    assert "not known of the paper" in "".join(tables.remarks(case))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tables": (3,)}, "--tables must be of 1, 2, not 3"),
        ({"tables": (1,), "batches": (6,)}, "have no batch of"),
        ({"shape": "llama-9"}, "--shape must be one of llama-2-7b"),
        ({"dtype": "int4"}, "--dtype must be one of"),
        ({"clock": "sun"}, "--clock must be one of wall, cpu"),
        ({"mix_shorter": 0}, "must be at least 1"),
        ({"plain_seconds": math.nan}, "must be at least 0"),
    ],
)
def test_what_has_no_meaning_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Options(**options)


def test_plain_transformers_idles_until_the_longest_is_done(tiny: Any) -> None:
    requests = [Request((5,) * prompt, output) for prompt, output in ((3, 4), (9, 2), (2, 1), (4, 3))]
    found = plain.run(tiny, requests, 2, seconds=math.inf, tell=lambda _: None, clock=_Ticks())
    assert found.complete
    assert (found.steps, found.output_tokens) == (3 + 2, 4 + 2 + 1 + 3)
    assert found.series.queries == [0, 0, 0, 0, 2, 2, 2, 4]
    assert found.series.tokens == [0, 2, 4, 5, 6, 8, 9, 10]
    assert found.whole_s == found.seconds


def test_plain_transformers_is_cut_off_and_worked_out(tiny: Any) -> None:
    """Prompts and steps of a clock's tick each: what was not run is worked out from them."""
    requests = [Request((5,) * 4, 6)] * 4
    found = plain.run(tiny, requests, 2, seconds=9, tell=lambda _: None, clock=_Ticks())
    assert not found.complete
    assert (found.batches, found.all_batches) == (1, 2)
    assert found.output_tokens == 2 * 6 + 2 * 2
    assert found.whole_s == pytest.approx(2 * (1 + 5))


def test_no_more_points_than_a_figure_shows() -> None:
    series = Series()
    for place in range(1, 5000):
        series.note(place, place // 10, place)
    thin = series.thinned(100)
    assert len(thin.seconds) == len(thin.queries) == len(thin.tokens) == 100
    assert (thin.tokens[0], thin.tokens[-1]) == (0, 4999)
    assert kept_points(3, 5) == [0, 1, 2]
    assert SHAPES["tiny"].num_hidden_layers == 2, "shapes stay as published"
