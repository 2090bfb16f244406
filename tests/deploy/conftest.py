"""What the tests of `deploy/` share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


@pytest.fixture(scope="session")
def deploy() -> Path:
    """Gives the folder."""
    return DEPLOY


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Takes batond's own variables out of the environment."""
    for name in [name for name in os.environ if name.startswith("BATOND_")]:
        monkeypatch.delenv(name)
    return monkeypatch
