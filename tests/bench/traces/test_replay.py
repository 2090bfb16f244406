"""`python -m batond.bench trace` on real daemons whose engine computes nothing."""

from __future__ import annotations

import csv
import json
import os
import signal
from typing import TYPE_CHECKING

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from batond.bench.fake_daemon import PROGRAM
from batond.bench.fake_engine import STEP_VARIABLE, VOCAB_SIZE, Fault
from batond.bench.traces import figures
from batond.bench.traces import run as traces
from batond.bench.traces.command import replay_and_show, trace_command
from batond.bench.traces.options import Options, OwnDaemon, RunningDaemon
from batond.bench.traces.replay import interruptible, outcome, replay, throughput
from batond.bench.traces.watch import BatchWatch
from batond.clients.errors import BatondClientError
from batond.daemon.errors import BatondError, ConfigError, StateError
from batond.daemon.simulator.costs import PRESETS
from batond.daemon.simulator.report import report
from batond.daemon.simulator.setup import Setup
from batond.daemon.simulator.trace import Request

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from batond.bench.local_daemon import LocalDaemon

pytestmark = pytest.mark.redis

CLASSES = "code=interactive,conv=batch"
app = typer.Typer(pretty_exceptions_enable=False)
app.command()(trace_command)


@pytest.fixture
def tokens(daemon: LocalDaemon, tmp_path: Path) -> Path:
    """Each tenant's own token, and the operator's, in a file."""
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(daemon.tokens))
    return path


@pytest.fixture
def command(daemon: LocalDaemon, trace: Path, tokens: Path) -> Callable[..., str]:
    """Runs the command on the daemon and gives what it says."""

    def run(*arguments: object) -> str:
        words = [trace, "--address", f"unix:{daemon.socket}", "--tokens", tokens, *arguments]
        result = CliRunner().invoke(app, [str(word) for word in words])
        if isinstance(result.exception, BatondError):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result.output

    return run


def test_a_running_daemon_gets_the_trace_and_keeps_its_policy(
    command: Callable[..., str], daemon: LocalDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "FORMATS", ("svg",))  # The same again as PNG takes as long again.
    files = {name: tmp_path / name for name in ("figures.json", "rows.csv", "plots")}
    said = command(
        *("--classes", CLASSES, "--window", 10, "--requests", 24, "--shrink", 4, "--rate", 20),
        *("--policies", "fcfs,priority", "--ttft", "interactive=0.0001,batch=30"),
        *("--output", files["figures.json"], "--csv", files["rows.csv"], "--plots", files["plots"]),
    )
    for words in (
        "code is interactive, conv is batch",
        "interactive 0.0001 s",
        "20 times as fast",
        "fcfs alone: throughput ",
        "times its",
        "decode steps were taken",
    ):
        assert words in said, words
    figures_of = json.loads(files["figures.json"].read_text())
    assert [one["policy"] for one in figures_of["policies"]] == ["fcfs alone", "fcfs", "priority"]
    assert {name: one["requests"] for name, one in figures_of["runs"].items()} == {
        "fcfs alone": 8,
        "fcfs": 24,
        "priority": 24,
    }
    for one in figures_of["policies"][1:]:
        assert [(group["sla_class"], group["requests"]) for group in one["groups"]] == [
            ("interactive", 8),
            ("batch", 16),
        ]
        assert one["late"] == one["refused"] == 0
        interactive, batch = one["groups"]
        # No first token comes within a tenth of a millisecond, and all others come within half a minute.
        assert (interactive["met"], batch["met"]) == (0, 1)
        assert 0 < batch["ttft_s"]["p50"] <= batch["ttft_s"]["p99"] <= batch["e2e_s"]["p99"]
        assert one["rows_taken"] is None  # Clients can't know; the engine does.
    batch_use = figures_of["runs"]["priority"]["batch"]
    assert batch_use["decode_steps"] > 0
    assert 0.5 < batch_use["rows_taken"] <= 1
    with files["rows.csv"].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8 + 24 + 24
    assert {(row["tenant"], row["class"]) for row in rows} == {("code", "interactive"), ("conv", "batch")}
    assert {row["end"] for row in rows} == {"served"}
    assert all(float(row["arrival_s"]) <= float(row["sent_s"]) < float(row["end_s"]) for row in rows)
    drawn = {path.name: path.read_text() for path in files["plots"].iterdir()}
    assert set(drawn) == {"latency.svg", "course.svg", "service.svg"}
    # Text is drawn as paths; what it says stands beside them.
    for name, words in {
        "latency": ("Latencies of trace.csv", "interactive: time to first token", "priority", "seconds"),
        "course": ("fcfs: requests in the daemon", "rows of the batch, 2", "output tokens/s", "parked"),
        "service": (
            "Goodput: within both targets of the class",
            "code, asked for",
            "conv, got",
            "requests/s",
        ),
    }.items():
        for word in words:
            assert f"<!-- {word}" in drawn[f"{name}.svg"], word
    with daemon.operator() as client:
        assert client.policy().policy == "priority"


def test_saturation_prints_the_throughput_that_is_compared(
    command: Callable[..., str], tmp_path: Path
) -> None:
    wanted = tmp_path / "requests.json"
    said = command("--window", 10, "--requests", 0, "--shrink", 8, "--saturate", "--save-requests", wanted)
    line = next(line for line in said.splitlines() if "throughput at saturation" in line)
    assert line.startswith("priority: throughput at saturation ")
    assert "(30 requests, 180 output tokens" in line
    assert "all there at once" in said
    rows = json.loads(wanted.read_text())
    assert sum(one["output_len"] for one in rows) == 180
    assert {one["arrival_s"] for one in rows} == {0.0}


def test_what_a_running_daemon_does_not_take_is_left_out_or_counted(
    command: Callable[..., str], daemon: LocalDaemon, trace: Path
) -> None:
    said = command("--window", 10, "--requests", 8, "--rate", 100)
    assert "are too long" in said  # More than 280 tokens.
    one_token = daemon.tokens["code"]
    options = Options(
        trace=trace,
        policies=("mlfq",),
        simulate=False,
        daemon=RunningDaemon(address=f"unix:{daemon.socket}", token=one_token),
    )
    with pytest.raises(ConfigError, match="keeps its policy priority"):
        traces.run(options, Console(quiet=True))
    with pytest.raises(ConfigError, match="no tenant 'nobody'"):
        command("--classes", "nobody=batch")


def test_an_address_nobody_listens_at_is_said(trace: Path, tmp_path: Path) -> None:
    where = RunningDaemon(address=f"unix:{tmp_path}/nobody.sock")
    with pytest.raises(StateError, match="can't be asked"):
        traces.run(Options(trace=trace, simulate=False, daemon=where), Console(quiet=True))


def test_a_daemon_of_ones_own_stands_beside_its_prediction(trace: Path, tmp_path: Path) -> None:
    """With given step times: those of a busy machine can't always be fitted, and are no matter of a test."""
    output, costs = tmp_path / "figures.json", tmp_path / "costs.json"
    costs.write_text('{"step_s": 0.002, "row_s": 0.0001, "prefill_s": 0.0001, "prefill_token_s": 0.00001}')
    own = OwnDaemon(
        rows=2, model=str(tmp_path), program=PROGRAM, environment={STEP_VARIABLE: "0.002"}, chunk_tokens=16
    )
    options = Options(
        trace=trace,
        classes={"code": "interactive", "conv": "batch"},
        policies=("fcfs",),
        window_s=10,
        requests=24,
        shrink=16,
        costs=str(costs),
        daemon=own,
        ttft_s={"interactive": 7.0},
    )
    replay_and_show(options, output=output)
    found = json.loads(output.read_text())
    names = [f"{name}, {where}" for name in ("fcfs alone", "fcfs") for where in ("daemon", "simulated")]
    assert [one["policy"] for one in found["policies"]] == names
    for real, predicted in zip(found["policies"][2::2], found["policies"][3::2], strict=True):
        # Both computed the same tokens, and nobody was lost.
        assert real["late"] == real["refused"] == 0
        done = [one["tokens_per_s"] * one["duration_s"] for one in (real, predicted)]
        assert done[0] == pytest.approx(done[1])
        assert real["rows_taken"] is None
        assert 0 < predicted["rows_taken"] <= 1
    assert set(found["runs"]) == {"fcfs alone", "fcfs"}
    assert all(one["drift"] is not None for one in found["runs"].values())
    assert found["options"]["daemon"]["rows"] == 2


def requests_of(*outputs: int) -> list[Request]:
    return [Request(0.0, 4, output, "code", "batch") for output in outputs]


def setup_of(rows: int) -> Setup:
    return Setup(costs=PRESETS["cpu"], rows=rows)


async def test_ctrl_c_ends_a_replay_and_keeps_what_had_ended(daemon: LocalDaemon) -> None:
    """The long request is cancelled in the daemon too; the one to come is never sent."""
    requests = [*requests_of(3, 250), Request(3600.0, 4, 3, "code", "batch")]
    client = daemon.async_client("code")
    try:
        with interruptible() as stop:
            replayed = await replay(
                {"code": client},
                setup_of(2),
                requests,
                VOCAB_SIZE,
                on_done=lambda: os.kill(os.getpid(), signal.SIGINT),
                stop=stop,
            )
        assert stop.is_set()
        mine = [job.job_id async for job in client.list() if not job.state.final]
        states = [(await client.wait(job_id)).state for job_id in mine]
    finally:
        await client.close()
    short, long, never = replayed
    assert short.ended
    assert not short.failure
    assert not long.ended
    assert not never.ended
    assert never.sent_s != never.sent_s
    assert set(states) <= {"cancelled"}
    assert report(outcome("x", setup_of(2), [short])).groups[0].requests == 1
    assert throughput(replayed).requests == 1


async def test_a_job_that_fails_in_the_daemon_counts_as_not_served(
    daemon: LocalDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prompts(requests: list[Request], *_: object) -> list[list[int]]:
        return [[Fault.FAIL, 1], *([5] * 4 for _ in requests[1:])]

    monkeypatch.setattr("batond.bench.traces.replay.prompts", prompts)
    client = daemon.async_client("code")
    try:
        replayed = await replay({"code": client}, setup_of(2), requests_of(9, 9), VOCAB_SIZE)
    finally:
        await client.close()
    failed, served = replayed
    assert (failed.failure, failed.query.served) == ("INTERNAL", False)
    assert (served.failure, served.query.output_tokens) == ("", 9)
    whole = report(outcome("x", setup_of(2), replayed)).groups[0]
    assert (whole.requests, whole.refused, whole.met) == (1, 1, 0.5)


async def test_a_batch_that_is_not_shown_leaves_the_clients_figures(daemon: LocalDaemon) -> None:
    client = daemon.async_client("code")
    try:
        with pytest.raises(BatondClientError):
            await anext(client.watch_batch())
        async with BatchWatch(client) as watch:
            pass
    finally:
        await client.close()
    assert watch.use is None
