"""M9: NVML of many versions, over cards and MIG instances, failing in every way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pynvml
import pytest

from batond.daemon.memory import nvml as nvml_module
from batond.daemon.memory.nvml import NvmlSource, import_nvml
from batond.daemon.memory.readings import MemoryReading, ReadingLost

if TYPE_CHECKING:
    from collections.abc import Callable

    Make = Callable[..., Any]

GIB = 1 << 30
CARD = "5f2a9c1e-0000-1111-2222-333344445555"
OTHER = "99999999-0000-1111-2222-333344445555"


def reads(nvml: Any, uuid: str = CARD, expected: int | None = 79 * GIB) -> MemoryReading:
    return NvmlSource(uuid, expected, nvml=lambda: nvml, clock=lambda: 3.0).read()


@pytest.fixture
def nvml(make_nvml: Make, make_card: Make) -> Any:
    return make_nvml([make_card(f"GPU-{OTHER}", used=0), make_card(f"GPU-{CARD}")])


def test_free_is_the_same_in_both_structures(make_nvml: Make, make_card: Make, nvml: Any) -> None:
    """M9: what the driver keeps is apart in version 2 and used in version 1; free is free."""
    assert reads(nvml) == MemoryReading(80 * GIB, 70 * GIB, 3.0)
    assert "v2" in nvml.calls
    old = make_nvml([make_card(f"GPU-{CARD}")], versioned=False)
    assert reads(old) == reads(nvml)
    assert "v2" not in old.calls


@pytest.mark.parametrize(
    "code",
    [
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
        TypeError("nvmlDeviceGetMemoryInfo() got an unexpected keyword argument 'version'"),
    ],
)
def test_a_driver_without_version_2_is_asked_for_version_1(nvml: Any, code: int | Exception) -> None:
    """M9: function missing, or a structure that it doesn't know; it is not asked for that again."""
    nvml.failures["v2"] = [code]
    source = NvmlSource(CARD, nvml=lambda: nvml)
    assert [source.read().free_bytes for _ in range(3)] == [70 * GIB] * 3
    assert nvml.calls.count("v2") == 1
    assert nvml.calls.count("v1") == 3


@pytest.mark.parametrize("version", ["v2", "v1"])
@pytest.mark.parametrize(
    "failure",
    [
        pynvml.NVML_ERROR_UNKNOWN,
        pynvml.NVML_ERROR_GPU_IS_LOST,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        OSError("libnvidia-ml.so.1: cannot open shared object file"),
        AttributeError("nvmlDeviceGetMemoryInfo"),
    ],
)
def test_unknown_error_in_mid_run_is_a_lost_reading_and_the_next_try_opens_anew(
    nvml: Any, version: str, failure: int | Exception
) -> None:
    """M9."""
    nvml.versioned = version == "v2"
    source = NvmlSource(CARD, nvml=lambda: nvml)
    source.read()
    nvml.failures[version] = [failure, failure]
    for _ in range(2):
        with pytest.raises(ReadingLost, match=r"NVMLError|OSError|AttributeError"):
            source.read()
        assert nvml.opened == 0
    assert source.read().free_bytes == 70 * GIB
    source.close()
    assert nvml.opened == 0


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_what_fails_while_opening_is_a_lost_reading(nvml: Any, call: str) -> None:
    """M9."""
    nvml.failures[call] = [pynvml.NVML_ERROR_UNKNOWN]
    source = NvmlSource(CARD, nvml=lambda: nvml)
    with pytest.raises(ReadingLost, match="Unknown Error"):
        source.read()
    assert nvml.opened == 0
    assert source.read().free_bytes == 70 * GIB


def test_a_card_nobody_knows(nvml: Any) -> None:
    with pytest.raises(ReadingLost, match="knows no card"):
        reads(nvml, uuid="00000000-0000-0000-0000-000000000000")
    assert nvml.opened == 0


def test_nobody_is_asked_for_by_process_id(nvml: Any) -> None:
    """M9: foreign pids. A container's are others' than the driver's, and hidden ones have none."""
    reads(nvml)
    assert not [name for name in nvml.calls if "Process" in name]


def split(make_card: Make, *sizes: int | None) -> Any:
    """A card in parts, whose own figures are of the whole."""
    parts = [
        None if size is None else make_card(f"MIG-{number}", total=size * GIB, reserved=0, used=GIB)
        for number, size in enumerate(sizes)
    ]
    return make_card(f"GPU-{CARD}", instances=parts)


def test_an_instance_is_found_by_its_own_uuid(make_nvml: Make, make_card: Make) -> None:
    """M9: MIG handles."""
    card = split(make_card, 10, 20)
    card.instances[1].uuid = f"MIG-{CARD}"
    nvml = make_nvml([card])
    assert reads(nvml, expected=20 * GIB) == MemoryReading(20 * GIB, 19 * GIB, 3.0)
    assert reads(nvml, uuid="MIG-0", expected=None) == MemoryReading(10 * GIB, 9 * GIB, 3.0)


def test_an_instance_behind_its_cards_uuid_is_told_by_its_size(make_nvml: Make, make_card: Make) -> None:
    """M9: older CUDA names the card where only a part of it is to be had."""
    nvml = make_nvml([split(make_card, 10, None, 20)])
    assert reads(nvml, expected=19 * GIB).total_bytes == 20 * GIB
    assert reads(make_nvml([split(make_card, None, 10)]), expected=None).total_bytes == 10 * GIB
    with pytest.raises(ReadingLost, match="2 MIG instances"):
        reads(nvml, expected=None)
    with pytest.raises(ReadingLost, match="3 MIG instances"):
        reads(make_nvml([split(make_card, 10, 20, 20)]), expected=20 * GIB)
    with pytest.raises(ReadingLost, match="NVML knows"):
        reads(make_nvml([split(make_card, 10)]), expected=40 * GIB)


def test_another_memory_than_cudas_is_not_taken_for_it(nvml: Any) -> None:
    """The whole card's free memory would say nothing about a part of it."""
    with pytest.raises(ReadingLost, match="NVML knows"):
        reads(nvml, expected=20 * GIB)
    assert nvml.opened == 0


def test_without_the_library_it_is_a_lost_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> Any:
        raise ImportError("No module named 'pynvml'")

    assert import_nvml() is pynvml
    monkeypatch.setattr(nvml_module.importlib, "import_module", missing)
    with pytest.raises(ReadingLost, match="nvidia-ml-py is not installed"):
        NvmlSource(CARD).read()


def test_the_real_library_without_a_card_is_a_lost_reading() -> None:
    """On a host without a driver the library itself can't be loaded; on one with it, nobody has this card."""
    source = NvmlSource("00000000-0000-0000-0000-000000000000")
    with pytest.raises(ReadingLost):
        source.read()
    source.close()
