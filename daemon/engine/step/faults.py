"""Which failures of a forward are one query's, and which end the engine."""

from __future__ import annotations

from typing import Final

import torch

from batond.daemon.engine.model.shortage import is_shortage

#: What torch and its libraries say once the context of the device is past use, or their results are.
_BROKEN: Final = ("CUDA error:", "HIP error:", "device-side assert", "CUBLAS_STATUS_", "CUDNN_STATUS_")


def breaks_device(error: BaseException) -> bool:
    """Whether the device can't be used any more by this process, whatever is computed next.

    After a device assert or an illegal access every later call of the process fails too: failing the query
    in whose prefill it showed would let the engine go on and fail all others one by one.
    """
    if is_shortage(error):
        return False
    if isinstance(error, torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _BROKEN)
