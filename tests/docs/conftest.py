"""What the tests of the documentation share: its pages, and what stands in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    """Gives the root folder of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def pages() -> dict[Path, str]:
    """Gives every page for readers by its path."""
    paths = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    paths += sorted((ROOT / "docs").rglob("*.md"))
    return {path: path.read_text(encoding="utf-8") for path in paths}


@pytest.fixture(scope="session")
def spans(pages: dict[Path, str]) -> list[tuple[str, str]]:
    """Gives all inline code as pairs of page and text."""
    found = []
    for path, text in pages.items():
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        found += [(path.name, span) for span in re.findall(r"`([^`\n]+)`", prose)]
    return found


@pytest.fixture(scope="session")
def all_text(pages: dict[Path, str]) -> str:
    """Gives all pages as one text."""
    return "\n".join(pages.values())


@pytest.fixture(scope="session")
def readme_examples() -> list[str]:
    """Gives the Python blocks of the README: the client's, then the engine's."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
