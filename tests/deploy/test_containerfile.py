"""The image: linted, made of all that is installed, without root; its health check tells the truth."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

from batond.bench.fake_daemon import PROGRAM
from batond.bench.local_daemon import LocalDaemon

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def lines(deploy: Path) -> list[str]:
    """Gives the instructions of the Containerfile, continued lines joined, comments left out."""
    text = (deploy / "Containerfile").read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def lint(file: Path) -> subprocess.CompletedProcess[str]:
    """Runs hadolint, or skips the test."""
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed")
    return subprocess.run([program, str(file)], capture_output=True, text=True, check=False)


def test_the_linter_finds_nothing(deploy: Path) -> None:
    done = lint(deploy / "Containerfile")
    assert done.returncode == 0, done.stdout


def test_the_linter_would_find_something(deploy: Path, tmp_path: Path) -> None:
    text = (deploy / "Containerfile").read_text(encoding="utf-8")
    (tmp_path / "Containerfile").write_text(text.replace("--no-install-recommends ", ""), encoding="utf-8")
    assert "DL3015" in lint(tmp_path / "Containerfile").stdout


def test_it_has_every_package_and_nothing_that_is_not_there(deploy: Path, lines: list[str]) -> None:
    root = deploy.parent
    copied = [
        source
        for line in lines
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    ]
    assert not [source for source in copied if not (root / source).exists()]
    table = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {Path(folder).parts[0] for folder in table["package-dir"].values()}
    assert folders <= set(copied)


def test_it_runs_as_a_user_by_number_and_drains_when_it_is_stopped(lines: list[str]) -> None:
    """A number, so that Kubernetes can see that it is not root's."""
    assert "USER 10001:10001" in lines
    users = [line for line in lines if line.startswith("USER ")]
    assert lines.index(users[-1]) < lines.index('ENTRYPOINT ["batond"]')
    assert "STOPSIGNAL SIGTERM" in lines
    (environment,) = [line for line in lines if line.startswith("ENV ")]
    for name in ("STATE_DIRECTORY=/var/lib/batond", "RUNTIME_DIRECTORY=/run/batond"):
        assert name in environment.split()


def test_it_has_no_weights(lines: list[str]) -> None:
    assert not [line for line in lines if "smollm2" in line or ".gguf" in line or ".safetensors" in line]


@pytest.fixture(scope="module")
def daemon() -> Iterator[LocalDaemon]:
    """Starts a daemon on an engine that computes nothing."""
    with TemporaryDirectory(prefix="bd-") as folder:
        one = LocalDaemon(Path(folder), [], model={"path": folder}, engine={"rows": 2}, program=PROGRAM)
        try:
            one.wait_ready()
            yield one
        finally:
            one.stop()


@pytest.mark.redis
def test_the_health_check_says_what_the_daemon_says(deploy: Path, daemon: LocalDaemon) -> None:
    def ask(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, str(deploy / "healthcheck.py"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout.strip()

    address = f"unix:{daemon.socket}"
    for service in ("liveness", "readiness", "saturation"):
        assert ask(service, address) == (0, f"{service}: SERVING")
    assert ask("nothing", address) == (1, "nothing: NOT_FOUND")
    daemon.stop()
    assert ask("liveness", address) == (1, "liveness: UNAVAILABLE")
