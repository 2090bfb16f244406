"""A configuration that has nothing of this machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from batond.daemon.config_load import load_settings
from batond.daemon.doctor import systemd_unit

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from batond.daemon.config import Settings


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No configuration, and sockets and state in a folder of the test's."""
    monkeypatch.setattr("batond.daemon.config_load.DEFAULT_FILE", tmp_path / "none.toml")
    for name in [name for name in os.environ if name.startswith("BATOND_")]:
        monkeypatch.delenv(name)
    systemd_unit.unit_properties.cache_clear()


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., Settings]:
    """Makes a configuration from sections."""

    def make(**sections: Any) -> Settings:
        base = {
            "server": {"listen": [f"unix:{tmp_path}/b.sock"], "metrics_listen": ""},
            "queue": {"state_dir": str(tmp_path / "state")},
        }
        merged = {name: base.get(name, {}) | sections.get(name, {}) for name in {*base, *sections}}
        return load_settings(None, merged)

    return make
