"""Small results on their way from a card to the host.

Copies to the host take turns, whatever their streams: a step's tokens would wait until the half gigabyte of a
row that was just parked has gone, 8 ms for 0.1. A kernel that writes page-locked memory takes no turn.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, Final

import torch

_LEAST_BYTES: Final = 1 << 14


class _Buffers(threading.local):
    """Page-locked memory by card, and the same as the card sees it; each thread has its own."""

    def __init__(self) -> None:
        self.by_card: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}


_buffers = _Buffers()


def as_card(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Page-locked memory as a tensor of a card, by the CUDA array interface (version 3).

    Kernels read and write it over the bus. Not by `copy_`, which would take its turn among the copies.

    Args:
        host: uint8, page-locked, shape [m]; must outlive the result.
        device: The card.
    """
    described = {
        "data": (host.data_ptr(), False),
        "shape": tuple(host.shape),
        "strides": None,
        "typestr": "|u1",
        "version": 3,
    }
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=described), device=device)


def to_list(numbers: torch.Tensor) -> Any:
    """What `numbers.tolist()` gives, waiting for the current stream and for no copy of another one.

    Args:
        numbers: Integers or floats, a few thousand.
    """
    if numbers.device.type != "cuda":
        return numbers.tolist()
    host, card = _buffer(numbers.device, numbers.nbytes)
    if numbers.numel():
        torch.mul(numbers.reshape(-1), 1, out=_part(card, numbers))
        torch.cuda.current_stream(numbers.device).synchronize()
    return _part(host, numbers).view(numbers.shape).tolist()


def _part(buffer: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The first bytes of a buffer as so many numbers of the same kind."""
    return buffer[: numbers.nbytes].view(numbers.dtype)


def _buffer(device: torch.device, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This thread's buffer for a card, on both sides; page-locking anew would wait for the card."""
    known = _buffers.by_card.get(device)
    if known is None or known[0].numel() < nbytes:
        size = max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length())
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        known = _buffers.by_card[device] = host, as_card(host, device)
    return known
