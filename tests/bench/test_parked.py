"""The comparison of queries with and without forced parks, on a tiny model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from typer.testing import CliRunner

from batond.bench import __main__ as command
from batond.daemon.engine.queries.residency import Residency

if TYPE_CHECKING:
    from pathlib import Path

    import pytest
    from click.testing import Result

    from batond.offload.slice import KVSlice


def run(output: Path, *words: str) -> Result:
    fixed = ["parked", "--device", "cpu", "--shape", "tiny", "--layers", "1", "--queries", "16"]
    return CliRunner().invoke(command.app, [*fixed, "--rows", "4", "--output", str(output), *words])


def test_parks_change_no_token(tmp_path: Path) -> None:
    """R2, in bfloat16."""
    done = run(tmp_path / "parked.json", "--shorter", "3")
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "parked.json").read_text())
    assert found["parks"] > 4
    assert found["parked"] > 4
    assert (found["recomputed_tokens"], found["mismatches"]) == (0, [])
    assert "OK: 16 queries" in done.output


def test_a_park_that_changes_a_token_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Residency._load

    def damaged(self: Residency, query: object) -> KVSlice | None:
        kv = load(self, query)  # type: ignore[arg-type]
        if kv is not None:
            kv.tokens[: kv.n_tokens // 2] = 0
        return kv

    monkeypatch.setattr(Residency, "_load", damaged)
    done = run(tmp_path / "parked.json", "--shorter", "3")
    assert done.exit_code == 1, done.output
    found = json.loads((tmp_path / "parked.json").read_text())
    assert found["mismatches"]
    one = found["mismatches"][0]
    assert one["parks"] >= 1
    assert one["place"] >= min(one["before"]), "what came before the park is the same"
    assert "MISMATCH: query" in done.output
