"""The planner bench measures what it says; its figures are not asserted."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from batond.bench import planner
from batond.bench.__main__ import app
from batond.policies.base import Phase


def test_load_stays_as_it_is() -> None:
    """A full batch, and as many in line, however long it goes on."""
    load = planner.Load(waiting=50, rows=8, parked=2)
    before = len(load.queries)
    for _ in range(50):
        running = sum(query.phase is Phase.RUNNING for query in load.queries.values())
        assert len({query_id for query_id, _ in load.step()}) >= running
    assert len(load.queries) == before


@pytest.mark.parametrize("policy", ["fair", "priority"])
def test_times_are_taken(policy: str) -> None:
    timing = planner.measure(policy, waiting=60, rows=8, steps=5)
    assert (timing.policy, timing.waiting, timing.rows) == (policy, 60, 8)
    assert 0 < timing.plan_ms <= timing.plan_p99_ms
    assert timing.scratch_ms > 0
    assert timing.update_ms > 0


def test_command_prints_a_row_for_each_case() -> None:
    done = CliRunner().invoke(app, ["planner", "--waiting", "10,20", "--rows", "4", "--steps", "3"])
    assert done.exit_code == 0, done.output
    assert [line.split("│")[2].strip() for line in done.output.splitlines() if "priority" in line] == [
        "10",
        "20",
    ]
