"""What a batch's keys and values take; said by every batch, read by whoever watches memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ArenaUse:
    """Memory of a batch's keys and values, in bytes of the device that it decodes on.

    Attributes:
        committed_bytes: Physical memory that rows hold now.
        pooled_bytes: Physical memory that no row holds and that is kept for the next; `trim` gives it back.
        reserved_bytes: The most that the rows could ever hold: address space where `elastic`, else memory.
        elastic: Whether committed memory follows the rows: what a freed row held goes to the pool, and from
            there to the system. On a CUDA card such memory is none of torch's: `torch.cuda.memory_reserved`
            does not count it. What is not elastic is torch's, and is counted there.
    """

    committed_bytes: int
    pooled_bytes: int
    reserved_bytes: int
    elastic: bool


NO_KEYS_AND_VALUES = ArenaUse(0, 0, 0, elastic=False)
