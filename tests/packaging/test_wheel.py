"""Wheel and source distribution are whole and alike; the wheel, installed alone, is enough and starts."""

import configparser
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib import util
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOP_FOLDERS = {
    "bench": Path("batond/bench"),
    "clients": Path("batond/clients"),
    "daemon": Path("batond/daemon"),
    "offload": Path("batond/offload"),
    "policies": Path("batond/policies"),
    "systemd": Path("batond/systemd"),
    "proto/batond/v1": Path("batond/v1"),
}
DATA_SUFFIXES = {".py", ".pyi", ".proto", ".lua", ".typed", ".service", ".conf", ".toml"}
DATA_SUFFIXES |= {".css", ".html", ".js", ".json", ".svg"}
#: What concerns the repository alone; the links of .types serve the type checkers.
NOT_IN_SDIST = {".ci", ".gitignore", ".types"}
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


def build(source: Path, kind: str, out: Path) -> Path:
    """Builds one distribution with the tools of this environment; gives its file."""
    run(sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", out, source)
    (built,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="module")
def source(root: Path, tracked: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies the tracked files, so that nothing untracked can slip into a build or help it."""
    copy = tmp_path_factory.mktemp("source")
    for path in tracked:
        (copy / path.parent).mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / path, copy / path, follow_symlinks=False)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel from the tracked files."""
    return build(source, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def unpacked(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the source distribution and unpacks it; gives the folder."""
    out = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build(source, "sdist", out)) as archive:
        archive.extractall(out, filter="data")
    (folder,) = (path for path in out.iterdir() if path.is_dir())
    return folder


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


def test_source_distribution_holds_what_git_tracks(tracked: list[Path], unpacked: Path) -> None:
    inside = {path.relative_to(unpacked) for path in unpacked.rglob("*") if path.is_file()}
    made = {path for path in inside if ".egg-info" in str(path) or path.name in {"PKG-INFO", "setup.cfg"}}
    expected = {path for path in tracked if path.parts[0] not in NOT_IN_SDIST}
    assert inside - made == expected


def test_source_distribution_builds_the_same_wheel(
    wheel: Path, unpacked: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Byte for byte: names, contents and metadata; the list of hashes says so for all files."""
    other = build(unpacked, "wheel", tmp_path_factory.mktemp("again"))
    assert other.name == wheel.name
    assert contents(other) == contents(wheel)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_extras_are_declared_and_name_each_other_rightly(root: Path, wheel: Path) -> None:
    """`batond[dev]` and the like refer to extras that exist: pip only warns of one that does not."""
    extras = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    metadata = next(
        text.decode() for name, text in contents(wheel).items() if name.endswith(".dist-info/METADATA")
    )
    assert set(re.findall(r"^Provides-Extra: (\S+)$", metadata, flags=re.MULTILINE)) == set(extras)
    named = {
        extra
        for needs in extras.values()
        for need in needs
        for inside in re.findall(r"^batond\[([^]]+)\]", need)
        for extra in inside.split(",")
    }
    assert named
    assert named <= set(extras)


def test_what_is_pinned_fulfils_what_every_extra_asks_for(root: Path) -> None:
    """The versions that the tests run with are within the ranges that users get."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = {}
    for line in (root / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if "==" in line and not line.startswith("#"):
            name, version = line.split("==")
            pins[canonicalize_name(name)] = version
    needs = [
        Requirement(need)
        for group in (project["dependencies"], *project["optional-dependencies"].values())
        for need in group
    ]
    needs = [need for need in needs if need.name != "batond" and (not need.marker or need.marker.evaluate())]
    assert len(needs) > 30
    unpinned = {need.name for need in needs if canonicalize_name(need.name) not in pins}
    assert unpinned <= {
        "xgrammar"
    }  # `structured` is no part of `dev`: it is large, and its tests ask for it.
    wrong = [
        str(need)
        for need in needs
        if need.name not in unpinned and pins[canonicalize_name(need.name)] not in need.specifier
    ]
    assert not wrong


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
