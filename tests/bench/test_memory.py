"""`bench memory`: what a batch holds over time, and how the ways of batching differ."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

from batond.bench import memory, models, workloads
from batond.bench.__main__ import app
from batond.bench.memory import Curve

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def curves() -> dict[str, Curve]:
    torch.set_num_threads(1)
    model = models.load("tiny")
    requests = workloads.short(model.vocab_size, queries=6, low=8, high=40)
    return {mode: memory.run(model, requests, mode, rows=2) for mode in memory.MODES}


def test_figures_weigh_what_is_held_by_time() -> None:
    curve = Curve("ring", 2, ends_s=[1.0, 2.0, 5.0], held_bytes=[100, 400, 0], live_bytes=[100, 200, 0])
    assert curve.byte_seconds == 100 * 1 + 400 * 3
    assert curve.mean_bytes == 1300 / 4
    assert curve.over_live == 1300 / 700
    assert (curve.peak_bytes, curve.seconds) == (400, 5.0)


def test_only_memory_that_follows_the_rows_is_near_what_they_own(curves: dict[str, Curve]) -> None:
    for curve in curves.values():
        pairs = zip(curve.held_bytes, curve.live_bytes, strict=True)
        assert all(held >= live for held, live in pairs), curve.mode
        assert curve.live_bytes[-1] == 0
    assert curves["ring"].held_bytes[-1] == 0, "everything went back"
    assert len(set(curves["plain_ring"].held_bytes)) == 1, "all of it from the start"
    peaks = {mode: max(curve.live_bytes) for mode, curve in curves.items()}
    assert peaks["padded"] == peaks["ring"] == peaks["plain_ring"], "the same queries at the same time"


def test_the_command_prints_a_table_and_writes_curves(
    curves: dict[str, Curve], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "run", lambda *given: curves[given[2]])
    monkeypatch.setattr(models, "load", lambda _: _Model())
    output = tmp_path / "curves.jsonl"
    result = CliRunner().invoke(app, ["memory", "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert all(mode in result.output for mode in memory.MODES)
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert [one["mode"] for one in written] == list(memory.MODES)
    assert written[0]["held_bytes"] == curves["run_to_completion"].held_bytes
    assert CliRunner().invoke(app, ["memory", "--workload", "unknown"]).exit_code == 2


def test_curves_are_drawn(curves: dict[str, Curve], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    memory.plot(tmp_path / "memory.svg", list(curves.values()))
    assert (tmp_path / "memory.svg").read_bytes().startswith(b"<?xml")


class _Model:
    vocab_size: Any = 100
