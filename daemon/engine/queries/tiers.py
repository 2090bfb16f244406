"""The host pool and the files behind it, made together and closed together."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from batond.offload.copies import copier_for
from batond.offload.folder import SpillFolder
from batond.offload.pool import HostPool
from batond.offload.spill import SpillTier
from batond.offload.store import ParkedStore

if TYPE_CHECKING:
    import torch


def open_store(
    device: torch.device,
    host_pool_bytes: int,
    spill_dir: str | Path | None,
    spill_bytes: int,
    *,
    poison: bool = False,
) -> ParkedStore:
    """Make a store over host RAM, page-locked where a GPU copies from it, and over files; `close_store` it.

    Args:
        device: Where slices come from.
        host_pool_bytes: Of the pool.
        spill_dir: Directory for files; None keeps none.
        spill_bytes: Most bytes of them; 0 keeps none.
        poison: As the store's.

    Raises:
        ConfigError: The directory can't be used, or its disk has no room; nothing is left open.
    """
    on_cuda = device.type == "cuda"
    with ExitStack() as undo:
        pool = HostPool(host_pool_bytes, pin=on_cuda)
        undo.callback(pool.close)
        tier = None
        if spill_dir is not None and spill_bytes:
            folder = SpillFolder(Path(spill_dir))
            undo.callback(folder.close)
            folder.check_room()
            tier = SpillTier(folder, spill_bytes)
        store = ParkedStore(pool, copier_for(device), poison=poison, tier=tier)
        if on_cuda:
            pool.warm_up()  # Page-locks in the background; parks before that use what is ready.
        undo.pop_all()
    return store


def close_store(store: ParkedStore) -> None:
    """Wait for all copies, remove all files, and give the host's memory back."""
    try:
        store.close()
    finally:
        store.pool.close()
