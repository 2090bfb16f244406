"""`batond` on the command line: what check-config finds before a daemon is started."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from batond.daemon import cli, config_load

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The start of a command line that checks an otherwise sound configuration."""
    monkeypatch.setattr(config_load, "DEFAULT_FILE", tmp_path / "none.toml")
    model = tmp_path / "model.gguf"
    model.touch()
    return ["batond", "check-config", "--model", str(model)]


def test_it_takes_the_flags_of_serve(
    check: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [*check, "--rows", "3", "--policy", "fair", "--listen", "127.0.0.1:1"])
    assert cli.run() == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["engine"]["rows"], shown["engine"]["policy"]) == (3, "fair")
    assert shown["server"]["listen"] == ["127.0.0.1:1"]


def test_graphs_and_compiled_parts_are_turned_off_for_debugging(
    check: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for flags in ([], ["--no-graphs"], ["--no-compile"]):
        monkeypatch.setattr(sys, "argv", [*check, *flags])
        assert cli.run() == 0
        engine = json.loads(capsys.readouterr().out)["engine"]
        found.append((engine["graphs"], engine["compiled"]))
    assert found == [(True, True), (False, True), (True, False)]


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["queue.url=http://somewhere"], "the Redis URL can't be used"),
        (["tls.cert_file=/nowhere.crt", "tls.key_file=/nowhere.key"], "can't use the TLS files"),
        (["engine.policy=fcsf"], "unknown policy 'fcsf'"),
    ],
)
def test_it_finds_what_would_fail_the_start(
    check: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    assignments: list[str],
    message: str,
) -> None:
    for assignment in assignments:
        check += ["--set", assignment]
    monkeypatch.setattr(sys, "argv", check)
    assert cli.run() == cli.EXIT_CONFIG
    captured = capsys.readouterr()
    assert message in captured.err
    assert not captured.out
