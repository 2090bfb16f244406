"""The units are valid, hardened, alike, and agree with the helpers that make their user and their folder."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from batond.daemon.config_load import load_settings
from batond.daemon.errors import ConfigError

SYSTEMD = Path(__file__).resolve().parents[2] / "systemd"
PROGRAM = "/opt/batond/bin/batond"
MAX_EXPOSURE = 2.0


def need(tool: str) -> str:
    """Gives the path of a systemd tool or skips the test."""
    path = shutil.which(tool)
    if path is None:
        pytest.skip(f"{tool} is not installed")
    return path


def settings(section: str, name: str = "batond.service") -> dict[str, str]:
    """Reads one section of a unit; a repeated key's values are joined by newlines."""
    found: dict[str, list[str]] = {}
    current = ""
    for line in (SYSTEMD / name).read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            current = line.strip("[]")
        elif current == section and "=" in line and not line.startswith("#"):
            key, value = line.split("=", maxsplit=1)
            found.setdefault(key, []).append(value)
    return {key: "\n".join(values) for key, values in found.items()}


@pytest.fixture(params=["batond.service", "batond@.service"])
def unit(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Copies a unit with a program that exists here, since verify looks for the one of ExecStart."""
    text = (SYSTEMD / request.param).read_text(encoding="utf-8")
    assert text.count(PROGRAM) == 1
    copy = tmp_path / str(request.param)
    copy.write_text(text.replace(PROGRAM, sys.executable), encoding="utf-8")
    return copy


def verify(unit: Path) -> str:
    """Runs systemd-analyze verify and gives what it says of batond's units."""
    command = [need("systemd-analyze"), "verify", "--man=no", "--recursive-errors=no", str(unit)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    # Unknown keys and bad values are only warned of; warnings about other units of this host don't count.
    return "".join(line for line in result.stderr.splitlines() if "batond" in line)


def test_systemd_accepts_the_unit(unit: Path) -> None:
    assert not verify(unit)


def test_systemd_accepts_the_unit_with_its_credentials(unit: Path) -> None:
    """What is only shown in comments must work when it is uncommented."""
    text = re.sub(r"^#(?=LoadCredential=)", "", unit.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert text.count("\nLoadCredential=batond.") == 3
    unit.write_text(text, encoding="utf-8")
    assert not verify(unit)


def test_exposure_is_low(unit: Path) -> None:
    command = [need("systemd-analyze"), "security", "--offline=true", "--no-pager", str(unit)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    overall = re.search(r"Overall exposure level for batond@?\S*\.service: ([0-9.]+)", result.stdout)
    assert overall, result.stderr
    print(overall.group())  # noqa: T201 - the figure is wanted, not only the verdict: pytest -rP shows it
    assert float(overall.group(1)) <= MAX_EXPOSURE, result.stdout


def test_an_instance_is_the_service_with_folders_and_a_gpu_of_its_own() -> None:
    one, each = settings("Service"), settings("Service", "batond@.service")
    differ = {key for key in one.keys() | each.keys() if one.get(key) != each.get(key)}
    assert differ == {"Environment", "EnvironmentFile", "ExecStart", "RuntimeDirectory", "StateDirectory"}
    assert each["ExecStart"].endswith("--config /etc/batond/%i.toml")
    assert (each["StateDirectory"], each["RuntimeDirectory"]) == ("batond-%i", "batond-%i")
    shared = [line for line in one["Environment"].splitlines() if not line.startswith("HOME=")]
    assert set(shared) <= set(each["Environment"].splitlines())
    words = each["Environment"].split()
    assert {"CUDA_DEVICE_ORDER=PCI_BUS_ID", "CUDA_VISIBLE_DEVICES=%i", "BATOND_MODEL__DEVICE=cuda"} <= set(
        words
    )
    unit, template = settings("Unit"), settings("Unit", "batond@.service")
    assert unit.pop("Description") != template.pop("Description")
    assert unit == template


def test_the_credentials_of_the_units_are_keys_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (SYSTEMD / "batond.service").read_text(encoding="utf-8")
    names = re.findall(r"^#LoadCredential=([^:]+):", text, flags=re.MULTILINE)
    assert names == ["batond.queue.url", "batond.queue.password", "batond.tls.key_file"]
    (tmp_path / "batond.queue.url").write_text("redis://:hunter2@db:6379/0\n", encoding="utf-8")
    (tmp_path / "batond.queue.password").write_text("hunter3\n", encoding="utf-8")
    (tmp_path / "batond.tls.key_file").write_text("a key", encoding="utf-8")
    config = tmp_path / "batond.toml"
    config.write_text(
        "[tls]\ncert_file='/etc/batond/tls/server.crt'\nkey_file='/nowhere'\n", encoding="utf-8"
    )
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    with pytest.raises(ConfigError, match=r"batond\.toml: name it batond\.<section>\.<key>"):
        load_settings(config)
    config = config.rename(tmp_path / "0.toml")
    loaded = load_settings(config)
    assert loaded.queue.url.get_secret_value() == "redis://:hunter2@db:6379/0"
    assert loaded.queue.password.get_secret_value() == "hunter3"
    assert loaded.tls.key_file == tmp_path / "batond.tls.key_file"
    monkeypatch.setenv("BATOND_QUEUE__URL", "redis://other")
    assert load_settings(config).queue.url.get_secret_value() == "redis://other"


def test_ready_and_watchdog_come_from_the_daemon() -> None:
    """V1: the service is up when the daemon says so, and a stalled engine is noticed."""
    service = settings("Service")
    assert service["Type"] == "notify"
    assert service["NotifyAccess"] == "main"
    assert service["KillMode"] == "mixed"
    assert service["WatchdogSec"].endswith("s")


def test_what_cuda_needs_is_not_forbidden() -> None:
    service = settings("Service")
    assert "char-nvidia* rw" in service["DeviceAllow"]
    assert service["LimitMEMLOCK"] == "infinity"
    for forbidden in ("PrivateDevices", "MemoryDenyWriteExecute", "ProcSubset"):
        assert forbidden not in service


def test_user_and_folder_are_made_with_the_modes_of_the_unit(tmp_path: Path) -> None:
    """Runs sysusers and tmpfiles on an empty root, in the order of an installation."""
    if os.geteuid() != 0:
        pytest.skip("giving a folder to another user needs root")
    sysusers, tmpfiles = need("systemd-sysusers"), need("systemd-tmpfiles")
    (tmp_path / "etc").mkdir()
    subprocess.run([sysusers, f"--root={tmp_path}", str(SYSTEMD / "sysusers.d/batond.conf")], check=True)
    account = next(
        line
        for line in (tmp_path / "etc/passwd").read_text(encoding="utf-8").splitlines()
        if line.startswith("batond:")
    ).split(":")
    assert account[5] == "/var/lib/batond"
    assert account[6].endswith("nologin")
    service = settings("Service")
    assert (service["User"], service["Group"]) == ("batond", "batond")

    config = tmp_path / "etc/batond/batond.toml"
    config.parent.mkdir()
    config.write_text("", encoding="utf-8")
    for name in ("0.toml", "0.env"):
        config.with_name(name).write_text("", encoding="utf-8")
    subprocess.run(
        [tmpfiles, "--create", f"--root={tmp_path}", str(SYSTEMD / "tmpfiles.d/batond.conf")], check=True
    )
    for path, mode in [
        (config.parent, int(service["ConfigurationDirectoryMode"], 8)),
        (config, 0o640),
        (config.with_name("0.toml"), 0o640),
        (config.with_name("0.env"), 0o640),
    ]:
        assert path.stat().st_mode & 0o777 == mode
        assert (path.stat().st_uid, path.stat().st_gid) == (0, int(account[3]))
