"""What reserving the expected output does to a simulated fleet whose KV has a bound."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from batond.daemon.cli import app
from batond.daemon.simulator.engine import Engine
from batond.daemon.simulator.trace import Request

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from batond.daemon.simulator.costs import StepCosts
    from batond.daemon.simulator.world import Outcome


@pytest.fixture
def tight(costs: StepCosts) -> StepCosts:
    """KV of 2,000 tokens."""
    return replace(costs, kv_bytes=2000 * costs.kv_token_bytes)


@pytest.fixture
def uneven() -> list[Request]:
    """Most outputs are short, one of eight is long, and all may be 400 tokens."""
    return [
        Request(
            arrival_s=number * 0.02,
            prompt_tokens=20 + 37 * number % 90,
            output_tokens=300 if number % 8 == 0 else 10 + number % 30,
            sla_class="standard" if number % 3 else "batch",
        )
        for number in range(200)
    ]


@pytest.fixture
def held_to(monkeypatch: pytest.MonkeyPatch) -> Callable[[StepCosts], None]:
    """Hold every step of a simulation to its KV: `held_to(costs)`."""

    def hold(costs: StepCosts) -> None:
        finish = Engine._finish

        def checked(self: Engine, start_s: float, end_s: float, computed: dict[str, tuple[int, int]]) -> None:
            held = [query.cached_tokens for query in self._queries.values() if not query.on_host]
            written = sum(held) * costs.kv_token_bytes
            assert written <= costs.kv_bytes or sum(map(bool, held)) == 1
            finish(self, start_s, end_s, computed)

        monkeypatch.setattr(Engine, "_finish", checked)

    return hold


def test_expected_reserves_do_more_work_and_park_little(
    simulate: Callable[..., Outcome],
    tight: StepCosts,
    uneven: list[Request],
    held_to: Callable[[StepCosts], None],
) -> None:
    held_to(tight)
    fleet = {"costs": tight, "rows": 16, "max_tokens": 400}
    expected = simulate(uneven, **fleet)
    strict = simulate(uneven, **fleet, overcommit=False)
    for outcome in (expected, strict):
        assert all(query.output_tokens == query.request.output_tokens for query in outcome.queries)
        assert all(query.preemptions <= query.parks for query in outcome.queries)
    assert expected.end_s < 0.8 * strict.end_s
    parks = sum(query.parks for query in expected.queries)
    assert 0 < parks <= 0.5 * len(uneven)


def test_nothing_is_expected_where_there_is_no_bound_or_nothing_more_is_asked_for(
    simulate: Callable[..., Outcome], costs: StepCosts, tight: StepCosts, uneven: list[Request]
) -> None:
    for fleet in ({"costs": costs, "max_tokens": 400}, {"costs": tight, "max_tokens": 0}):
        ends = [
            [query.end_s for query in simulate(uneven[:50], **fleet, overcommit=overcommit).queries]
            for overcommit in (True, False)
        ]
        assert ends[0] == ends[1]


def test_what_is_asked_for_must_fit(simulate: Callable[..., Outcome], tight: StepCosts) -> None:
    request = Request(0.0, 100, 10, sla_class="standard")
    assert simulate([request], costs=tight, max_tokens=1900).queries[0].served
    assert simulate([request], costs=tight, max_tokens=1901).queries[0].refused


def test_the_command_takes_both_reserves(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{number / 100},50,{300 if number % 8 == 0 else 20}\n" for number in range(120))
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n" + rows, encoding="utf-8")
    tables = []
    for flag in ("--overcommit", "--no-overcommit"):
        options = ["--policy", "fcfs", "--max-tokens", "400", "--cost", "kv_bytes=524288000", flag]
        result = CliRunner().invoke(app, ["simulate", str(trace), *options])
        assert result.exit_code == 0, result.output
        tables.append(result.stdout)
    assert tables[0] != tables[1]
