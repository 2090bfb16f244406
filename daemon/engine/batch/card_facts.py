"""What kernels of the batch ask of a card, and the counters that programs of one launch share."""

from __future__ import annotations

import functools
import threading
from typing import NamedTuple

import torch

_KIB = 1024


class Card(NamedTuple):
    """A card, as far as it decides how work is cut.

    Attributes:
        cores: Multiprocessors.
        shared_bytes: Memory that a program may have of one.
    """

    cores: int
    shared_bytes: int


@functools.cache
def card_of(device: torch.device) -> Card:
    """The facts of a device; what is no CUDA card, stand-ins of the tests, bounds nothing."""
    if device.type != "cuda":
        return Card(cores=1, shared_bytes=1 << 30)
    properties = torch.cuda.get_device_properties(device)  # CUDA keeps 1 KiB of each multiprocessor's.
    return Card(properties.multi_processor_count, properties.shared_memory_per_multiprocessor - _KIB)


def arrived(device: torch.device, count: int) -> torch.Tensor:
    """How many programs of each sum have ended; int32, shape [count].

    Each call of a kernel leaves zeros: calls on one stream can share them. Threads have each their own.
    """
    return _arrived(device, count, threading.get_ident())


@functools.cache
def _arrived(device: torch.device, count: int, thread: int) -> torch.Tensor:  # noqa: ARG001 - it tells engines apart
    return torch.zeros(count, dtype=torch.int32, device=device)
