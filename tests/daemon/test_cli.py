"""`batond` on the command line: what check-config finds before a daemon is started."""

from __future__ import annotations

import hashlib
import io
import json
import secrets
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from batond.daemon import cli, config_load
from batond.offload import folder

if TYPE_CHECKING:
    from collections.abc import Callable
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


def test_it_finds_a_spill_directory_whose_disk_has_no_room(
    check: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """M1: with the default size, which would come out as nothing."""
    monkeypatch.setattr(folder, "floor_bytes", lambda _: 1 << 60)
    monkeypatch.setattr(sys, "argv", [*check, "--set", f"engine.spill_dir={tmp_path}"])
    assert cli.run() == cli.EXIT_CONFIG
    assert f"{1 << 60} of them are left to others" in capsys.readouterr().err


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
        (["engine.host_pool_bytes=900TiB"], "the largest workable value is"),
        (["engine.spill_dir=/nowhere/at/all"], "engine.spill_dir: /nowhere/at/all: isn't there"),
        (["engine.spill_dir=/tmp"], "engine.spill_dir: /tmp: others may write to it"),
        (["engine.kernels=false", "engine.graphs=true"], "graphs = true needs kernels = true"),
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
    assert message.lower() in captured.err.lower()
    assert not captured.out


def test_kernels_alone_may_be_turned_off(
    check: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Graphs that nobody asked for go with them."""
    monkeypatch.setattr(sys, "argv", [*check, "--set", "engine.kernels=false"])
    assert cli.run() == 0
    assert json.loads(capsys.readouterr().out)["engine"]["kernels"] is False


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch sees."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)


@pytest.mark.usefixtures("two_cards")
@pytest.mark.parametrize(("device", "message"), [("cuda:2", "no more than 2 CUDA device(s)"), ("cuda:1", "")])
def test_a_card_that_is_not_there_is_found(
    check: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    device: str,
    message: str,
) -> None:
    """V1: by asking torch, without a model."""
    monkeypatch.setattr(sys, "argv", [*check, "--device", device])
    assert cli.run() == (cli.EXIT_CONFIG if message else 0)
    assert message in capsys.readouterr().err


def test_a_machine_without_cards_is_found(
    check: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """V1."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [*check, "--device", "cuda"])
    assert cli.run() == cli.EXIT_CONFIG
    assert "torch sees no CUDA device" in capsys.readouterr().err


def test_without_a_card_torch_is_not_read(check: list[str]) -> None:
    """It stays quick, so that it can stand before each start."""
    command = "import sys; from batond.daemon import cli; sys.exit(cli.run() or 'torch' in sys.modules)"
    options = [*check[1:], "--set", "engine.host_pool_bytes=1MiB"]
    done = subprocess.run([sys.executable, "-c", command, *options], check=False, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def hash_token(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs hash-token on what comes through a pipe."""

    def run(token: str, *options: str) -> int:
        monkeypatch.setattr(sys, "argv", ["batond", "hash-token", *options])
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{token}\n"))
        return cli.run()

    return run


@pytest.mark.parametrize("token", ["a", "a" * 64, "password-1234567890"])
def test_a_token_that_could_be_guessed_is_refused(
    hash_token: Callable[..., int], capsys: pytest.CaptureFixture[str], token: str
) -> None:
    """Its hash is a plain one: what is short is tried out from it."""
    assert hash_token(token) == cli.EXIT_CONFIG
    captured = capsys.readouterr()
    assert "the token could be guessed" in captured.err
    assert not captured.out
    assert hash_token(token, "--allow-weak") == 0
    assert hashlib.sha256(token.encode()).hexdigest() in capsys.readouterr().out


@pytest.mark.parametrize("draw", [secrets.token_hex, secrets.token_urlsafe])
def test_a_random_token_is_hashed(
    hash_token: Callable[..., int], capsys: pytest.CaptureFixture[str], draw: Callable[[int], str]
) -> None:
    token = draw(16)
    assert hash_token(token) == 0
    assert capsys.readouterr().out.split() == ["token_sha256", hashlib.sha256(token.encode()).hexdigest()]


def test_a_token_that_no_call_could_carry_is_refused(
    hash_token: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert hash_token("ü" * 40, "--allow-weak") == cli.EXIT_CONFIG
    assert "can't be sent" in capsys.readouterr().err
