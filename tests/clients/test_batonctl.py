"""batonctl from the command line to the wire and back: output, exit codes, one-line errors."""

import functools
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from rich.console import Console

from batond.clients import (
    BatchSnapshot,
    GovernorState,
    MemorySnapshot,
    QuerySnapshot,
    QueryState,
    RowSnapshot,
    batch_view,
    cli_output,
)
from batond.v1 import admin_pb2, types_pb2


def test_submit_prints_the_id(daemon: Any, batonctl: Callable[..., Any]) -> None:
    result = batonctl("submit", "hello", "--id", "mine", "-c", "batch", "-n", "4", "--label", "run=7=a")
    assert result == (0, "mine\n", "")
    spec = daemon.calls[0][1].spec
    assert (spec.text.text, spec.sla_class, spec.sampling.max_tokens) == ("hello", "batch", 4)
    assert dict(spec.labels) == {"run": "7=a"}


def test_options_left_out_stay_unset(daemon: Any, batonctl: Callable[..., Any]) -> None:
    batonctl("submit", "hello")
    spec = daemon.calls[0][1].spec
    assert not spec.HasField("sampling")
    assert spec == types_pb2.JobSpec(text=types_pb2.TextInput(text="hello"))


def test_several_choices_and_their_numbers(daemon: Any, batonctl: Callable[..., Any]) -> None:
    daemon.final.choices.add(index=0, text="one")
    daemon.final.choices.add(index=1, text="[other]")
    number = daemon.final.choices[1].logprobs.add(token_id=7, logprob=-0.25)
    number.top.add(token_id=9, logprob=-0.125)
    daemon.final.prompt_logprobs.add(token_id=3)
    asked = ("--choices", "2", "--logprobs", "0", "--prompt-logprobs", "1", "--session", "s1")
    result = batonctl("generate", "hello", *asked)
    spec = daemon.calls[0][1].spec
    sampling = spec.sampling
    assert (sampling.n, sampling.logprobs, sampling.prompt_logprobs, spec.session_id) == (2, 0, 1, "s1")
    lines = [line.split() for line in result.out.splitlines()]
    assert lines[1:3] == [["--", "choice", "1"], ["[other]"]]
    assert ["prompt", "0", "3"] in lines, "the first token of a prompt has no number"
    assert ["1:", "0", "7", "-0.2500", "9", "-0.1250"] in lines
    shown = batonctl("submit", "hello", *asked, "--wait").out
    assert "[other]" in shown


def test_zero_is_not_left_out(daemon: Any, batonctl: Callable[..., Any]) -> None:
    """Q1: what is wrong reaches the daemon, which says what is wrong."""
    batonctl("submit", "hello", "--max-tokens", "0", "--temperature", "0", "--seed", "0")
    sampling = daemon.calls[0][1].spec.sampling
    for name in ("max_tokens", "temperature", "seed"):
        assert sampling.HasField(name)


def test_input_in_every_form(daemon: Any, batonctl: Callable[..., Any]) -> None:
    batonctl("submit", "-", stdin="from a pipe")
    batonctl("submit", "--token-ids", "5,17,3")
    batonctl("submit", "hi", "--chat")
    batonctl("submit", "hi", "--system", "be short", "--stop", "a", "--stop", "b", "--ignore-eos")
    specs = [request.spec for _, request in daemon.calls]
    assert specs[0].text.text == "from a pipe"
    assert list(specs[1].tokens.token_ids) == [5, 17, 3]
    assert [turn.role for turn in specs[2].chat.messages] == ["user"]
    assert [turn.content for turn in specs[3].chat.messages] == ["be short", "hi"]
    assert list(specs[3].sampling.stop) == ["a", "b"]
    assert specs[3].sampling.ignore_eos


def test_generate_streams_the_text(batonctl: Callable[..., Any], chunks: Any) -> None:
    text = "".join(text for _, text in chunks)
    assert batonctl("generate", "hello") == (0, text + "\n", "")


def test_what_happens_to_the_place_is_said_beside_the_text(
    daemon: Any, batonctl: Callable[..., Any], chunks: Any
) -> None:
    """A reason that is newer than the client is shown as it is."""
    text = "".join(text for _, text in chunks)
    lines = [
        "-- queued in standard: place 1",
        "-- started after 1.000 s: row_free",
        "-- preempted, KV kept: row",
        "-- resumed: from_the_future",
    ]
    result = batonctl("generate", "hello", "-v", "--id", "j")
    assert (result.code, result.out, result.err.splitlines()) == (0, text + "\n", lines)
    watched = batonctl("watch", "j", "--verbose", "--json")
    assert watched.err.splitlines() == lines
    events = [json.loads(line) for line in watched.out.splitlines()]
    assert [event["reason"] for event in events if "reason" in event] == [
        "row_free",
        "row",
        "from_the_future",
    ]


def test_generate_as_json(batonctl: Callable[..., Any], chunks: Any) -> None:
    events = [json.loads(line) for line in batonctl("generate", "hello", "--json").out.splitlines()]
    assert events[0]["event"] == "queued"
    assert events[-1]["event"] == "finished"
    assert events[-1]["job"]["state"] == "succeeded"
    assert [event["text"] for event in events if event["event"] == "chunk"] == [text for _, text in chunks]


def test_watch_get_wait(daemon: Any, batonctl: Callable[..., Any], chunks: Any) -> None:
    text = "".join(text for _, text in chunks)
    batonctl("submit", "hello", "--id", "j")
    assert batonctl("watch", "j").out == text + "\n"
    batonctl("watch", "j", "--from", "3")
    assert daemon.calls[-1][1].from_token_index == 3
    shown = batonctl("get", "j").out
    for part in ("succeeded", "length", "0 + 7", "漢字."):
        assert part in shown
    assert json.loads(batonctl("get", "j", "--json").out)["text"] == text
    assert json.loads(batonctl("submit", "x", "--wait", "--json").out)["output_tokens"] == 7


def test_list(daemon: Any, batonctl: Callable[..., Any]) -> None:
    for number in range(4):
        batonctl("submit", "[red]x", "--id", f"j[b]{number}")
    listed = batonctl("list").out.splitlines()
    assert [line.split()[0] for line in listed[1:]] == ["j[b]3", "j[b]2", "j[b]1", "j[b]0"]
    limited = batonctl("list", "--limit", "3", "--json").out.splitlines()
    assert [json.loads(line)["job_id"] for line in limited] == ["j[b]3", "j[b]2", "j[b]1"]
    batonctl("list", "--state", "queued", "--state", "parked")
    assert list(daemon.calls[-1][1].states) == [types_pb2.JOB_STATE_QUEUED, types_pb2.JOB_STATE_PARKED]


def test_ids_are_never_cut(batonctl: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Other commands take the ids: they are whole on a narrow terminal, and in a pipe everything is."""
    job_id = "88f87eb8-ae0a-4358-9ec5-18043a93d92f"
    batonctl("submit", "x", "--id", job_id, "-c", "interactive")
    monkeypatch.setenv("COLUMNS", "60")
    assert batonctl("list").out.splitlines()[1].split()[0] == job_id
    monkeypatch.delenv("COLUMNS")
    assert "…" not in batonctl("list").out


@pytest.mark.parametrize(
    "command", ["list", "get j", "info", "daemons", "tenant list", "top --snapshots 1"], ids=str.split
)
def test_no_line_of_a_table_in_a_pipe_ends_in_blanks(
    daemon: Any, batonctl: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Nor is it as wide as the edge that a pipe doesn't have."""
    batonctl("submit", "x", "--id", "j")
    batonctl("tenant", "add", "red")
    daemon.snapshots = [admin_pb2.BatchSnapshot(step=7, rows=[admin_pb2.RowSnapshot(row=0)])]
    monkeypatch.delenv("COLUMNS")
    lines = batonctl(*command.split()).out.splitlines()
    assert lines
    assert [line for line in lines if line != line.rstrip()] == []
    assert max(map(len, lines)) < 200


def test_steering(daemon: Any, batonctl: Callable[..., Any]) -> None:
    batonctl("submit", "x", "--id", "j")
    assert batonctl("park", "j", "--tenant", "t0").out == "j parked\n"
    assert daemon.calls[-1][1].tenant == "t0"
    assert batonctl("resume", "j").out == "j running\n"
    assert batonctl("cancel", "j").out == "j cancelled\n"
    assert batonctl("drain", "--for", "2").out == "draining; jobs in the engine: 1\n"
    assert daemon.calls[-1][1].timeout.seconds == 2


def test_info(batonctl: Callable[..., Any]) -> None:
    shown = batonctl("info").out
    for part in ("0.1.0", "ready", "tiny", "64 tokens", "interactive (never parked), batch", "torch 2.11"):
        assert part in shown
    assert json.loads(batonctl("info", "--json").out)["max_query_tokens"] == 64


def test_top(daemon: Any, batonctl: Callable[..., Any]) -> None:
    row = admin_pb2.RowSnapshot(row=0, job_id="long", tenant="t0", sla_class="batch", output_tokens=5)
    daemon.snapshots = [admin_pb2.BatchSnapshot(step=7, rows=[row])] * 5
    shown = batonctl("top", "--snapshots", "2").out
    assert shown.count("step 7") == 2
    assert "long" in shown
    lines = batonctl("top", "--snapshots", "3", "--json").out.splitlines()
    assert [json.loads(line)["rows"][0]["job_id"] for line in lines] == ["long"] * 3


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 3),
        (grpc.StatusCode.NOT_FOUND, 4),
        (grpc.StatusCode.ALREADY_EXISTS, 5),
        (grpc.StatusCode.FAILED_PRECONDITION, 5),
        (grpc.StatusCode.UNAUTHENTICATED, 6),
        (grpc.StatusCode.PERMISSION_DENIED, 6),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 7),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 8),
        (grpc.StatusCode.INTERNAL, 9),
        (grpc.StatusCode.ABORTED, 9),
    ],
)
def test_errors_are_one_line_and_a_code(
    daemon: Any, batonctl: Callable[..., Any], fault: Any, code: grpc.StatusCode, expected: int
) -> None:
    daemon.faults["GetJob"] = [fault(code, message="two\nlines", reason="WHY", fields={"a.b": "too long"})]
    result = batonctl("get", "j")
    assert result.code == expected
    assert result.out == ""
    assert result.err.startswith("batonctl: two lines (")
    assert "a.b: too long" in result.err
    assert "[WHY]" in result.err


def test_nobody_there(daemon: Any, batonctl: Callable[..., Any]) -> None:
    daemon.stop()
    result = batonctl("info")
    assert result.code == 7
    assert "check that the daemon runs" in result.err


@pytest.mark.parametrize(
    ("state", "word"),
    [(types_pb2.JOB_STATE_FAILED, "failed: too large"), (types_pb2.JOB_STATE_CANCELLED, "was cancelled")],
)
def test_a_job_that_does_not_succeed(
    daemon: Any, batonctl: Callable[..., Any], state: types_pb2.JobState, word: str
) -> None:
    error = types_pb2.JobError(code=8, reason="KV_BYTES", message="too large")
    daemon.final = types_pb2.Job(state=state, text="half", error=error)
    for command in (["generate"], ["submit", "--wait"]):
        result = batonctl(*command, "x")
        assert result.code == 1
        assert word in result.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["nope"],
        ["submit"],
        ["submit", "x", "--max-tokens", "1.5"],
        ["submit", "--token-ids", "1,b"],
        ["submit", "x", "--label", "novalue"],
        ["list", "--state", "sleeping"],
        ["get"],
        ["get", "j", "--nope"],
        ["--token-file", "/does/not/exist", "info"],
        ["--server", "example.org:1", "--token", "t", "info"],
        ["--key", "/dev/null", "info"],
    ],
)
def test_wrong_usage(daemon: Any, batonctl: Callable[..., Any], arguments: list[str]) -> None:
    result = batonctl(*arguments)
    assert result.code == 2
    assert result.err.startswith("batonctl: ")
    assert daemon.calls == []


def test_the_token_comes_from_option_environment_or_file(
    daemon: Any, batonctl: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def sent(*arguments: str) -> object:
        assert batonctl(*arguments, "info").code == 0
        return daemon.metadata.get("authorization")

    assert sent() is None
    file = tmp_path / "token"
    file.write_text("from-file\n", encoding="utf-8")
    monkeypatch.setenv("BATOND_TOKEN_FILE", str(file))
    assert sent() == "Bearer from-file"
    monkeypatch.setenv("BATOND_TOKEN", "from-environment")
    assert sent() == "Bearer from-environment"
    assert sent("--token", "from-option") == "Bearer from-option"
    other = tmp_path / "other"
    other.write_text("from-named-file\n", encoding="utf-8")
    assert sent("--token-file", str(other)) == "Bearer from-named-file"
    assert sent("--token-file", str(other), "--token", "from-option") == "Bearer from-option"


def test_help_tells_exit_codes_and_where_the_token_comes_from(batonctl: Callable[..., Any]) -> None:
    """A script's author finds what the codes mean without reading the source."""
    result = batonctl("--help")
    assert result.code == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", result.out)  # Some CI gets colours.
    said = " ".join(plain.replace("│", " ").split())
    assert "Exit codes: 0 success" in said
    codes = {*(code for _, code in cli_output.EXIT_CODES), cli_output.EXIT_USAGE, cli_output.EXIT_INTERRUPTED}
    listed = said.split("Exit codes: ")[1]
    assert codes <= {int(number) for number in re.findall(r"\b\d+\b", listed)}
    assert "goes before --token-file" in said
    assert "goes before BATOND_TOKEN" in said


def program(daemon: Any, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Starts the installed program as a terminal would: an interrupt that we ignore, it must not inherit."""
    command = [sys.executable, "-m", "batond.clients.batonctl", "--server", daemon.target, *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment}
    heed_interrupts = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    # The hook runs before any thread of the child exists.
    return subprocess.Popen(command, preexec_fn=heed_interrupts, **(pipes | options))  # noqa: PLW1509


def test_an_interrupt_cancels_and_is_quiet(daemon: Any) -> None:
    """C5: Ctrl-C ends the generation at the daemon and leaves no traceback."""
    daemon.endless = True
    process = program(daemon, "generate", "hello")
    assert daemon.waiting.wait(20)
    process.send_signal(2)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert err == b""
    assert daemon.ended.wait(20)


def test_a_lost_daemon_is_one_line(daemon: Any) -> None:
    daemon.endless = True
    process = program(daemon, "top")
    assert daemon.waiting.wait(20)
    daemon.stop()
    _, err = process.communicate(timeout=20)
    assert process.returncode == 7
    assert len(err.splitlines()) == 1, err


def test_a_reader_that_leaves_ends_it_quietly(daemon: Any) -> None:
    read, write = os.pipe()
    os.close(read)
    process = program(daemon, "generate", "hello", stdout=write)
    os.close(write)
    _, err = process.communicate(timeout=20)
    assert err == b""
    assert process.returncode == 1


def test_without_a_command_the_help_is_shown(daemon: Any) -> None:
    process = program(daemon)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 2
    assert b"generate" in out


def draw(snapshot: BatchSnapshot, width: int = 120, **options: int) -> str:
    """Draws a snapshot as plain text."""
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(batch_view.render(snapshot, **options))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_the_batch_is_drawn() -> None:
    running = RowSnapshot(
        row=0, job_id="j[red]1", tenant="lab", sla_class="batch", output_tokens=48, max_tokens=96
    )
    parked = QuerySnapshot(
        job_id="p1",
        choice=2,
        tenant="shop",
        sla_class="batch",
        state=QueryState.PARKED,
        output_tokens=9,
        parks=3,
        parked_bytes=5 << 20,
        held=True,
    )
    prefilling = QuerySnapshot(
        job_id="w1", state=QueryState.PREFILLING, prompt_tokens=100, prefilled_tokens=32
    )
    drawn = draw(
        BatchSnapshot(
            step=412,
            rows=(running, RowSnapshot(row=1)),
            queries=(parked, prefilling),
            columns=77,
            host_pool_used_bytes=5 << 20,
            host_pool_bytes=256 << 20,
            queued_jobs=4,
            counters={"parks": 3.0, "unknown": 1.0},
        )
    )
    lines = drawn.splitlines()
    assert "step 412" in lines[0]
    assert "rows 1/2" in lines[0]
    assert "columns 77" in lines[0]
    (row,) = [line for line in lines if "j[red]1" in line]
    assert "━━━━━━━━┄┄┄┄┄┄┄┄ 48/96" in row
    assert any("idle" in line for line in lines)
    (line,) = [line for line in lines if "p1" in line]
    for part in ("p1#2", "shop", "parked (held)", "3", "5.0 MiB", "9"):
        assert part in line
    assert "prefilling 32/100" in drawn
    assert "5.0 MiB of 256.0 MiB" in drawn
    assert "queued jobs 4" in drawn
    assert "parks 3" in drawn
    assert "KV" not in drawn  # A daemon of before says nothing of it.


def test_memory_is_drawn_with_what_the_governor_makes_of_it() -> None:
    memory = MemorySnapshot(
        committed_bytes=3 << 20,
        pooled_bytes=1 << 20,
        spilled_bytes=2 << 20,
        kv_budget_bytes=8 << 20,
        row_limit=2,
        governor=GovernorState.SHRINKING,
        reason="others [took] memory",
        total_bytes=100 << 20,
        free_bytes=9 << 20,
    )
    drawn = draw(BatchSnapshot(step=1, memory=memory), width=160)
    for part in (
        "KV 3.0 MiB of 8.0 MiB",
        "pooled 1.0 MiB",
        "on disk 2.0 MiB",
        "free 9.0 MiB of 100.0 MiB",
        "rows at most 2, shrinking: others [took] memory",
    ):
        assert part in drawn
    ungoverned = MemorySnapshot(committed_bytes=3 << 20, governor=GovernorState.OFF)
    drawn = draw(BatchSnapshot(step=1, memory=ungoverned))
    assert "KV 3.0 MiB " in drawn
    assert "rows at most" not in drawn


def test_many_queries_are_counted_and_narrow_terminals_survive() -> None:
    queries = tuple(QuerySnapshot(job_id=f"q{number}") for number in range(40))
    snapshot = BatchSnapshot(step=1, rows=(RowSnapshot(row=0),), queries=queries)
    drawn = draw(snapshot, max_queries=5)
    assert "q4" in drawn
    assert "q5" not in drawn
    assert "and 35 more" in drawn
    assert draw(snapshot, width=30)
    assert draw(BatchSnapshot(step=0))


def test_a_token_is_alone_on_standard_output(daemon: Any, batonctl: Callable[..., Any]) -> None:
    asked = ("--highest-class", "standard", "--max-queued", "3", "--weight", "2", "--lower-class")
    result = batonctl("tenant", "add", "red", *asked, "--certificate", "red.example")
    assert (result.code, result.out) == (0, "n3w-t0ken\n")
    assert "not shown again" in result.err
    request = daemon.calls[-1][1]
    assert request.limits == admin_pb2.TenantLimits(
        weight=2, highest_class="standard", lower_class=True, max_queued=3
    )
    assert request.certificate_subject == "red.example"
    assert batonctl("tenant", "rotate", "red").out == "r0tated\n"
    assert json.loads(batonctl("tenant", "rotate", "red", "--json").out)["token"] == "r0tated"


def test_jobs_of_a_disabled_tenant_are_cancelled_on_demand(daemon: Any, batonctl: Callable[..., Any]) -> None:
    batonctl("tenant", "add", "red")
    for options, cancelled in (((), False), (("--cancel",), True)):
        assert batonctl("tenant", "disable", "red", *options).code == 0
        assert daemon.calls[-1][1].cancel_jobs is cancelled


def test_tenants_are_changed_and_listed(daemon: Any, batonctl: Callable[..., Any]) -> None:
    batonctl("tenant", "add", "red", "-c", "batch", "--admin")
    assert "disabled" in batonctl("tenant", "disable", "red").out
    assert "enabled" in batonctl("tenant", "enable", "red").out
    assert batonctl("tenant", "set", "red", "--max-running", "4", "--longest-prompt", "77").code == 0
    assert daemon.calls[-1][1].limits.max_running == 4
    listed = batonctl("tenant", "list").out
    assert all(word in listed for word in ("red", "77", "0123abcd"))
    assert "t0ken" not in listed
    assert json.loads(batonctl("tenant", "list", "--json").out)["limits"]["max_running"] == 4


def test_policies_are_shown_and_set(daemon: Any, batonctl: Callable[..., Any]) -> None:
    assert batonctl("policy", "show").out == "* fair\n  fcfs\n"
    assert batonctl("policy", "set", "fcfs").out == "fcfs (was fair)\n"
    assert daemon.calls[-1][1].policy == "fcfs"


def test_time_limits_and_updates(daemon: Any, batonctl: Callable[..., Any]) -> None:
    batonctl("submit", "x", "--id", "j", "--time-limit", "2.5")
    assert daemon.calls[-1][1].spec.timeout.ToMilliseconds() == 2500
    result = batonctl("update", "j", "-c", "batch", "--deadline", "2030-01-31T12:00:00+0100")
    assert result == (0, "j queued\n", "")
    request = daemon.calls[-1][1]
    assert (request.sla_class, request.deadline.ToJsonString()) == ("batch", "2030-01-31T11:00:00Z")
    assert batonctl("update", "j", "--deadline", "2030-01-31").code == 2
