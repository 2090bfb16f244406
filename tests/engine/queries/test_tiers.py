"""The tiers below the batch: opened with the engine, gone with it, and with a start that fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psutil
import pytest

from batond.daemon.engine.batch.ring import RingBatch
from batond.daemon.engine.queries.tiers import open_store
from batond.daemon.errors import ConfigError
from batond.offload import folder
from batond.offload.pool import HostPool

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from batond.daemon.engine import LocalEngine

    MakeEngine = Callable[..., LocalEngine]


class Broken:
    """A governor that can not begin."""

    on, closed = False, 0

    def attach(self, *_: object) -> None:
        raise ConfigError("memory can't be read")

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def closed_pools(monkeypatch: pytest.MonkeyPatch) -> list[HostPool]:
    closed: list[HostPool] = []
    close = HostPool.close

    def note(pool: HostPool) -> None:
        close(pool)
        closed.append(pool)

    monkeypatch.setattr(HostPool, "close", note)
    return closed


def test_an_unknown_policy_opens_nothing(llama: Any, make_engine: MakeEngine, tmp_path: Path) -> None:
    """M5."""
    before = psutil.Process().num_fds()
    with pytest.raises(ConfigError, match="nope"):
        make_engine(llama, policy="nope", spill_dir=tmp_path / "spill", spill_bytes=1 << 20)
    assert list(tmp_path.iterdir()) == []
    assert psutil.Process().num_fds() == before


def test_a_governor_that_can_t_begin_leaves_nothing_open(
    llama: Any, make_engine: MakeEngine, tmp_path: Path, closed_pools: list[HostPool]
) -> None:
    """M5: the lock, the descriptors and the pool go with the start."""
    governor, before = Broken(), psutil.Process().num_fds()
    with pytest.raises(ConfigError, match="memory can't be read"):
        make_engine(llama, governor=governor, spill_dir=tmp_path / "spill", spill_bytes=1 << 20)
    assert list((tmp_path / "spill").iterdir()) == []
    assert psutil.Process().num_fds() == before
    assert len(closed_pools) == 1
    assert governor.closed == 1


def test_a_directory_that_won_t_do_leaves_no_pool(
    llama: Any, tmp_path: Path, closed_pools: list[HostPool]
) -> None:
    with pytest.raises(ConfigError, match=r"engine\.spill_dir"):
        open_store(llama.device, 1 << 20, tmp_path / "no" / "spill", 1 << 20)
    assert len(closed_pools) == 1


@pytest.mark.parametrize("spill_bytes", [None, 1 << 20])
def test_a_disk_without_room_stops_the_start(
    llama: Any,
    make_engine: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spill_bytes: int | None,
) -> None:
    """A directory that was asked for is never off without a word."""
    monkeypatch.setattr(folder, "floor_bytes", lambda _: 1 << 60)
    with pytest.raises(ConfigError, match="no room"):
        make_engine(llama, spill_dir=tmp_path / "spill", spill_bytes=spill_bytes)
    assert not list(tmp_path.glob("spill/*"))
    make_engine(llama, spill_dir=tmp_path / "spill", spill_bytes=0).close()


@pytest.mark.parametrize("batch", ["ring", "padded"])
def test_the_batch_gives_its_memory_back_with_the_engine(
    llama: Any, make_engine: MakeEngine, batch: str
) -> None:
    """M5: also where the model, and whoever else knows the batch, live on."""
    engine = make_engine(llama, batch=batch, arena="plain")
    engine.submit([5, 6, 7])
    engine.step()
    kept = engine.residency.batch
    assert kept.memory.committed_bytes > 0
    engine.close()
    assert kept.memory.committed_bytes == 0
    engine.close()


def test_a_start_that_fails_gives_the_batch_s_memory_back(
    llama: Any, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M5."""
    closed, close = [], RingBatch.close

    def note(ring: RingBatch) -> None:
        close(ring)
        closed.append(ring)

    monkeypatch.setattr(RingBatch, "close", note)
    with pytest.raises(ConfigError, match="memory can't be read"):
        make_engine(llama, batch="ring", governor=Broken())
    assert len(closed) == 1
