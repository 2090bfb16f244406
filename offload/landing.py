"""Where slices land: device memory in few sizes, so that one slice takes the block that another has left."""

from __future__ import annotations

from typing import Final

import torch

#: Sizes between a number of bytes and twice as many: less than one part of so many stays unused.
_SIZES: Final = 8
#: Blocks below are not worth it: the allocator has some at hand.
_LEAST_BYTES: Final = 1 << 20


def empty_records(n_tokens: int, record_bytes: int, device: torch.device | str) -> torch.Tensor:
    """Memory for the records of a slice; its content is undefined.

    A row grows with every token. Slices of exact sizes would find no free block large enough, one after the
    other, and each take a new one from the driver, which waits for the device, while those of before stay
    with the allocator.

    Args:
        n_tokens: Records.
        record_bytes: Of each.
        device: Where.

    Returns:
        uint8, shape [n_tokens, record_bytes], contiguous.

    Raises:
        torch.OutOfMemoryError: There is none.
    """
    nbytes = n_tokens * record_bytes
    size = block_bytes(nbytes) if torch.device(device).type == "cuda" else nbytes
    try:
        block = torch.empty(size, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        if size == nbytes:
            raise
        block = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return block[:nbytes].view(n_tokens, record_bytes)


def block_bytes(nbytes: int) -> int:
    """The size of the block for so many bytes: the next of eight between two powers of two."""
    if nbytes <= _LEAST_BYTES:
        return nbytes
    grain = (1 << (nbytes - 1).bit_length() - 1) // _SIZES
    return -(-nbytes // grain) * grain
