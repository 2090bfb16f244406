"""The section [memory]: watermarks in order, sizes in words, and all of it as the engine is told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from batond.daemon.config_load import engine_settings, load_settings, parse_assignments
from batond.daemon.errors import ConfigError
from batond.daemon.memory.governor import Watermarks
from batond.daemon.wire.settings import EngineSettings, MemorySettings

if TYPE_CHECKING:
    from pathlib import Path


def told(tmp_path: Path, *assignments: str) -> MemorySettings:
    flags = parse_assignments(assignments)
    flags["model"] = {"path": str(tmp_path)}
    made = engine_settings(load_settings(None, flags))
    assert msgspec.json.decode(msgspec.json.encode(made), type=EngineSettings) == made
    return made.memory


def test_defaults_are_the_same_everywhere(tmp_path: Path) -> None:
    plain = told(tmp_path)
    assert plain == MemorySettings()
    marks = Watermarks()
    assert (plain.low_watermark, plain.high_watermark, plain.critical_watermark, plain.reserve_bytes) == (
        marks.low,
        marks.high,
        marks.critical,
        -1,
    )


@pytest.mark.parametrize("mode", ["auto", "on", "off"])
def test_it_is_set_by_a_flag(tmp_path: Path, mode: str) -> None:
    assert told(tmp_path, f"memory.governor={mode}").governor == mode


def test_values_reach_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATOND_MEMORY__SAMPLE_MS", "100")
    made = told(
        tmp_path,
        "memory.governor=on",
        "memory.low_watermark=0.5",
        "memory.high_watermark=0.6",
        "memory.critical_watermark=1",
        "memory.reserve=1.5GiB",
    )
    assert made == MemorySettings(
        governor="on",
        low_watermark=0.5,
        high_watermark=0.6,
        critical_watermark=1.0,
        reserve_bytes=3 << 29,
        sample_ms=100,
    )
    Watermarks(made.low_watermark, made.high_watermark, made.critical_watermark, made.reserve_bytes)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"low_watermark": 0.95}, "must rise: low_watermark below high_watermark"),
        ({"high_watermark": 0.99}, "must rise"),
        ({"critical_watermark": 0.92}, "must rise"),
        ({"low_watermark": 0.915}, "must be at least 0.01 above low_watermark 0.915"),
        ({"critical_watermark": 1.2}, "memory.critical_watermark: Input should be less than or equal to 1"),
        ({"low_watermark": 0}, "memory.low_watermark: Input should be greater than 0"),
        ({"low_watermark": "nan"}, "memory.low_watermark: "),
        ({"governor": "maybe"}, "memory.governor: Input should be 'auto', 'on' or 'off'"),
        ({"governor": True}, "memory.governor: Input should be 'auto', 'on' or 'off'"),
        ({"reserve": "lots"}, "memory.reserve: "),
        ({"reserve": -5}, "memory.reserve: "),
        ({"sample_ms": 1}, "memory.sample_ms: Input should be greater than or equal to 10"),
        ({"sample_ms": 5000}, "memory.sample_ms: "),
        ({"watermark": 1}, "unknown key 'watermark', did you mean"),
    ],
)
def test_nonsense_is_refused_in_words(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(None, {"memory": values})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
