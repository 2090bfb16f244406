"""Numbers of the host as tensors, without a wait for the card."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def on_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of these numbers; on a card its copy takes its turn on the current stream.

    A copy from memory that is not page-locked waits for all that was launched before.

    Args:
        values: The numbers, or lists of them.
        dtype: Of the tensor.
        device: Of the tensor.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
