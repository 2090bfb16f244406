"""The example configuration is the schema: it loads, names every key, and shows the true defaults."""

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from batond.daemon.config import ClassConfig, Settings, TenantConfig
from batond.daemon.config_load import load_settings
from batond.policies.classes import DEFAULT_CLASSES

SYSTEMD = Path(__file__).resolve().parents[2] / "systemd"
EXAMPLE = SYSTEMD / "batond.toml"
# Keys without a default that an example could show.
NO_DEFAULT = {"model.path", "tls.cert_file", "tls.key_file", "tls.client_ca_file"} | {
    f"queue.tls_{what}_file" for what in ("ca", "cert", "key")
}
# A class without a bound has no key: TOML has no null.
NOT_SHOWN = {"longest_queue_s"}


@pytest.fixture(autouse=True)
def _as_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the directories that systemd names to the service, and nothing else of batond's environment."""
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/batond")
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/batond")
    for name in [name for name in os.environ if name.startswith("BATOND_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def all_keys() -> dict[str, Any]:
    """The example with every key uncommented: prose has a space after the ``#``, keys have none."""
    return tomllib.loads(re.sub(r"^#(?! |$)", "", EXAMPLE.read_text(encoding="utf-8"), flags=re.MULTILINE))


def sections() -> dict[str, type[BaseModel]]:
    fields = {name: field.annotation for name, field in Settings.model_fields.items()}
    return {
        name: kind for name, kind in fields.items() if isinstance(kind, type) and issubclass(kind, BaseModel)
    }


def test_example_loads_and_changes_nothing_but_the_model() -> None:
    loaded = load_settings(EXAMPLE)
    assert loaded.model.path
    assert loaded.model_dump(exclude={"model": {"path"}}) == Settings().model_dump(
        exclude={"model": {"path"}}
    )


def test_example_names_every_key_and_no_other(all_keys: dict[str, Any]) -> None:
    assert set(all_keys) == set(Settings.model_fields)
    for name, section in sections().items():
        assert set(all_keys[name]) == set(section.model_fields), name
    for entry in all_keys["classes"]:
        assert set(entry) == set(ClassConfig.model_fields) - NOT_SHOWN
    for entry in all_keys["tenants"]:
        assert set(entry) == set(TenantConfig.model_fields)


def test_commented_keys_show_their_defaults(all_keys: dict[str, Any]) -> None:
    shown, default = Settings(**all_keys), Settings()
    for name, section in sections().items():
        for key in section.model_fields:
            if f"{name}.{key}" not in NO_DEFAULT:
                assert getattr(getattr(shown, name), key) == getattr(getattr(default, name), key), (
                    f"{name}.{key}"
                )
    assert tuple(shown.sla_classes) == DEFAULT_CLASSES


def seconds(value: str) -> float:
    """Reads the spans the unit uses."""
    match = re.fullmatch(r"(\d+)(s|min)", value)
    assert match, value
    return int(match[1]) * {"s": 1, "min": 60}[match[2]]


def test_unit_waits_longer_than_the_daemon() -> None:
    """V1: a drain is not cut off, and the daemon notices a frozen engine before systemd does."""
    unit = (SYSTEMD / "batond.service").read_text(encoding="utf-8")
    service = Settings().service
    spans = dict(re.findall(r"^(TimeoutStopSec|WatchdogSec)=(\S+)$", unit, flags=re.MULTILINE))
    assert seconds(spans["TimeoutStopSec"]) >= service.drain_timeout_s + 30
    assert seconds(spans["WatchdogSec"]) > service.frozen_after_s
