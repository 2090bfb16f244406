"""A card's memory as NVML tells it: of the whole card, or of the MIG instance that this process has.

The card is found by its UUID: indices differ between NVML and CUDA (`CUDA_VISIBLE_DEVICES`, PCI order).
Nobody is asked for by process id: in a container those are other processes' ids.

Two structures are known. Version 2 tells apart what the driver keeps (`total = used + free + reserved`),
version 1 counts that as used; `total` and `free` are the same in both, and nothing else is read here.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import time
from typing import TYPE_CHECKING, Any, Final

from batond.daemon.memory.readings import MemoryReading, ReadingLost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_log = logging.getLogger(__name__)

#: CUDA and NVML may differ so much in what a memory has in total: CUDA leaves out what the driver keeps.
TOTAL_TOLERANCE: Final = 0.15

_INVALID_ARGUMENT: Final = 2
_NOT_SUPPORTED: Final = 3
_NOT_FOUND: Final = 6
_FUNCTION_NOT_FOUND: Final = 13
_VERSION_MISMATCH: Final = 25
#: By these a driver says that it knows no structure of version 2; all others are troubles of the card.
_NO_VERSION_2: Final = frozenset({_INVALID_ARGUMENT, _NOT_SUPPORTED, _FUNCTION_NOT_FOUND, _VERSION_MISMATCH})


def import_nvml() -> Any:
    """The library's module: not needed where there is no card, so imported only here.

    Raises:
        ReadingLost: It is not installed.
    """
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        raise ReadingLost(f"nvidia-ml-py is not installed: {error}") from error


class NvmlSource:
    """Reads one card or MIG instance. Opened by the first `read`, and anew after each failure.

    Args:
        uuid: As CUDA names it, with or without `GPU-` or `MIG-` before it.
        expected_total_bytes: What CUDA says that it has in total; a memory of another size is another one,
            such as the whole card behind a MIG instance. None asks for nothing.
        nvml: Gives the library.
        clock: Monotonic.
    """

    def __init__(
        self,
        uuid: str,
        expected_total_bytes: int | None = None,
        nvml: Callable[[], Any] = import_nvml,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._uuid, self._expected_bytes = uuid, expected_total_bytes
        self._import, self._clock = nvml, clock
        self._nvml: Any = None
        self._handle: Any = None
        self._version: int | None = None
        self.name = f"NVML {uuid}"

    def read(self) -> MemoryReading:
        """Ask NVML.

        Raises:
            ReadingLost: Whatever NVML, its library or the driver has to say; the next try opens all anew.
        """
        try:
            if self._handle is None:
                self._open()
            at_s = self._clock()
            info = self._memory_info(self._handle)
            reading = MemoryReading(int(info.total), int(info.free), at_s)
        except ReadingLost:
            self.close()
            raise
        except Exception as error:
            self.close()
            raise ReadingLost(f"{type(error).__name__}: {error}") from error
        if not self._is_expected(reading.total_bytes):
            self.close()
            raise ReadingLost(
                f"NVML knows {reading.total_bytes} bytes of {self._uuid}, CUDA {self._expected_bytes}"
            )
        return reading

    def close(self) -> None:
        """Let go of the library; `read` opens it again."""
        nvml, self._nvml, self._handle = self._nvml, None, None
        if nvml is not None:
            with contextlib.suppress(Exception):  # It may be what failed.
                nvml.nvmlShutdown()

    def _open(self) -> None:
        nvml = self._import()
        nvml.nvmlInit()
        self._nvml = nvml
        self._version = getattr(nvml, "nvmlMemory_v2", None)
        self._handle = self._find()

    def _find(self) -> Any:
        """The instance or the card of that UUID.

        Older CUDA gives the card's UUID also where only a MIG instance of it is to be had: then that instance
        is the one meant, if its size tells which.
        """
        handle = None
        for name in _names(self._uuid):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByUUID(name)
                break
            except self._nvml.NVMLError as error:
                if _code(error) not in {_NOT_FOUND, _INVALID_ARGUMENT}:
                    raise
        if handle is None:
            raise ReadingLost(f"NVML knows no card {self._uuid}")
        instances = list(self._instances(handle))
        if not instances:
            return handle
        fitting = [one for one in instances if self._is_expected(int(self._memory_info(one).total))]
        if len(instances) > 1 and (self._expected_bytes is None or len(fitting) != 1):
            raise ReadingLost(
                f"{self._uuid} is split into {len(instances)} MIG instances, and which is ours can't be told:"
                " name it in CUDA_VISIBLE_DEVICES as MIG-<uuid>"
            )
        return (fitting or instances)[0]

    def _instances(self, handle: Any) -> Iterator[Any]:
        """The MIG instances of a card; none of an instance, or of a card that is not split."""
        nvml = self._nvml
        try:
            current, _ = nvml.nvmlDeviceGetMigMode(handle)
            count = nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if current else 0
        except (AttributeError, nvml.NVMLError):
            return  # No such thing here, or it is an instance itself.
        for index in range(count):
            with contextlib.suppress(nvml.NVMLError):  # Places may be empty.
                yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)

    def _memory_info(self, handle: Any) -> Any:
        nvml = self._nvml
        if self._version is not None:
            try:
                return nvml.nvmlDeviceGetMemoryInfo(handle, version=self._version)
            except TypeError:  # An older library knows no versions.
                pass
            except nvml.NVMLError as error:
                if _code(error) not in _NO_VERSION_2:
                    raise
            _log.info("NVML has no memory structure of version 2: version 1 tells as much")
            self._version = None
        return nvml.nvmlDeviceGetMemoryInfo(handle)

    def _is_expected(self, total_bytes: int) -> bool:
        expected = self._expected_bytes
        return expected is None or abs(total_bytes - expected) <= TOTAL_TOLERANCE * expected


def _names(uuid: str) -> tuple[str, ...]:
    """What NVML may call a thing of that UUID, the more particular first."""
    return (uuid,) if uuid.startswith(("GPU-", "MIG-")) else (f"MIG-{uuid}", f"GPU-{uuid}")


def _code(error: Exception) -> int:
    return int(getattr(error, "value", -1))
