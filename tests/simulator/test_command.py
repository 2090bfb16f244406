"""`batond simulate` as it is typed."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from batond.daemon.cli import app
from batond.daemon.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from batond.daemon.simulator.trace import Request


@pytest.fixture
def trace(tmp_path: Path, mixed: list[Request]) -> Path:
    """A trace on disk."""
    path = tmp_path / "trace.csv"
    rows = [
        f"{one.arrival_s},{one.prompt_tokens},{one.output_tokens},{one.tenant},{one.sla_class}"
        for one in mixed[:60]
    ]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens,tenant,class", *rows]))
    return path


def simulate(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["simulate", *map(str, arguments)], env={"COLUMNS": "120"})
    if result.exception:
        raise result.exception
    return result.stdout


def test_the_help_names_the_options() -> None:
    result = CliRunner().invoke(app, ["simulate", "--help"], env={"COLUMNS": "160", "NO_COLOR": "1"})
    assert result.exit_code == 0
    for option in ("--policy", "--classes", "--window", "--load", "--daemons", "--costs", "--json", "--plot"):
        assert option in result.stdout


def test_policies_stand_side_by_side(trace: Path) -> None:
    said = simulate(trace, "--policy", "priority,fair", "--rows", 4, "--costs", "cpu", "--load", 1.5)
    assert "60 requests" in said
    assert "1.5 of capacity" in said
    for word in ("interactive", "batch", "t0", "priority", "fair", "TTFT", "goodput", "Jain", "starved"):
        assert word in said


def test_no_figure_is_cut_in_a_pipe(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    result = CliRunner().invoke(app, ["simulate", str(trace), "--costs", "cpu"])
    assert "starved s" in result.stdout
    assert "…" not in result.stdout


def test_json_has_every_figure_and_no_nan(trace: Path) -> None:
    said = json.loads(
        simulate(trace, "--policy", "fcfs", "--rows", 4, "--costs", "cpu", "--json"),
        parse_constant=lambda name: pytest.fail(f"{name} is not JSON"),
    )
    (fcfs,) = said["policies"]
    assert said["requests"] == 60
    assert fcfs["policy"] == "fcfs"
    whole = [group for group in fcfs["groups"] if not group["tenant"]]
    assert [group["sla_class"] for group in whole] == ["interactive", "batch"]
    assert sum(group["requests"] for group in whole) == 60
    assert whole[0]["ttft_s"]["p50"] <= whole[0]["ttft_s"]["p90"] <= whole[0]["ttft_s"]["p99"]


def test_the_load_scales_to_what_the_fleet_can_do(trace: Path) -> None:
    busy = {}
    for load in (0.1, 2.0):
        said = json.loads(simulate(trace, "--policy", "fcfs", "--costs", "cpu", "--load", load, "--json"))
        busy[load] = said["policies"][0]["busy"]
    assert busy[0.1] < 0.5
    assert busy[2.0] > 0.9


def test_one_class_is_left_alone_with_its_arrivals(trace: Path) -> None:
    same = [trace, "--policy", "priority", "--costs", "cpu", "--rows", 4, "--load", 1.2, "--json"]
    both, alone = (json.loads(simulate(*same, *more)) for more in ([], ["--only", "interactive"]))
    urgent, lone = (said["policies"][0]["groups"][0] for said in (both, alone))
    assert lone["requests"] == urgent["requests"] == alone["requests"]
    assert lone["ttft_s"]["p99"] <= urgent["ttft_s"]["p99"]
    assert alone["arriving_s"] == pytest.approx(both["arriving_s"], rel=0.1)


def test_quotas_and_limits_count_who_is_refused_and_late(trace: Path) -> None:
    same = [trace, "--policy", "fcfs", "--costs", "cpu", "--rows", 2, "--load", 3, "--json"]
    limits = ["--max-queued", "t0=1", "--longest-queue", "batch=2", "--time-limit", "interactive=4"]
    free, tight = (json.loads(simulate(*same, *more))["policies"][0] for more in ([], limits))
    assert free["late"] == free["refused"] == 0
    assert tight["late"] > 0
    assert tight["refused"] > 0
    whole = [group for group in tight["groups"] if not group["tenant"]]
    assert sum(group["requests"] + group["late"] + group["refused"] for group in whole) == 60
    assert all(group["refused"] == 0 for group in tight["groups"] if group["tenant"] not in {"", "t0"})


def test_a_plot_is_drawn(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.svg"
    simulate(trace, "--costs", "cpu", "--plot", path)
    assert "<svg" in path.read_text()


def test_without_matplotlib_a_plot_says_what_to_install(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"batond\[bench\]"):
        simulate(trace, "--plot", "plot.svg")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "fastest"], "unknown policy 'fastest'"),
        (["--policy", ","], "no policy"),
        (["--classes", "t0"], "not of the form"),
        (["--weights", "t0=much"], "no number"),
        (["--weights", "t0=0"], "above 0"),
        (["--max-running", "t0=-1"], "above 0"),
        (["--longest-queue", "urgent=5"], "unknown class 'urgent'"),
        (["--time-limit", "urgent=5"], "unknown class 'urgent'"),
        (["--only", "standard"], "no request is of the class 'standard'"),
        (["--noise", "1"], "noise must be"),
        (["--rows", "0"], "rows must be at least 1"),
        (["--load", "-1"], "above 0"),
        (["--window", "-1"], "above 0"),
    ],
)
def test_bad_options_are_errors_of_ours(trace: Path, arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        simulate(trace, *arguments)


def test_no_torch_is_imported() -> None:
    code = "import sys, batond.daemon.simulator.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_options_of_policies_change_what_they_do(trace: Path) -> None:
    """The tool to choose a policy tries its options too."""
    arguments = (trace, "--policy", "priority", "--rows", 2, "--costs", "cpu", "--load", 2, "--json")
    plain, aged = simulate(*arguments), simulate(*arguments, "--option", "priority.ageing_s=0.001")
    assert json.loads(plain) != json.loads(aged)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("ageing_s=3", "policy.option=number"),
        ("priority.ageing_s", "policy.option=number"),
        ("priority.ageing_s=soon", "policy.option=number"),
        ("priority.agein_s=3", "ageing_s"),
        ("nobody.ageing_s=3", "nobody"),
    ],
)
def test_options_that_no_policy_takes_are_refused(trace: Path, option: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(trace, "--option", option)
