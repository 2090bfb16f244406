"""Which arena a ring gets."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING

import torch

from batond.daemon.engine.batch.arenas.arena import ArenaShape
from batond.daemon.engine.batch.arenas.card import CardArena
from batond.daemon.engine.batch.arenas.cuda_driver import CudaDriver
from batond.daemon.engine.batch.arenas.driver import DriverError
from batond.daemon.engine.batch.arenas.host import HostArena
from batond.daemon.engine.batch.arenas.plain import PlainArena

if TYPE_CHECKING:
    from batond.daemon.engine.batch.arenas.arena import Arena, NewArena

#: "auto" is elastic on the CPU: steps cost the same (0.96 to 1.03), embedding a row some 2.4 times as much by
#: page faults, freeing a long one less (docs/performance.md). On a card it is plain: a step costs 1.001, but
#: embedding where no page is mapped yet 7 ms for 512 MiB, and `bench neighbour` was not run to its end.
ARENA_KINDS = ("auto", "plain", "elastic")


def choose_arena(kind: str, device: torch.device, *, kernels: bool) -> tuple[NewArena, str]:
    """How to make a ring's arena.

    Args:
        kind: One of `ARENA_KINDS`.
        device: Where the ring lies.
        kernels: The ring's own kernels read it, which touch no column but a row's own.

    Returns:
        What makes it; and why it is not elastic although that was asked for, "" otherwise.
    """
    if kind == "plain" or (kind == "auto" and device.type != "cpu"):
        return plain_arena, ""
    why = why_not_elastic(device, kernels=kernels)
    if why:
        return plain_arena, why if kind == "elastic" else ""
    return elastic_arena, ""


def plain_arena(shape: ArenaShape, device: torch.device) -> Arena:
    """All memory from the start."""
    return PlainArena(shape, device)


def elastic_arena(shape: ArenaShape, device: torch.device) -> Arena:
    """Memory that follows the rows.

    Raises:
        torch.OutOfMemoryError: There is no memory for one page.
        DriverError: The card can't; see `why_not_elastic`.
    """
    if device.type == "cuda":
        return CardArena(shape, CudaDriver(device))
    return HostArena(shape)


def auto_arena(shape: ArenaShape, device: torch.device) -> Arena:
    """What a ring gets if nobody says more."""
    return choose_arena("auto", device, kernels=False)[0](shape, device)


def why_not_elastic(device: torch.device, *, kernels: bool) -> str:
    """Why a ring's memory can't follow its rows here; "" if it can.

    Args:
        device: Where the ring lies.
        kernels: The ring's own kernels read it.
    """
    if device.type == "cpu":
        return "" if sys.platform == "linux" else "only Linux gives memory back page by page"
    if device.type != "cuda":
        return f"no virtual memory on {device.type}"
    if not kernels:
        return "attention in torch reads columns of other rows"
    return _why_card_can_not(device)


@functools.cache
def _why_card_can_not(device: torch.device) -> str:
    """Try a small arena on the card; "" if it works."""
    try:
        arena = CardArena(ArenaShape(1, 8, 4096), CudaDriver(device), background=False)
        try:
            arena.commit(0, 0, 8)
            arena.tensor.fill_(7)
            sound = bool((arena.tensor == 7).all())  # noqa: PLR2004 - what was written
        finally:
            arena.close()
    except (DriverError, torch.OutOfMemoryError) as error:
        return str(error)
    return "" if sound else "mapped memory does not keep what is written"
