"""CudaDriver against bindings that note what they are called with; the real ones: `test_on_a_card.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from batond.daemon.engine.batch.arenas import choice, cuda_driver
from batond.daemon.engine.batch.arenas.card import CardArena
from batond.daemon.engine.batch.arenas.cuda_driver import CudaDriver
from batond.daemon.engine.batch.arenas.driver import DriverError
from batond.daemon.engine.batch.arenas.host import HostArena
from batond.daemon.engine.batch.arenas.plain import PlainArena

CARD = torch.device("cuda", 1)


class Handle(int):
    """As the bindings': an object that knows its number."""


class Bindings:
    """The part of `cuda.bindings.driver` that is used; each call returns its status, then what it found."""

    def __init__(self) -> None:
        for name in (
            "CUmemLocationType",
            "CUmemAllocationType",
            "CUmemAccess_flags",
            "CUdevice_attribute",
            "CUmemAllocationGranularity_flags",
        ):
            setattr(self, name, Names(name))
        self.CUresult = SimpleNamespace(CUDA_SUCCESS=0, CUDA_ERROR_OUT_OF_MEMORY=2)
        self.CUmemAllocationProp = lambda: SimpleNamespace(location=SimpleNamespace())
        self.CUmemAccessDesc = self.CUmemAllocationProp
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, tuple[Any, ...]] = {
            "cuDeviceGet": (0, 1),
            "cuDeviceGetAttribute": (0, 1),
            "cuMemGetAllocationGranularity": (0, 2 << 20),
            "cuMemAddressReserve": (0, 0x7000000),
            "cuMemCreate": (0, Handle(77)),
        }

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append((name, *args))
            return self.answers.get(name, (0,))

        return call


class Names:
    """An enumeration: each member is its name."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> str:
        return f"{self._kind}.{name}"


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> Bindings:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: None)
    return Bindings()


def test_calls_go_to_the_card_that_was_asked_for(bindings: Bindings) -> None:
    driver = CudaDriver(CARD, bindings)
    assert driver.granularity == 2 << 20
    address = driver.reserve(8 << 20)
    handle = driver.create(4 << 20)
    assert (address, handle) == (0x7000000, 77)
    driver.map(address, 4 << 20, handle)
    driver.set_access(address, 4 << 20)
    driver.unmap(address, 4 << 20)
    driver.destroy(handle)
    driver.unreserve(address, 8 << 20)
    made, mapped, accessed, unmapped, destroyed, freed = bindings.calls[-6:]
    assert made[2].location.id == accessed[3][0].location.id == 1
    assert mapped == ("cuMemMap", address, 4 << 20, 0, Handle(77), 0)
    assert isinstance(mapped[4], Handle)
    assert accessed[:3] == ("cuMemSetAccess", address, 4 << 20)
    assert unmapped == ("cuMemUnmap", address, 4 << 20)
    assert isinstance(destroyed[1], Handle)
    assert freed == ("cuMemAddressFree", address, 8 << 20)


def test_another_thread_attaches_to_the_card_by_its_number(
    bindings: Bindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch selects a card by number only, and what is current there is another one."""
    attached: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", attached.append)
    CudaDriver(torch.device("cuda"), bindings).attach()
    assert attached == [CARD]


def test_a_full_card_and_a_refusal_are_told_apart(bindings: Bindings) -> None:
    driver = CudaDriver(CARD, bindings)
    bindings.answers["cuMemCreate"] = (2, None)
    with pytest.raises(torch.OutOfMemoryError, match="cuMemCreate"):
        driver.create(1)
    bindings.answers["cuMemMap"] = (SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE"),)
    bindings.answers["cuMemCreate"] = (0, Handle(5))
    with pytest.raises(DriverError, match="cuMemMap: CUDA_ERROR_INVALID_VALUE"):
        driver.map(0, 1, driver.create(1))


def test_a_card_without_virtual_memory_is_refused(bindings: Bindings) -> None:
    bindings.answers["cuDeviceGetAttribute"] = (0, 0)
    with pytest.raises(DriverError, match="no virtual memory"):
        CudaDriver(CARD, bindings)


def test_missing_bindings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    with pytest.raises(DriverError, match="cuda-bindings is not installed"):
        cuda_driver._bindings()


# -- which arena a ring gets --------------------------------------------------------------------------


def test_on_the_cpu_auto_is_elastic(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for kind, expected in (("auto", HostArena), ("elastic", HostArena), ("plain", PlainArena)):
        make, why = choice.choose_arena(kind, cpu, kernels=False)
        arena = make(choice.ArenaShape(1, 4, 16), cpu)
        assert (type(arena), why) == (expected, "")
    monkeypatch.setattr(choice.sys, "platform", "darwin")
    assert choice.choose_arena("elastic", cpu, kernels=False) == (
        choice.plain_arena,
        "only Linux gives memory back page by page",
    )
    assert choice.choose_arena("auto", cpu, kernels=False) == (choice.plain_arena, "")


def test_on_a_card_elastic_is_asked_for(monkeypatch: pytest.MonkeyPatch, fake_driver: Any) -> None:
    """Plain until its cost was measured; a reason where it can't be, as in `batch_reason`."""
    choice._why_card_can_not.cache_clear()
    assert choice.choose_arena("auto", CARD, kernels=True) == (choice.plain_arena, "")
    assert "attention in torch" in choice.choose_arena("elastic", CARD, kernels=False)[1]
    assert "virtual memory on mps" in choice.choose_arena("elastic", torch.device("mps"), kernels=False)[1]
    made: list[Any] = []

    def fails(_device: torch.device) -> Any:
        raise DriverError("cuda-bindings is not installed")

    def works(_device: torch.device) -> Any:
        made.append(fake_driver())
        return made[-1]

    monkeypatch.setattr(choice, "CudaDriver", fails)
    assert choice.choose_arena("elastic", CARD, kernels=True) == (
        choice.plain_arena,
        "cuda-bindings is not installed",
    )
    choice._why_card_can_not.cache_clear()
    monkeypatch.setattr(choice, "CudaDriver", works)
    assert choice.choose_arena("elastic", CARD, kernels=True) == (choice.elastic_arena, "")
    assert not made[0].used_bytes  # What it was tried with is gone.
    arena = choice.elastic_arena(choice.ArenaShape(1, 4, 16), CARD)
    assert isinstance(arena, CardArena)
    arena.close()
    choice._why_card_can_not.cache_clear()
