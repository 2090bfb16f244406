"""Page-locking of host memory for CUDA."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch

CUDA_HOST_REGISTER_PORTABLE = 1  # Page-locked for every CUDA context of the process.


class Pinner(Protocol):
    """Locks and unlocks ranges of host memory."""

    def pin(self, address: int, nbytes: int) -> None:
        """Page-lock [address, address + nbytes).

        Raises:
            Exception: It can't be locked; the memory is usable all the same.
        """

    def unpin(self, address: int) -> None:
        """Undo `pin`; no copy may be under way."""

    def close(self) -> None:
        """Give up the pinner's own resources."""


class CudaPinner:
    """Locks by `cudaHostRegister`, which takes exactly the bytes it is given.

    PyTorch's own page-locked allocations are rounded up to powers of two, and can't be given back one by one.

    All calls run in one thread of the pinner's own: CUDA keeps a failed call's error until the same thread's
    next check, so a refused registration would otherwise come up in an innocent kernel launch later.

    Args:
        device: CUDA device index; its context is used. Default: the current device.
    """

    def __init__(self, device: int | None = None) -> None:
        index = torch.cuda.current_device() if device is None else device
        self._thread = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="batond-pin",
            # A new thread starts on device 0; a context there would cost memory on somebody else's card.
            initializer=torch.cuda.set_device,
            initargs=(index,),
        )

    def pin(self, address: int, nbytes: int) -> None:
        """Page-lock a range.

        Raises:
            RuntimeError: CUDA refused (torch.cuda.CudaError).
        """
        self._thread.submit(_register, address, nbytes).result()

    def unpin(self, address: int) -> None:
        """Unlock the range that begins at `address`.

        Raises:
            RuntimeError: CUDA refused (torch.cuda.CudaError).
        """
        self._thread.submit(_unregister, address).result()

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown()


def _register(address: int, nbytes: int) -> None:
    _check(int(_cudart().cudaHostRegister(address, nbytes, CUDA_HOST_REGISTER_PORTABLE)))


def _unregister(address: int) -> None:
    _check(int(_cudart().cudaHostUnregister(address)))


def _cudart() -> Any:
    """The CUDA runtime as PyTorch binds it; it has no annotations."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check(code: int) -> None:
    if code:
        raise torch.cuda.CudaError(code)
