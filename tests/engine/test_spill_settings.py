"""The spill directory as the engine process is told of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from batond.daemon.engine import process
from batond.daemon.engine.process import build_engine
from batond.daemon.errors import ConfigError
from batond.daemon.wire.settings import EngineSettings

if TYPE_CHECKING:
    from pathlib import Path


def settings(**options: Any) -> EngineSettings:
    return EngineSettings(
        model_path="/nowhere", model_name="m", device="cpu", host_pool_bytes=1 << 20, **options
    )


def test_a_directory_that_won_t_do_is_found_before_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match="others may write to it"):
        build_engine(settings(spill_dir=str(tmp_path / "open")))
    with pytest.raises(ConfigError, match=r"engine\.spill_bytes"):
        build_engine(settings(spill_dir=str(tmp_path), spill_bytes=1 << 60))


@pytest.mark.parametrize(("nbytes", "spills"), [(1 << 21, True), (-1, True), (0, False)])
def test_the_engine_gets_it(
    llama: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nbytes: int, *, spills: bool
) -> None:
    monkeypatch.setattr(process, "load_model", lambda *_, **__: (llama, None))
    engine = build_engine(settings(spill_dir=str(tmp_path / "kv"), spill_bytes=nbytes))
    capacity_bytes = engine.residency.store.spill_use.capacity_bytes
    assert (capacity_bytes > 0) == spills
    if nbytes > 0:
        assert capacity_bytes == nbytes
        assert engine.residency.sessions.most_bytes == ((1 << 20) + nbytes) // 4
    engine.close()
