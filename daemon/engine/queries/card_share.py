"""What slices on their way may take of a card together: memory that the batch can't have meanwhile."""

from __future__ import annotations

import functools
from typing import Final

import torch

#: A 32nd part, in either direction. More shows in the governor's peak, and lowers the budget for minutes.
SHARE: Final = 32


@functools.cache
def card_share_bytes(device: torch.device) -> int:
    """Bytes that slices in one direction may take of a device; on a CPU they are no burden of a card.

    Args:
        device: Of the batch.
    """
    if device.type != "cuda":
        return 1 << 62
    return int(torch.cuda.get_device_properties(device).total_memory) // SHARE
