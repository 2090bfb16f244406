"""`BATOND_TEST_REDIS_SERVER=/path/to/valkey-server` runs all tests on that server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", autouse=True)
def _redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Puts the named server first on PATH, where daemons of their own process find it too."""
    named = os.environ.get("BATOND_TEST_REDIS_SERVER", "")
    with pytest.MonkeyPatch.context() as patch:
        if named:
            folder = tmp_path_factory.mktemp("server")
            (folder / "redis-server").symlink_to(Path(named).resolve(strict=True))
            patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        yield
