"""`batond install-service`: into an empty root with the real helpers of systemd; the plan for a live host."""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from batond.daemon.cli import app
from batond.daemon.config_load import load_settings
from batond.daemon.errors import ConfigError
from batond.systemd import command, install
from batond.systemd.install import Remove, Run, Write, carry_out, installation, removal

SYSTEMD = Path(install.__file__).parent
PROGRAM = "/opt/batond/bin/batond"
TOOLS = ("systemctl", "systemd-sysusers", "systemd-tmpfiles")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Gives the root folder of a system that does not run."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")
    if os.geteuid() != 0:
        pytest.skip("giving folders to another user needs root")
    (tmp_path / "etc").mkdir()
    return tmp_path


def say(*arguments: str) -> str:
    """Runs `batond install-service`, which must succeed; gives what it says."""
    result = CliRunner().invoke(app, ["install-service", *arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def tree(root: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below a folder with its mode and content, links with their targets."""
    return {
        str(path.relative_to(root)): (
            path.lstat().st_mode,
            str(path.readlink()).encode() if path.is_symlink() else path.read_bytes(),
        )
        for path in sorted(root.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def test_one_command_sets_the_service_up(root: Path) -> None:
    """V1: user, folders, units, configuration; enabled, and no step is done twice."""
    told = say(
        "--root", str(root), "--program", "/srv/venv/bin/batond", "--model", "/srv/models/tiny", "--now"
    )
    for unit in ("batond.service", "batond@.service"):
        text = (root / "etc/systemd/system" / unit).read_text(encoding="utf-8")
        assert "ExecStart=/srv/venv/bin/batond serve" in text
        assert PROGRAM not in text
    wanted = root / "etc/systemd/system/multi-user.target.wants/batond.service"
    assert wanted.is_symlink()
    config = root / "etc/batond/batond.toml"
    assert tomllib.loads(config.read_text(encoding="utf-8"))["model"]["path"] == "/srv/models/tiny"
    assert load_settings(config).model.path == "/srv/models/tiny"
    (group,) = [line for line in (root / "etc/group").read_text().splitlines() if line.startswith("batond:")]
    for path, mode in ((config, 0o640), (config.parent, 0o750)):
        assert path.stat().st_mode & 0o777 == mode
        assert (path.stat().st_uid, path.stat().st_gid) == (0, int(group.split(":")[2]))
    assert "write" in told

    before = tree(root)
    again = say(
        "--root", str(root), "--program", "/srv/venv/bin/batond", "--model", "/srv/models/tiny", "--now"
    )
    assert "write" not in again
    assert "replace" not in again
    assert tree(root) == before


def test_a_configuration_that_is_there_is_kept_and_units_are_renewed(root: Path) -> None:
    say("--root", str(root), "--program", PROGRAM)
    config = root / "etc/batond/batond.toml"
    config.write_text('[model]\npath = "mine"\n', encoding="utf-8")
    unit = root / "etc/systemd/system/batond.service"
    unit.write_text("of an older release", encoding="utf-8")
    told = say("--root", str(root), "--program", PROGRAM, "--model", "/srv/models/other")
    assert config.read_text(encoding="utf-8") == '[model]\npath = "mine"\n'
    assert f"keep     {config}" in told
    assert "a configuration that is there is kept" in told
    assert f"replace  {unit}" in told
    assert unit.read_text(encoding="utf-8") == (SYSTEMD / "batond.service").read_text(encoding="utf-8")


def test_a_dry_run_tells_all_and_does_nothing(root: Path) -> None:
    dry = say("--root", str(root), "--program", PROGRAM, "--now", "--dry-run")
    assert tree(root) == {}
    assert say("--root", str(root), "--program", PROGRAM, "--now") == dry


def test_uninstalling_leaves_what_is_the_operators(root: Path) -> None:
    say("--root", str(root), "--program", PROGRAM, "--now")
    dry = say("--root", str(root), "--uninstall", "--dry-run")
    assert (root / "etc/systemd/system/batond.service").exists()
    assert say("--root", str(root), "--uninstall") == dry
    left = [path for path in tree(root) if "batond" in path]
    assert left == ["etc/batond/batond.toml"]
    assert "etc/batond" in dry
    assert "absent" in say("--root", str(root), "--uninstall")


def test_the_plan_for_a_live_host_checks_before_it_starts() -> None:
    steps = installation(Path("/"), program=PROGRAM, model="smollm2", start=True)
    commands = [step.command for step in steps if isinstance(step, Run)]
    assert commands == [
        ("systemd-sysusers", "batond.conf"),
        ("systemd-tmpfiles", "--create", "batond.conf"),
        ("systemctl", "daemon-reload"),
        (PROGRAM, "check-config", "--config", "/etc/batond/batond.toml"),
        ("systemctl", "enable", "--now", "batond.service"),
    ]
    files = {str(step.path) for step in steps if isinstance(step, Write)}
    packaged = {path.name for path in SYSTEMD.rglob("*") if path.suffix in {".service", ".conf", ".toml"}}
    assert {Path(name).name for name in files} == packaged
    last_write = max(place for place, step in enumerate(steps) if isinstance(step, Write))
    assert last_write < min(place for place, step in enumerate(steps) if isinstance(step, Run))


def test_instances_are_stopped_and_disabled_before_their_unit_goes(tmp_path: Path) -> None:
    wants = tmp_path / install.UNITS / "multi-user.target.wants"
    wants.mkdir(parents=True)
    for name in ("batond.service", "batond@0.service", "other.service"):
        (wants / name).symlink_to("/dev/null")
    steps = removal(tmp_path)
    disabled = [step.command[-1] for step in steps if isinstance(step, Run)]
    assert disabled == ["batond.service", "batond@0.service"]
    assert isinstance(steps[len(disabled)], Remove)


@pytest.mark.parametrize(
    ("program", "model", "message"),
    [
        ("/home/a/venv/bin/batond", "", "can't see the program"),
        ("/opt/with space/batond", "", "can't stand in a unit"),
        ("/opt/100%/batond", "", "can't stand in a unit"),
        ("bin/batond", "", "absolute path"),
        (PROGRAM, "/tmp/model", "can't see the model"),
    ],
)
def test_what_the_service_could_not_run_is_refused(program: str, model: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        installation(Path("/"), program=program, model=model)


def test_a_link_out_of_the_root_is_not_followed(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "etc").symlink_to(outside)
    with pytest.raises(ConfigError, match="leads out of"):
        carry_out([Write(Path("etc/x"), "text")], root, tell=lambda _: None)
    assert not list(outside.iterdir())


def test_a_command_that_fails_stops_the_rest_and_is_named(tmp_path: Path) -> None:
    steps = [Run(("false", "--now")), Write(Path("never"), "text")]
    with pytest.raises(ConfigError, match=r"`false --now` failed: exit status 1"):
        carry_out(steps, tmp_path, tell=lambda _: None)
    assert not list(tmp_path.iterdir())


def test_it_says_what_a_host_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="needs root"):
        install.check_host(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(install, "BOOTED", tmp_path / "none")
    with pytest.raises(ConfigError, match="systemd does not run here"):
        install.check_host(Path("/"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="systemd-sysusers, systemd-tmpfiles is not on PATH"):
        install.check_host(tmp_path)


def test_uninstalling_takes_no_other_wishes() -> None:
    with pytest.raises(ConfigError, match="--uninstall goes with"):
        command.install_service(uninstall=True, model="smollm2")
