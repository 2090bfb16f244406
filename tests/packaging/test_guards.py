"""Rules that no compiler holds: imports by the long name, no pickle, nothing of one machine."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

PICKLERS = {"_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
# `connection` and the queues of multiprocessing pickle what they carry.
PICKLING_CALLS = {
    ("torch", "load"),
    ("torch", "save"),
    ("multiprocessing", "Manager"),
    ("multiprocessing", "Pipe"),
    ("multiprocessing", "Queue"),
    ("multiprocessing", "SimpleQueue"),
    ("multiprocessing", "connection"),
}
# A home of one letter is made up, as in the tests of directories.
MACHINE_PATH = re.compile(
    r"(?<![\w./~}-])/(?:"
    + "|".join(["root", "work", "Users", r"home/\w{2,}", "opt/" + "pypi"])
    + r")(?:/|\b)"
)
REGISTRY_HOSTS = [
    ".".join(name)
    for name in [
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("download", "pytorch", "org"),
        ("registry", "npmjs", "org"),
        ("deb", "debian", "org"),
        ("archive", "ubuntu", "com"),
    ]
]


def ruff_codes(root: Path, source: str, filename: str) -> list[str]:
    """Lints ``source`` as if it were ``filename``, with the repository's settings; gives the broken rules."""
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--stdin-filename",
        filename,
        "--output-format",
        "json",
        "-",
    ]
    result = subprocess.run(command, cwd=root, input=source, capture_output=True, text=True, check=False)
    return [finding["code"] for finding in json.loads(result.stdout)]


def pickling(source: str) -> list[str]:
    """Names the uses of pickle in Python source: imports of picklers and calls that pickle inside."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [name.name for name in names if name.name.split(".")[0] in PICKLERS]
                found += [name.name for name in names if tuple(name.name.split(".")) in PICKLING_CALLS]
            case ast.ImportFrom(module=str(module), names=names):
                found += [module for _ in names if module.split(".")[0] in PICKLERS]
                found += [f"{module}.{name.name}" for name in names if (module, name.name) in PICKLING_CALLS]
                found += [module for _ in names if tuple(module.split(".")) in PICKLING_CALLS]
            case ast.Attribute(value=ast.Name(id=owner), attr=attribute) if (
                owner,
                attribute,
            ) in PICKLING_CALLS:
                found.append(f"{owner}.{attribute}")
    return found


@pytest.mark.parametrize("folder", ["daemon", "policies", "offload", "clients", "bench"])
@pytest.mark.parametrize("place", ["daemon/sample.py", "tests/queue/test_sample.py"])
def test_short_names_are_banned(root: Path, folder: str, place: str) -> None:
    assert "TID251" in ruff_codes(root, f"import {folder}\n", place)
    assert "TID251" in ruff_codes(root, f"from {folder} import sample\n", place)
    assert "TID251" not in ruff_codes(root, f"import batond.{folder}\n", place)


def test_lint_bans_pickle(root: Path) -> None:
    assert "TID251" in ruff_codes(root, "from pickle import loads\n", "offload/sample.py")


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import multiprocessing.connection",
        "from multiprocessing.connection import Client",
        "from multiprocessing import Pipe",
        "import torch\ntorch.load('x')",
    ],
)
def test_pickling_is_recognised(source: str) -> None:
    assert pickling(source)


def test_nothing_pickles(root: Path, tracked: list[Path]) -> None:
    sources = [path for path in tracked if path.suffix == ".py" and path.parts[0] != "tests"]
    found = {str(path): pickling((root / path).read_text(encoding="utf-8")) for path in sources}
    assert sources
    assert not {path: uses for path, uses in found.items() if uses}


@pytest.mark.parametrize("text", ["cd /root/x", "'/work/main'", "=/home/ann/model"])
def test_machine_paths_are_recognised(text: str) -> None:
    assert MACHINE_PATH.search(text)


def test_no_machine_paths_and_no_registry_hosts(root: Path, tracked: list[Path]) -> None:
    own = Path(__file__).relative_to(root)
    found = []
    for path in tracked:
        if (root / path).is_symlink() or path == own:
            continue
        try:
            text = (root / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            if MACHINE_PATH.search(line) or any(host in line for host in REGISTRY_HOSTS):
                found.append(f"{path}:{number}: {line.strip()}")
    assert not found


def test_no_file_is_large(root: Path, tracked: list[Path]) -> None:
    """Weights, traces and build products don't belong in git."""
    sizes = {str(path): (root / path).lstat().st_size for path in tracked}
    assert not {path: size for path, size in sizes.items() if size > 1 << 20}
