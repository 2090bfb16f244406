"""`make bench-smoke` as a test: what schedules cost, in steps, is what is expected."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from batond.bench import __main__ as command
from batond.bench.paper import smoke
from batond.bench.schedule import list_schedule_steps
from batond.daemon.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from batond.bench.paper.smoke import Counts


@pytest.fixture(scope="module")
def found() -> Counts:
    return smoke.measure()


def test_schedules_cost_what_is_expected(found: Counts) -> None:
    verdict = smoke.compare(smoke.load(), found)
    assert not verdict.faults, "look at each, then: python -m batond.bench smoke --accept"


def test_the_published_claims_in_steps() -> None:
    """Both tables: nearly no idle row-step where others wait, and fewer steps than run to completion."""
    expected = smoke.load()
    ratios = {
        what: counts["run_to_completion"].steps / counts["decoupled"].steps
        for what, counts in expected.items()
        if what.startswith("played")
    }
    assert len(ratios) == 7
    assert ratios["played table1-batch4"] > 1.86
    assert ratios["played table1-batch8"] > 2.49
    assert min(ratios.values()) > 1.25
    for case in smoke.cases((1, 2), mix_seed=smoke.MIX_SEED):
        lengths = [one.output_tokens - 1 for one in case.requests(64)]
        count = expected[f"played {case.name}"]["decoupled"]
        assert count.steps == list_schedule_steps(lengths, case.rows)
        assert count.idle_row_steps == count.steps * case.rows - sum(lengths)


def test_any_difference_is_found(found: Counts) -> None:
    changed = {what: dict(counts) for what, counts in found.items()}
    first, second, third = list(changed)[:3]
    one = changed[first]["decoupled"]
    changed[first]["decoupled"] = replace(one, steps=one.steps - 1, columns=-1)
    del changed[second]["pd"]
    del changed[third]
    faults = smoke.compare(found, changed).faults
    steps, idle, columns = one.steps, one.idle_row_steps, one.columns
    differs = f"{steps - 1:,} steps, {steps:,} expected; -1 columns, {columns:,} expected"
    assert faults == [
        f"{first}, decoupled: {steps - 1:,} steps, {idle:,} row-steps idle: not its schedule's",
        f"{first}, decoupled: {differs}",
        f"{second}, pd: not counted",
        f"{third}: not counted",
    ]
    assert smoke.compare(changed, found).faults[-1] == f"{third}: nothing is expected"


def test_the_command_fails_where_steps_differ(
    found: Counts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "expected.json"
    monkeypatch.setattr(smoke, "measure", lambda: found)
    smoke.store({**found, "ring table9-batch9": found["ring table1-batch8"]}, path)
    monkeypatch.setattr(smoke, "load", lambda load=smoke.load: load(path))
    monkeypatch.setattr(smoke, "store", lambda counts, store=smoke.store: store(counts, path))
    done = CliRunner().invoke(command.app, ["smoke"])
    assert done.exit_code == 1
    assert "ring table9-batch9: not counted" in done.output
    assert CliRunner().invoke(command.app, ["smoke", "--accept"]).exit_code == 0
    assert smoke.load() == found
    path.write_text("[]")
    with pytest.raises(ConfigError, match="holds no expectations"):
        smoke.load()
