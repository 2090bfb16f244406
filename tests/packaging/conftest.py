"""What the packaging tests share: the repository's root and its tracked files."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    """Gives the root folder of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def tracked(root: Path) -> list[Path]:
    """Lists the files git tracks, links included, relative to the root, less those already deleted."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    paths = [Path(name) for name in listing.split("\0") if name]
    return [path for path in paths if (root / path).is_symlink() or (root / path).exists()]
