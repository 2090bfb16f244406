"""CUDA's virtual memory through NVIDIA's bindings; see "Virtual Memory Management" in the driver's manual."""

# pyright: reportMissingImports=false
# The bindings come with torch for CUDA and are missing elsewhere.

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from batond.daemon.devices import numbered
from batond.daemon.engine.batch.arenas.driver import DriverError


class CudaFence:
    """An event behind all work given to a stream so far."""

    def __init__(self, stream: Any) -> None:
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._event.record(stream)

    def done(self) -> bool:
        """Whether all work before it is done."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Wait until it is; other threads run meanwhile."""
        self._event.synchronize()


class CudaDriver:
    """Virtual memory of one card; see `driver.Driver` for the contract.

    Args:
        device: The card; torch has used it before, so that its context is there. Fences stand in the stream
            that is current when the driver is made: the one in which the ring is read and written.
        bindings: `cuda.bindings.driver`; None imports it.

    Raises:
        DriverError: The bindings are missing, or the card can't do it.
    """

    def __init__(self, device: torch.device, bindings: Any = None) -> None:
        self._cuda = _bindings() if bindings is None else bindings
        self._device = numbered(device)  # Other threads attach to it.
        self._stream = torch.cuda.current_stream(self._device)
        number = self._device.index
        on_device = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._memory = self._cuda.CUmemAllocationProp()
        self._memory.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._memory.location.type, self._memory.location.id = on_device, number
        self._access = self._cuda.CUmemAccessDesc()
        self._access.location.type, self._access.location.id = on_device, number
        self._access.flags = self._cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._require_support(number)
        least = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity = int(self._call("cuMemGetAllocationGranularity", self._memory, least))
        # Handles of the bindings are objects; outside, a number stands for each.
        self._handles: dict[int, Any] = {}

    def attach(self) -> None:
        """Make the card's context the calling thread's."""
        torch.cuda.set_device(self._device)

    def reserve(self, nbytes: int) -> int:
        """Address space, aligned to the granularity."""
        return int(self._call("cuMemAddressReserve", nbytes, 0, 0, 0))

    def unreserve(self, address: int, nbytes: int) -> None:
        """Give address space back."""
        self._call("cuMemAddressFree", address, nbytes)

    def create(self, nbytes: int) -> int:
        """Memory of the card."""
        handle = self._call("cuMemCreate", nbytes, self._memory, 0)
        self._handles[int(handle)] = handle
        return int(handle)

    def destroy(self, handle: int) -> None:
        """Give memory back to the card, for every process."""
        self._call("cuMemRelease", self._handles[handle])
        del self._handles[handle]

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Put memory behind an address."""
        self._call("cuMemMap", address, nbytes, 0, self._handles[handle], 0)

    def set_access(self, address: int, nbytes: int) -> None:
        """Let the card read and write it."""
        self._call("cuMemSetAccess", address, nbytes, [self._access], 1)

    def unmap(self, address: int, nbytes: int) -> None:
        """Take the memory from behind an address."""
        self._call("cuMemUnmap", address, nbytes)

    def fence(self) -> CudaFence:
        """A fence behind the ring's work, whichever thread asks."""
        return CudaFence(self._stream)

    def tensor(self, address: int, size: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
        """The bytes at an address, by the CUDA array interface (version 3), which every torch reads."""
        described = {
            "data": (address, False),
            "shape": size,
            "strides": strides,
            "typestr": "|u1",
            "version": 3,
        }
        return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=described), device=self._device)

    def _require_support(self, number: int) -> None:
        attribute = self._cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        device = self._call("cuDeviceGet", number)
        if not int(self._call("cuDeviceGetAttribute", attribute, device)):
            raise DriverError("the card has no virtual memory management")

    def _call(self, name: str, *args: Any) -> Any:
        """Call the driver.

        Returns:
            What it returned beside its status; None if nothing.

        Raises:
            torch.OutOfMemoryError: There is no memory left.
            DriverError: Anything else was wrong.
        """
        status, *found = getattr(self._cuda, name)(*args)
        if status == self._cuda.CUresult.CUDA_SUCCESS:
            return found[0] if found else None
        said = f"{name}: {getattr(status, 'name', status)}"
        if status == self._cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(said)
        raise DriverError(said)


def _bindings() -> Any:
    """NVIDIA's bindings of the driver.

    Raises:
        DriverError: They are not installed, or find no driver.
    """
    try:
        from cuda.bindings import driver  # noqa: PLC0415 - there are none without a card
    except ImportError as error:
        raise DriverError(f"cuda-bindings is not installed: {error}") from error
    try:
        driver.cuInit(0)
    except RuntimeError as error:
        raise DriverError(str(error)) from error
    return driver
