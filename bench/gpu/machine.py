"""On what it ran: card, driver, versions, and the state of the card's clocks."""

from __future__ import annotations

import contextlib
import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final

import pynvml
import torch

from batond.daemon.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGES: Final = ("batond", "torch", "transformers", "triton")
_UNKNOWN: Final = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class CardState:
    """A card at one moment, as NVML tells; all are words, "unknown" where it doesn't.

    Attributes:
        sm_mhz: Clock of the multiprocessors, and its maximum.
        memory_mhz: Clock of the memory, and its maximum.
        power_w: Power drawn, and its limit.
        state: Performance state; P0 is the fastest.
        temperature_c: Of the chip.
        other_processes: Processes that compute on the card beside this one.
    """

    sm_mhz: str = _UNKNOWN
    memory_mhz: str = _UNKNOWN
    power_w: str = _UNKNOWN
    state: str = _UNKNOWN
    temperature_c: str = _UNKNOWN
    other_processes: str = _UNKNOWN


def require_device(name: str) -> torch.device:
    """The device to measure.

    Raises:
        ConfigError: There is no such device; the message says what to do.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"{name!r} is no device: cuda, cuda:1, ... or cpu", device=name) from error
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ConfigError(f"{name!r}: only CUDA cards are measured, or cpu", device=name)
    if not torch.cuda.is_available():
        raise ConfigError(
            "torch sees no CUDA card: this bench measures one. --device cpu runs it through on a small model"
            " (--shape tiny) to see that it works; its times mean nothing",
            device=name,
        )
    # "cuda" alone has index None, whatever the annotation says.
    index = torch.cuda.current_device() if getattr(device, "index", None) is None else device.index
    if index >= torch.cuda.device_count():
        raise ConfigError(f"{name!r}: torch sees {torch.cuda.device_count()} card(s)", device=name)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def free_bytes(device: torch.device) -> int:
    """Memory of the device that can be had, what torch keeps for itself included."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def describe(device: torch.device) -> dict[str, str]:
    """Card, driver and versions."""
    found = {"device": platform.processor() or platform.machine(), "driver": "none"}
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        found["device"] = (
            f"{about.name}, {about.total_memory / (1 << 30):.1f} GiB, {about.multi_processor_count} SMs"
        )
        with contextlib.suppress(pynvml.NVMLError), _nvml(device):
            found["driver"] = str(pynvml.nvmlSystemGetDriverVersion())
        found["cuda"] = str(torch.version.cuda)
    found["python"] = platform.python_version()
    for name in PACKAGES:
        try:
            found[name] = torch.__version__ if name == "torch" else version(name)
        except PackageNotFoundError:
            found[name] = "none"
    found["cores"] = str(len(os.sched_getaffinity(0)))
    return found


def card_state(device: torch.device) -> CardState | None:
    """Clocks and power of a card at this moment; None without a card."""
    if device.type != "cuda":
        return None
    found: dict[str, str] = {}
    with contextlib.suppress(pynvml.NVMLError), _nvml(device) as card:
        for name, ask in _QUESTIONS.items():
            with contextlib.suppress(pynvml.NVMLError):  # Some cards and machines don't tell.
                found[name] = ask(card)
    return CardState(**found)


def _others(card: Any) -> str:
    mine = os.getpid()
    return str(sum(one.pid != mine for one in pynvml.nvmlDeviceGetComputeRunningProcesses(card)))


_QUESTIONS: Final = {
    "sm_mhz": lambda card: _of_most(
        pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_SM),
        pynvml.nvmlDeviceGetMaxClockInfo(card, pynvml.NVML_CLOCK_SM),
    ),
    "memory_mhz": lambda card: _of_most(
        pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_MEM),
        pynvml.nvmlDeviceGetMaxClockInfo(card, pynvml.NVML_CLOCK_MEM),
    ),
    "power_w": lambda card: _of_most(
        pynvml.nvmlDeviceGetPowerUsage(card) / 1e3, pynvml.nvmlDeviceGetEnforcedPowerLimit(card) / 1e3
    ),
    "state": lambda card: f"P{pynvml.nvmlDeviceGetPerformanceState(card)}",
    "temperature_c": lambda card: str(pynvml.nvmlDeviceGetTemperature(card, pynvml.NVML_TEMPERATURE_GPU)),
    "other_processes": _others,
}


def _of_most(now: float, most: float) -> str:
    return f"{now:.0f} of {most:.0f}"


@contextlib.contextmanager
def _nvml(device: torch.device) -> Iterator[Any]:
    """NVML's handle of a card, found by its UUID: NVML and CUDA may number cards differently.

    Raises:
        pynvml.NVMLError: There is no NVML, or it does not know the card.
    """
    pynvml.nvmlInit()
    try:
        uuid = torch.cuda.get_device_properties(device).uuid
        yield pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    finally:
        pynvml.nvmlShutdown()
