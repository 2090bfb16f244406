"""The card, and the memory that may be locked for copies to it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from batond.daemon.doctor.configured import device
from batond.daemon.doctor.report import Finding, Level
from batond.daemon.doctor.systemd_unit import unit_properties
from batond.daemon.memory.host import auto_host_pool_bytes, memlock_free_bytes
from batond.daemon.memory.nvml import import_nvml
from batond.daemon.memory.readings import ReadingLost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batond.daemon.config import Settings

CARD, MEMLOCK = "card", "memlock"
GIB: Final = 1 << 30
DEVICES: Final = Path("/dev")


def look(
    settings: Settings, unit: str, *, nvml: Callable[[], Any] = import_nvml, devices: Path = DEVICES
) -> Iterator[Finding]:
    """NVML, torch's own view of the card, and the memory that may be locked.

    Args:
        settings: The configuration.
        unit: Of systemd, whose limits count where it is there.
        nvml: Gives the library.
        devices: Where the driver's files are.

    Raises:
        ConfigError: Torch does not see the card that is configured.
    """
    asked = settings.model.device
    if asked == "cpu":
        yield Finding(CARD, Level.OK, "model.device is cpu: no card is needed")
        yield Finding(MEMLOCK, Level.OK, "nothing is locked for a CPU")
        return
    try:
        told = _cards(nvml())
    except Exception as error:  # noqa: BLE001 - an import that failed, or any error of NVML's own class
        yield _without_nvml(asked, error, driver=any(devices.glob("nvidia[0-9]*")))
        if asked == "auto":
            yield Finding(MEMLOCK, Level.OK, "nothing is locked for a CPU")
            return
    else:
        yield Finding(CARD, Level.OK, told)
        yield Finding(CARD, Level.OK, f"torch sees {_seen_by_torch(settings)}")
    yield _memlock(settings, unit)


def _cards(nvml: Any) -> str:
    nvml.nvmlInit()
    try:
        words = [f"driver {_text(nvml.nvmlSystemGetDriverVersion())}"]
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            words.append(
                f"{_text(nvml.nvmlDeviceGetName(handle))} with {memory.free / GIB:.1f}"
                f" of {memory.total / GIB:.1f} GiB free"
            )
    finally:
        nvml.nvmlShutdown()
    return f"NVML: {', '.join(words)}"


def _seen_by_torch(settings: Settings) -> str:
    from batond.daemon.devices import chosen_device  # noqa: PLC0415 - brings torch, which takes seconds

    return chosen_device(settings.model.device) if settings.model.device == "auto" else device(settings)


def _without_nvml(asked: str, error: Exception, *, driver: bool) -> Finding:
    why = str(error) if isinstance(error, ReadingLost) else f"NVML does not answer ({error})"
    if asked == "auto" and not driver:
        return Finding(CARD, Level.OK, "there is no card: the model will run on the CPU")
    level = Level.WARNING if asked == "auto" else Level.FAULT
    return Finding(
        CARD,
        level,
        f"{why}; model.device is {asked}",
        "does nvidia-smi work for this user? Install the driver, or reboot after an update of it; the memory"
        " governor needs NVML",
    )


def _memlock(settings: Settings, unit: str) -> Finding:
    wanted = settings.engine.host_pool_bytes
    nbytes = auto_host_pool_bytes(pin=False) if wanted == "auto" else int(wanted)
    limit = unit_properties(unit).get("LimitMEMLOCK", "")
    if limit:
        whose, allowed = f"the unit {unit}", None if limit == "infinity" else int(limit)
    else:
        whose, allowed = "this shell", memlock_free_bytes()
    if allowed is None or allowed >= nbytes:
        bound = "without a limit" if allowed is None else f"up to {allowed} bytes"
        return Finding(MEMLOCK, Level.OK, f"{whose} may lock memory {bound}")
    advice = "LimitMEMLOCK=infinity in the unit, or `ulimit -l unlimited`; else the host pool is smaller"
    level = Level.WARNING if wanted == "auto" or not limit else Level.FAULT
    return Finding(MEMLOCK, level, f"{whose} may lock {allowed} bytes, the host pool wants {nbytes}", advice)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
