"""The compose files follow their schema, agree with the daemon's configuration, and give no rights away."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from batond.daemon.config_load import load_settings

if TYPE_CHECKING:
    from pathlib import Path

    from batond.daemon.config import Settings

FILES = ("compose.yaml", "gpu.yaml")


@pytest.fixture(scope="module")
def compose(deploy: Path) -> dict[str, Any]:
    """Reads the main file, merge keys resolved."""
    loaded: dict[str, Any] = yaml.safe_load((deploy / "compose" / FILES[0]).read_text(encoding="utf-8"))
    return loaded


@pytest.fixture(scope="module")
def daemons(compose: dict[str, Any]) -> dict[str, Any]:
    """Gives the daemons among the services."""
    return {name: service for name, service in compose["services"].items() if name.startswith("daemon-")}


def test_they_follow_the_schema(deploy: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    files = [str(deploy / "compose" / name) for name in FILES]
    done = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("services: {a: {image: b, read_onli: true}}\n", encoding="utf-8")
    assert subprocess.run([*command, str(wrong)], capture_output=True, check=False).returncode == 1


def test_two_daemons_share_one_queue(
    daemons: dict[str, Any], compose: dict[str, Any], bare_environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What stands in the environment is the configuration: unknown keys and bad values would be refused."""
    found: dict[str, Settings] = {}
    (tmp_path / "batond.toml").touch()
    for name, service in daemons.items():
        with pytest.MonkeyPatch.context() as patch:
            for key, value in service["environment"].items():
                patch.setenv(key, re.sub(r"\$\{\w+:-(.*)\}", r"\1", value))
            found[name] = load_settings(tmp_path / "batond.toml")
    assert len(found) == 2
    (url,) = {one.queue.url.get_secret_value() for one in found.values()}
    host = re.fullmatch(r"redis://(\w+):6379/0", url)
    assert host
    assert host[1] in compose["services"]
    for name, one in found.items():
        assert one.server.advertise == f"{name}:7431"
        assert one.server.require_credentials
        assert daemons[name]["hostname"] == name
        assert float(daemons[name]["stop_grace_period"].removesuffix("s")) >= one.service.drain_timeout_s + 30
    assert not [key for key in os.environ if key.startswith("BATOND_")]


def test_ports_are_those_of_this_host_alone(daemons: dict[str, Any]) -> None:
    ports = [port for service in daemons.values() for port in service["ports"]]
    assert len(set(ports)) == 4
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_nobody_has_rights_that_are_not_needed(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not service["user"].startswith(("0", "root"))
        assert not service.get("privileged")
    assert compose["networks"]["queue"] == {"internal": True}
    assert compose["services"]["redis"]["networks"] == ["queue"]


def test_the_queue_keeps_every_job(compose: dict[str, Any]) -> None:
    command = compose["services"]["redis"]["command"]
    words = list(zip(command[1::2], command[2::2], strict=True))
    assert ("--appendonly", "yes") in words
    assert ("--maxmemory-policy", "noeviction") in words


def test_gpus_go_to_daemons_that_are_there(deploy: Path, daemons: dict[str, Any]) -> None:
    more = yaml.safe_load((deploy / "compose" / "gpu.yaml").read_text(encoding="utf-8"))["services"]
    assert set(more) == set(daemons)
    gpus = [
        device
        for service in more.values()
        for one in service["deploy"]["resources"]["reservations"]["devices"]
        for device in one["device_ids"]
    ]
    assert sorted(gpus) == ["0", "1"]
