"""batonctl for programs and shells: errors as JSON, completion in a real bash, help that is not cut."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import typer

from batond.clients import cli, cli_output, errors
from batond.v1 import types_pb2

ERROR_KEYS = {
    "kind",
    "message",
    "hint",
    "reason",
    "status",
    "details",
    "fields",
    "retry_after_s",
    "exit_code",
}


def error_of(text: str) -> dict[str, Any]:
    """The error in the one line of standard error."""
    (line,) = text.splitlines()
    document = json.loads(line)
    assert set(document) == {"error"}
    assert set(document["error"]) == ERROR_KEYS
    found: dict[str, Any] = document["error"]
    return found


def test_an_error_is_json_where_json_was_asked_for(
    daemon: Any, batonctl: Callable[..., Any], fault: Any
) -> None:
    daemon.faults["GetJob"] = [
        fault(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            message="two\nlines",
            reason="FULL",
            metadata={"limit": "4"},
            fields={"a.b": "too long"},
            retry_after_s=90.0,
        )
    ]
    result = batonctl("get", "j", "--json")
    assert (result.code, result.out) == (7, "")
    error = error_of(result.err)
    assert (error["kind"], error["message"], error["exit_code"]) == ("exhausted", "two\nlines", 7)
    assert (error["reason"], error["status"]) == ("FULL", "RESOURCE_EXHAUSTED")
    assert (error["details"], error["fields"]) == ({"limit": "4"}, {"a.b": "too long"})
    assert error["retry_after_s"] == 90.0
    assert "retry later" in error["hint"]


def test_wrong_usage_is_json_too(batonctl: Callable[..., Any]) -> None:
    result = batonctl("get", "--json")
    assert (result.code, result.out) == (2, "")
    error = error_of(result.err)
    assert (error["kind"], error["exit_code"]) == ("usage", 2)
    assert "JOB" in error["message"]
    plain = batonctl("get", "--nope", "--", "--json")
    assert plain.err.startswith("batonctl: "), "behind -- it is no option"


def test_a_job_that_fails_is_json_on_both_sides(daemon: Any, batonctl: Callable[..., Any]) -> None:
    error = types_pb2.JobError(code=8, reason="KV_BYTES", message="too large")
    daemon.final = types_pb2.Job(state=types_pb2.JOB_STATE_FAILED, text="half", error=error)
    result = batonctl("submit", "x", "--wait", "--json")
    assert result.code == 1
    assert json.loads(result.out)["error_reason"] == "KV_BYTES"
    assert error_of(result.err)["kind"] == "job_failed"


def test_kinds_of_errors_are_stable_and_have_codes() -> None:
    """Scripts compare them: a renamed class must not rename its kind."""
    raised = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.BatondClientError) and not kind.__subclasses__()
    ]
    kinds = {cli_output.error_kind(kind) for kind in raised}
    assert kinds == {
        "already_exists",
        "call_cancelled",
        "client_deadline",
        "exhausted",
        "invalid_request",
        "job_cancelled",
        "job_failed",
        "not_found",
        "permission_denied",
        "server",
        "server_aborted",
        "server_deadline",
        "unauthenticated",
        "unavailable",
        "unsupported_call",
        "wrong_state",
    }


def test_what_did_nothing_but_talk_has_json(daemon: Any, batonctl: Callable[..., Any]) -> None:
    batonctl("submit", "x", "--id", "j")
    assert json.loads(batonctl("drain", "--json").out) == {"running_jobs": 1}
    assert json.loads(batonctl("policy", "set", "fcfs", "--json").out) == {
        "policy": "fcfs",
        "previous_policy": "fair",
    }
    assert json.loads(batonctl("dead", "drop", "t0/j0", "--json").out) == {"dropped": ["t0/j0"]}
    dropped = json.loads(batonctl("dead", "drop", "--all", "--yes", "--json").out)
    assert dropped == {"dropped": ["t0/j1", "t0/j2"]}
    assert json.loads(batonctl("dead", "drop", "--all", "--json").out) == {"dropped": []}


def test_numbers_that_json_does_not_know_are_null() -> None:
    assert (
        cli_output.to_json({"a": float("-inf"), "b": (float("nan"), 1.5)}) == '{"a": null, "b": [null, 1.5]}'
    )


def commands(of: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command and group of commands, by its words."""
    of = of or typer.main.get_command(cli.app)
    yield path, of
    for name, command in getattr(of, "commands", {}).items():
        yield from commands(command, (*path, name))


def test_every_command_prints_json_but_those_that_only_talk_to_the_shell() -> None:
    without = [
        path
        for path, command in commands()
        if not hasattr(command, "commands") and not any("--json" in one.opts for one in command.params)
    ]
    assert without == [("completion",)]


def test_no_help_is_cut(batonctl: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On the narrowest common terminal every option's name is whole."""
    monkeypatch.setenv("COLUMNS", "80")
    for path, _ in commands():
        result = batonctl(*path, "--help")
        assert result.code == 0
        assert "…" not in result.out, path


def test_the_version_is_told(batonctl: Callable[..., Any]) -> None:
    assert re.fullmatch(r"batonctl \d+\.\d+.*\n", batonctl("--version").out)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_and_names(
    daemon: Any, batonctl: Callable[..., Any], tmp_path: Path
) -> None:
    """A real bash, with the script as a user would have it; names come from the daemon."""
    batonctl("submit", "x", "--id", "report-7")
    batonctl("submit", "x", "--id", "report-8")
    program = tmp_path / "batonctl"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m batond.clients.batonctl "$@"\n')
    program.chmod(0o700)
    asked = """
source <(batonctl completion bash) || exit 3
complete -p batonctl
press() {
  COMP_WORDS=(batonctl "$@") COMP_CWORD=$# COMPREPLY=()
  _batonctl_completion batonctl
  echo "${COMPREPLY[*]}"
}
press ge
press get report-
press list --state par
"""
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "BATOND_SERVER": daemon.target}
    ran = subprocess.run(
        ["bash", "--norc", "--noprofile", "-c", asked],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    how, ge, jobs, states = ran.stdout.splitlines()
    assert how == "complete -o default -F _batonctl_completion batonctl"
    assert set(ge.split()) == {"get", "generate"}
    assert jobs.split() == ["report-8", "report-7"], "newest first"
    assert states == "parked"


@pytest.mark.parametrize(("shell", "first"), [("zsh", "#compdef batonctl"), ("fish", "complete --command")])
def test_other_shells_get_their_scripts(
    batonctl: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, shell: str, first: str
) -> None:
    monkeypatch.delenv("_BATONCTL_COMPLETE", raising=False)
    result = batonctl("completion", shell)
    assert result.code == 0
    assert result.out.startswith(first)
    assert f"_BATONCTL_COMPLETE=complete_{shell}" in result.out


def test_nothing_is_offered_that_a_shell_would_run(
    daemon: Any, batonctl: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """What zsh is offered it evaluates: a daemon that lies must not be able to run a program."""
    for name in ("good", 'bad"$(touch x)', "worse`id`", "two words"):
        daemon.jobs[name] = (types_pb2.JobSpec(), types_pb2.Job(job_id=name))
    monkeypatch.setenv("_BATONCTL_COMPLETE", "complete_zsh")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "batonctl get ")
    with pytest.raises(SystemExit) as end:
        batonctl("get")
    assert end.value.code == 0
    offered = capsys.readouterr().out
    assert '"good"' in offered
    assert not any(word in offered for word in ("bad", "worse", "two", "touch"))


def test_a_daemon_that_is_away_offers_nothing(
    daemon: Any, batonctl: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    daemon.stop()
    monkeypatch.setenv("_BATONCTL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "batonctl\nget\n")
    monkeypatch.setenv("COMP_CWORD", "2")
    with pytest.raises(SystemExit) as end:
        batonctl("get")
    assert end.value.code == 0
    assert capsys.readouterr() == ("\n", "")
