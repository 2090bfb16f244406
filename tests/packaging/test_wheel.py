"""The wheel, built from tracked files and installed alone in an empty environment, is whole and starts."""

import configparser
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib import util
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOP_FOLDERS = {
    "bench": Path("batond/bench"),
    "clients": Path("batond/clients"),
    "daemon": Path("batond/daemon"),
    "offload": Path("batond/offload"),
    "policies": Path("batond/policies"),
    "proto/batond/v1": Path("batond/v1"),
}
DATA_SUFFIXES = {".py", ".pyi", ".proto", ".lua", ".typed"}
#: They need Triton, which comes with torch's CUDA build alone.
FOR_CARDS = {
    f"batond.daemon.engine.batch.{name}"
    for name in ("linear_kernels", "prompt_attention", "prompt_kernels", "ranged_decode", "ring_kernels")
}
IMPORT_EVERYTHING = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
import batond.daemon
print(batond.daemon.__path__[0])
"""
IMPORT_CLIENT = """
import importlib.util, sys
assert importlib.util.find_spec("torch") is None, "this environment is not bare"
import batond.clients
import batond.v1
from batond.clients import AsyncClient, Client
from batond.policies import base
assert "redis" not in sys.modules
"""


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """Runs a command that must succeed; gives what it printed."""
    arguments = [str(part) for part in command]
    result = subprocess.run(
        arguments, env=env, cwd=cwd, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    assert result.returncode == 0, f"{arguments}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(root: Path, tracked: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel from a copy of the tracked files, so that nothing untracked can slip in or help."""
    copy = tmp_path_factory.mktemp("source")
    for path in tracked:
        (copy / path.parent).mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / path, copy / path, follow_symlinks=False)
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, copy)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def bare(root: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes an empty environment with the wheel and its bare dependencies; gives its folder of programs."""
    folder = tmp_path_factory.mktemp("bare")
    run(sys.executable, "-m", "venv", folder)
    run(folder / "bin/python", "-m", "pip", "install", "-q", "-c", root / "constraints.txt", wheel)
    return folder / "bin"


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def modules_in(wheel: Path) -> list[str]:
    """Names every module of the wheel but the ones that run when imported."""
    paths = [Path(name) for name in names_in(wheel) if name.startswith("batond/") and name.endswith(".py")]
    modules = [path.with_suffix("") for path in paths if path.name != "__main__.py"]
    return sorted(".".join(part for part in module.parts if part != "__init__") for module in modules)


def test_wheel_holds_every_tracked_module_and_its_data(tracked: list[Path], wheel: Path) -> None:
    expected = {
        str(installed / path.relative_to(folder))
        for folder, installed in TOP_FOLDERS.items()
        for path in tracked
        if path.is_relative_to(folder) and path.suffix in DATA_SUFFIXES
    }
    missing = expected - names_in(wheel)
    assert not missing


def test_wheel_holds_nothing_else(wheel: Path) -> None:
    """No top-level module beside the namespace: ``import daemon`` is another project's name."""
    names = names_in(wheel)
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"batond"}
    assert "batond/__init__.py" not in names
    assert {Path(name).suffix for name in names if name.startswith("batond/")} <= DATA_SUFFIXES


def test_entry_points_lead_into_the_wheel(root: Path, wheel: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt")]
        parser = configparser.ConfigParser(delimiters=("=",))
        parser.read_string(archive.read(name).decode())
    targets = [value for section in parser.sections() for value in parser[section].values()]
    assert len(targets) == len(project["scripts"]) + sum(
        len(group) for group in project["entry-points"].values()
    )
    modules = modules_in(wheel)
    assert not [target for target in targets if target.split(":")[0].strip() not in modules]


def test_light_client_needs_no_torch(bare: Path, tmp_path: Path) -> None:
    run(bare / "python", "-I", "-c", IMPORT_CLIENT, cwd=tmp_path)


@pytest.mark.parametrize(
    ("command", "extras"),
    [(["batonctl", "--help"], ["cli", "daemon"]), (["batond", "--version"], ["daemon"])],
)
def test_programs_start_or_name_the_missing_extra(
    bare: Path, tmp_path: Path, command: list[str], extras: list[str]
) -> None:
    program, *arguments = command
    result = subprocess.run(
        [bare / program, *arguments], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    if result.returncode != 0:
        assert len(result.stderr.strip().splitlines()) == 1, result.stderr
        assert any(f"batond[{extra}]" in result.stderr for extra in extras), result.stderr
    else:
        assert result.stdout.strip()


def test_whole_wheel_imports_and_starts(root: Path, wheel: Path, tmp_path: Path) -> None:
    """With the daemon's dependencies at hand, every module of the wheel imports and ``batond`` starts."""
    run(sys.executable, "-m", "venv", tmp_path / "env")
    python = tmp_path / "env/bin/python"
    run(python, "-m", "pip", "install", "-q", "--no-deps", wheel)
    # The developer's site-packages as a plain path: its .pth files, so its editable batond too, stay out.
    env = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
    modules = [name for name in modules_in(wheel) if util.find_spec("triton") or name not in FOR_CARDS]
    where = run(python, "-c", IMPORT_EVERYTHING, *modules, env=env, cwd=tmp_path).strip()
    assert Path(where).is_relative_to(tmp_path)
    version = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    programs = tmp_path / "env/bin"
    assert version in run(programs / "batond", "--version", env=env, cwd=tmp_path)
    assert "submit" in run(programs / "batonctl", "--help", env=env, cwd=tmp_path)
