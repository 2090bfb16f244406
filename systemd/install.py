"""Sets batond up as a system service, and takes it away again: `batond install-service`.

What is to be done is a list of steps, made without touching anything; `carry_out` does them, or tells them
alone. Every step may be repeated. What belongs to the operator, the configuration and the state, is never
overwritten and never removed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final

from batond.daemon.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

UNITS: Final = Path("etc/systemd/system")
CONFIG: Final = Path("etc/batond/batond.toml")
#: Files by the folder of this package that they lie in, and where they go.
HELPERS: Final = {"sysusers.d": Path("etc/sysusers.d"), "tmpfiles.d": Path("etc/tmpfiles.d")}
#: The program that the units name as they lie here.
PACKAGED_PROGRAM: Final = "/opt/batond/bin/batond"
#: What the units hide from the service (ProtectHome=, PrivateTmp=).
HIDDEN: Final = tuple(Path("/", name) for name in ("home", "root", "run/user", "tmp", "var/tmp"))
BOOTED: Final = Path("/run/systemd/system")
#: Models that are named and have no path.
NAMED_MODELS: Final = frozenset({"smollm2"})
_PLAIN_PATH: Final = re.compile(r"/[\w./@+-]+")
_MODEL_LINE: Final = re.compile(r"^path = .*$", flags=re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Write:
    """A file to write where it differs.

    Attributes:
        path: Below the root folder.
        text: What it holds.
        mode: Its permissions.
        keep: Leave one that is there.
    """

    path: Path
    text: str
    mode: int = 0o644
    keep: bool = False


@dataclass(frozen=True, slots=True)
class Remove:
    """A file to remove if it is there."""

    path: Path


@dataclass(frozen=True, slots=True)
class Run:
    """A command that must succeed."""

    command: tuple[str, ...]


Step = Write | Remove | Run


def installation(root: Path, *, program: str, model: str = "", start: bool = False) -> list[Step]:
    """Steps that install the service.

    Args:
        root: `/` is this host; another folder is that of a system that does not run.
        program: Path of `batond` as the service will see it.
        model: Becomes `model.path` of a new configuration; "" leaves the example's.
        start: Check the configuration, then enable and start the service; below another root only enable it.

    Raises:
        ConfigError: The service could not run what is named.
    """
    _check_visible(program, "the program")
    if not _PLAIN_PATH.fullmatch(program):
        raise ConfigError(f"{program!r} can't stand in a unit: install batond in a folder with a plain name")
    if model and model not in NAMED_MODELS:
        _check_visible(model, "the model")
    live = root == Path("/")
    at_root = () if live else (f"--root={root}",)
    config = _packaged("batond.toml")
    if model:
        config = _MODEL_LINE.sub(lambda _: f"path = {json.dumps(model)}", config, count=1)
    steps: list[Step] = [
        Write(UNITS / name, _packaged(name).replace(PACKAGED_PROGRAM, program))
        for name in _names("", ".service")
    ]
    for folder, place in HELPERS.items():
        steps += [Write(place / name, _packaged(f"{folder}/{name}")) for name in _names(folder, ".conf")]
    steps += [
        Write(CONFIG, config, mode=0o640, keep=True),
        Run(("systemd-sysusers", *at_root, *_names("sysusers.d", ".conf"))),
        Run(("systemd-tmpfiles", "--create", *at_root, *_names("tmpfiles.d", ".conf"))),
    ]
    if live:
        steps.append(Run(("systemctl", "daemon-reload")))
    if start and live:
        steps.append(Run((program, "check-config", "--config", f"/{CONFIG}")))
        steps.append(Run(("systemctl", "enable", "--now", "batond.service")))
    elif start:
        steps.append(Run(("systemctl", *at_root, "enable", "batond.service")))
    return steps


def removal(root: Path) -> list[Step]:
    """Steps that stop the service and remove its units; configuration, state and user stay."""
    live = root == Path("/")
    mode = ("--now",) if live else (f"--root={root}",)
    wanted = sorted((root / UNITS / "multi-user.target.wants").glob("batond*.service"))
    steps: list[Step] = [Run(("systemctl", "disable", *mode, link.name)) for link in wanted]
    there = [name for name in _names("", ".service") if (root / UNITS / name).exists()]
    if live and there:  # Those that were started without being enabled.
        steps.append(Run(("systemctl", "stop", "batond.service", "batond@*.service")))
    steps += [Remove(UNITS / name) for name in _names("", ".service")]
    for folder, place in HELPERS.items():
        steps += [Remove(place / name) for name in _names(folder, ".conf")]
    if live:
        steps.append(Run(("systemctl", "daemon-reload")))
    return steps


def carry_out(
    steps: Sequence[Step], root: Path, *, dry_run: bool = False, tell: Callable[[str], None] = print
) -> None:
    """Do the steps in order, and tell each in one line.

    Raises:
        ConfigError: A command failed, or a path leads out of the root folder.
    """
    for step in steps:
        match step:
            case Run(command):
                tell(f"run      {' '.join(command)}")
                if not dry_run:
                    _run(command)
            case Remove(path):
                place = _below(root, path)
                there = place.is_symlink() or place.exists()
                tell(f"{'remove' if there else 'absent':8} {place}")
                if there and not dry_run:
                    place.unlink()
            case Write():
                _write(step, _below(root, step.path), dry_run=dry_run, tell=tell)


def check_host(root: Path) -> None:
    """Find out whether the steps can be done here.

    Raises:
        ConfigError: Not root, no systemd, or no such root folder.
    """
    if not root.is_dir():
        raise ConfigError(f"there is no folder {root}")
    if os.geteuid() != 0:
        raise ConfigError("installing a service needs root: say it again with sudo, or look with --dry-run")
    if root == Path("/") and not BOOTED.is_dir():
        raise ConfigError("systemd does not run here; --root FOLDER prepares a system that is to be started")
    missing = [
        name for name in ("systemctl", "systemd-sysusers", "systemd-tmpfiles") if not shutil.which(name)
    ]
    if missing:
        raise ConfigError(f"{', '.join(missing)} is not on PATH: this needs systemd")


def running_program() -> str:
    """Path of the `batond` that runs.

    Raises:
        ConfigError: It was not installed as a program, or its Python can't be seen by a service.
    """
    program = Path(sys.prefix) / "bin" / "batond"
    if not program.exists():
        raise ConfigError(
            f"{program} is missing: install batond in a virtual environment, such as /opt/batond"
        )
    _check_visible(str(Path(sys.executable).resolve()), "the Python of this environment")
    return str(program)


def _write(step: Write, place: Path, *, dry_run: bool, tell: Callable[[str], None]) -> None:
    old = place.read_text(encoding="utf-8") if place.exists() else None
    if old is not None and step.keep:
        tell(f"keep     {place}")
        return
    if old == step.text:
        tell(f"same     {place}")
        return
    tell(f"{'write' if old is None else 'replace':8} {place}")
    if dry_run:
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=place.parent, prefix=f".{place.name}.", delete=False) as file:
        file.write(step.text.encode())
    Path(file.name).chmod(step.mode)
    Path(file.name).replace(place)


def _run(command: tuple[str, ...]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own words
    except OSError as error:
        raise ConfigError(f"`{' '.join(command)}` can't be run: {error}") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
        raise ConfigError(f"`{' '.join(command)}` failed: {said}")


def _below(root: Path, path: Path) -> Path:
    place = root / path
    if not place.parent.resolve().is_relative_to(root.resolve()):
        raise ConfigError(f"{place.parent} leads out of {root}")
    return place


def _check_visible(path: str, what: str) -> None:
    """A service under these units sees neither homes nor the common temporary folders."""
    place = Path(path)
    if not place.is_absolute():
        raise ConfigError(f"{what} needs an absolute path, not {path!r}")
    for hidden in HIDDEN:
        if place.is_relative_to(hidden) or place.resolve().is_relative_to(hidden):
            raise ConfigError(
                f"the service can't see {what} at {path}: {hidden} is hidden from it; take a folder such as"
                " /opt/batond or /srv"
            )


def _packaged(name: str) -> str:
    return (resources.files("batond.systemd") / name).read_text(encoding="utf-8")


def _names(folder: str, ending: str) -> list[str]:
    """Names of the files with an ending that lie in a folder of this package."""
    place = resources.files("batond.systemd")
    inside = (place / folder if folder else place).iterdir()
    return sorted(item.name for item in inside if item.name.endswith(ending))
