"""The load bench measures what it says, and what it measures is right; its figures are not asserted."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import pytest
from typer.testing import CliRunner

from batond.bench import load_front
from batond.bench.__main__ import app
from batond.bench.load_cpu import percentiles
from batond.bench.load_front import call, daemon_on

if TYPE_CHECKING:
    from pathlib import Path


def test_percentiles_of_few_and_of_many() -> None:
    assert percentiles([]) == (0.0, 0.0, 0.0)
    assert percentiles([4.0]) == (4.0, 4.0, 4.0)
    median, most, longest = percentiles([float(number) for number in range(1, 1001)])
    assert (median, longest) == (500.5, 1000.0)
    assert 989 < most < 991.1


@pytest.mark.slow
def test_every_token_arrives_once(tmp_path: Path) -> None:
    """Streams of both kinds to their natural ends; tokens are counted at their index, each with its stamp."""
    task = load_front.Task(target="", token="", prefix="s", calls=40, max_tokens=25)
    with daemon_on(tmp_path / "d", rows=40, step_s=0.01) as daemon:
        task = msgspec.structs.replace(task, target=f"unix:{daemon.socket}", token=daemon.tokens["load"])
        result, _ = call(task, {})
    assert (result.tokens, result.broken) == (40 * 25, 0)


@pytest.mark.slow
def test_command_measures_everything(tmp_path: Path) -> None:
    output = tmp_path / "load.json"
    sizes = {"jobs": 240, "waiting": 200, "at-once": 8, "rounds": 2, "streams": 20, "rows": "20,5"}
    sizes |= {"tokens": 200, "seconds": 1}
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    done = CliRunner().invoke(app, ["load", *words, "--output", str(output)])
    assert done.exit_code == 0, done.output
    found = json.loads(output.read_text())
    assert [one["work"] for one in found["queue"]] == ["submit", "claim", "claim, commit, finish"]
    assert all(one["per_s"] > 0 and one["bare_per_s"] > 0 and one["commands"] > 5 for one in found["queue"])
    assert found["submits"]["jobs"] == 200
    assert set(found["submits"]["cpu_us"]) == {"front", "redis", "engine", "callers"}
    shapes = [(one["server"], one["streams"], one["rows"], one["broken"]) for one in found["streams"]]
    assert shapes == [("bare", 20, 20, 0), ("daemon", 20, 20, 0), ("bare", 20, 5, 0), ("daemon", 20, 5, 0)]
    assert all(0 < one["p50_ms"] <= one["p99_ms"] <= one["max_ms"] for one in found["streams"])
    for title in ("Queue scripts", "SubmitJob over gRPC", "Tokens from engine to caller"):
        assert title in done.output
