"""Which failures say that there was no memory, and nothing else: the work can be done again once there is."""

from __future__ import annotations

from typing import Final

import torch

#: What a shortage is raised as; ask `is_shortage` whether one is.
SHORTAGE_TYPES: Final = (RuntimeError, MemoryError)
#: cudaErrorMemoryAllocation: the driver had no room, and nothing is broken.
_OUT_OF_MEMORY: Final = 2
#: How torch and its libraries say it where they have no type for it.
_SIGNS: Final = (
    "can't allocate memory",  # "DefaultCPUAllocator: can't allocate memory: you tried to allocate ... bytes"
    "not enough memory",
    "CUDA error: out of memory",
    "std::bad_alloc",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_shortage(error: BaseException) -> bool:
    """Whether memory ran out, on the device or on the host, and the device works as before."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, torch.AcceleratorError) and getattr(error, "error_code", None) == _OUT_OF_MEMORY:
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
