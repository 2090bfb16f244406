"""`batond doctor` as a whole, and what it says of models and of Redis."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import redis

from batond.clients import cli as batonctl
from batond.daemon import cli
from batond.daemon.doctor import redis_servers, weights
from batond.daemon.doctor.report import Finding, Level, findings_of
from batond.daemon.errors import ConfigError
from batond.daemon.queue.embedded import EmbeddedRedis

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from batond.daemon.config import Settings

OK, WARNING, FAULT = Level.OK, Level.WARNING, Level.FAULT


def levels(findings: Iterable[Finding]) -> list[Level]:
    return [one.level for one in findings]


# -- the whole ------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model."""
    place = tmp_path / "model"
    place.mkdir()
    (place / "config.json").write_text('{"model_type": "llama"}')
    (place / "tokenizer.json").write_text("{}")
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    (place / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    return place


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["batond", "doctor", *arguments])
    return cli.run()


def test_a_sound_host_has_no_fault_and_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path
) -> None:
    """V1: the daemon is down; nothing that the doctor makes may be in its way."""
    file = tmp_path / "batond.toml"
    file.write_text(
        f'[model]\npath = "{model}"\ndevice = "cpu"\n'
        f'[server]\nlisten = ["127.0.0.1:0", "unix:{tmp_path}/run/b.sock"]\nmetrics_listen = ""\n'
        f'[queue]\nstate_dir = "{tmp_path}/state"\n'
    )
    before = sorted(tmp_path.rglob("*"))
    assert run(monkeypatch, "--config", str(file), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is True
    assert document["counts"]["fault"] == 0
    assert {one["check"] for one in document["checks"]} == {
        "configuration",
        "spill directory",
        "policies",
        "host pool",
        "model",
        "redis",
        "state directory",
        "addresses",
        "certificates",
        "card",
        "memlock",
        "systemd",
        "tracing",
    }
    assert all(set(one) == {"check", "level", "message", "advice"} for one in document["checks"])
    assert sorted(tmp_path.rglob("*")) == before
    (model / "model.safetensors").unlink()
    assert run(monkeypatch, "--config", str(file)) == 1
    shown = capsys.readouterr().out
    assert f"fault    model            {model} has no weights" in shown
    assert "-> copy or download the model again" in shown
    assert shown.splitlines()[-1].endswith("1 at fault")


def test_a_configuration_with_faults_has_each_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--set", "engine.rows=0", "--set", "queue.lease=3", "--json") == 1
    document = json.loads(capsys.readouterr().out)
    faults = [one["message"] for one in document["checks"] if one["level"] == "fault"]
    assert any("engine.rows" in fault for fault in faults)
    assert any("did you mean 'lease_s'" in fault for fault in faults)


def test_a_check_that_breaks_does_not_keep_others_from_being_made() -> None:
    def broken() -> Iterator[Finding]:
        yield Finding("x", OK, "so far")
        raise RuntimeError("oops")

    def configured() -> Iterator[Finding]:
        raise ConfigError("mend it")
        yield

    found = list(findings_of("x", broken))
    assert [one.level for one in found] == [OK, WARNING]
    assert "RuntimeError: oops" in found[1].message
    assert list(findings_of("x", configured)) == [Finding("x", FAULT, "mend it")]


def test_batonctl_hands_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """It imports nothing of the daemon: it starts it."""
    asked: list[list[str]] = []

    def started(given: list[str], *, check: bool) -> Any:
        asked.append(given)
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(subprocess, "run", started)
    given = ["--config", "/x.toml", "--set", "engine.rows=4", "--unit", "batond@0", "--json"]
    monkeypatch.setattr(sys, "argv", ["batonctl", "doctor", *given])
    assert batonctl.run() == 1
    assert asked == [[sys.executable, "-m", "batond.daemon", "doctor", *given]]


# -- the model ------------------------------


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda place: (place / "config.json").write_text("{"), "no config.json"),
        (
            lambda place: (place / "config.json").write_text('{"model_type": "nope"}'),
            "knows no model of type",
        ),
        (lambda place: (place / "tokenizer.json").unlink(), "no tokenizer"),
        (lambda place: os.truncate(place / "model.safetensors", 66), "is not whole"),
        (lambda place: os.truncate(place / "model.safetensors", 3), "is not whole"),
        (
            lambda place: (place / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "model-2.safetensors"}}'
            ),
            "is missing",
        ),
    ],
)
def test_a_model_that_is_not_whole(
    model: Path, settings: Callable[..., Settings], spoil: Callable[[Path], object], words: str
) -> None:
    given = settings(model={"path": str(model)})
    assert levels(weights.look(given)) == [OK]
    spoil(model)
    found = list(weights.look(given))
    assert [one.level for one in found] == [FAULT]
    assert words in found[0].message


def test_a_gguf_file_that_is_none(tmp_path: Path, settings: Callable[..., Settings]) -> None:
    file = tmp_path / "m.gguf"
    for content in (b"", b"GGUF", b"GGUF" + struct.pack("<IQQ", 3, 9, 9)):
        file.write_bytes(content)
        assert levels(weights.look(settings(model={"path": str(file)}))) == [FAULT]


# -- Redis ------------------------------


@pytest.mark.redis
def test_a_redis_is_asked_what_it_does_with_its_memory(
    tmp_path: Path, settings: Callable[..., Settings]
) -> None:
    """R: a server that would drop accepted jobs is a fault, one that forgets them when it dies a warning."""
    server = EmbeddedRedis(tmp_path / "state")
    server.start()
    try:
        given = settings(queue={"url": server.url})
        found = list(redis_servers.look(given))
        assert [one.level for one in found] == [OK]
        assert "evicts nothing" in found[0].message
        with redis.Redis(unix_socket_path=str(server.socket_path)) as client:
            client.config_set("appendonly", "no")
            found = list(redis_servers.look(given))
            assert [(one.level, one.advice) for one in found[1:]] == [(WARNING, "set appendonly yes")]
            client.config_set("maxmemory-policy", "allkeys-lru")
        found = list(redis_servers.look(given))
        assert found[0].level is FAULT
        assert "Set `maxmemory-policy noeviction`" in found[0].message
    finally:
        server.stop()
    found = list(redis_servers.look(given))
    assert [one.level for one in found] == [FAULT]
    assert "start it" in found[0].advice


def test_a_private_redis_must_be_new_enough(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: Callable[..., Settings]
) -> None:
    program = tmp_path / "redis-server"
    monkeypatch.setattr(redis_servers, "find_server", lambda: program)
    for version, level in (("v=7.2.4 sha", OK), ("v=6.0.16", FAULT), ("garbage", FAULT)):
        program.write_text(f"#!/bin/sh\necho 'Redis server {version}'\n")
        program.chmod(0o700)
        assert levels(redis_servers.look(settings())) == [level]
