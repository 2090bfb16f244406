"""Slices on their way to the host: their rows are given away before their bytes have arrived.

row ──extract──> slice on the device ──copy, checksum──> host pool
                   good until then, and taken back at once if its query gets a row so soon
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from batond.daemon.engine.queries.card_share import card_share_bytes
from batond.offload.errors import CopyFailedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.offload.entries import StoreTicket
    from batond.offload.slice import KVSlice
    from batond.offload.store import ParkedStore

#: Slices that may be under way at once, however large. One is copied while the checksum of the one before
#: it is computed.
MOST_UNDER_WAY: Final = 2
#: More may be as long as they take no more device memory beside the batch, on a small card less: a burst of
#: parks holds nobody up.
MOST_BYTES: Final = 2 << 30


class Outgoing:
    """Stores that were begun and not finished.

    Args:
        store: Where they go.
    """

    def __init__(self, store: ParkedStore) -> None:
        self._store = store
        self._tickets: dict[str, tuple[StoreTicket, Callable[[], None]]] = {}  # Oldest first.

    def __contains__(self, owner_id: str) -> bool:
        """Whether the owner's slice is under way."""
        return owner_id in self._tickets

    def __len__(self) -> int:
        """How many are under way."""
        return len(self._tickets)

    @property
    def _nbytes(self) -> int:
        """Device memory that they take."""
        return sum(ticket.kv.nbytes for ticket, _ in self._tickets.values())

    def start(self, owner_id: str, kv: KVSlice, layout_hash: str, on_lost: Callable[[], None]) -> None:
        """Begin to store a slice. With two under way, waits for the oldest until all are few enough bytes.

        Args:
            owner_id: Whose.
            kv: The slice; nobody may write to it any more.
            layout_hash: Digest of the layout of its records.
            on_lost: Called if the copy fails later on: nothing is parked then.

        Raises:
            HostPoolFullError: No room; nothing has changed.
            CopyFailedError: The copy did not happen; nothing has changed.
        """
        most_bytes = min(MOST_BYTES, card_share_bytes(kv.tokens.device))
        while len(self._tickets) >= MOST_UNDER_WAY and self._nbytes + kv.nbytes > most_bytes:
            self.finish(next(iter(self._tickets)))
        ticket = self._store.begin_store(owner_id, kv, layout_hash)
        if self._store.ready(ticket):
            self._store.finish_store(ticket)
        else:
            self._tickets[owner_id] = (ticket, on_lost)

    def settle(self) -> None:
        """Finish what would not wait. Call it once a step."""
        for owner_id, (ticket, _) in list(self._tickets.items()):
            if self._store.ready(ticket):
                self.finish(owner_id)

    def finish(self, owner_id: str) -> None:
        """Wait until an owner's slice is on the host, if it is under way."""
        ticket, on_lost = self._tickets.pop(owner_id, (None, None))
        if ticket is None or on_lost is None:
            return
        try:
            self._store.finish_store(ticket)
        except CopyFailedError:
            on_lost()

    def finish_all(self) -> None:
        """Wait until everything is on the host, and nothing of it on the device any more."""
        for owner_id in list(self._tickets):
            self.finish(owner_id)

    def take_back(self, owner_id: str) -> KVSlice | None:
        """Return the slice, still on the device, and park nothing; None if it is not under way."""
        ticket, _ = self._tickets.pop(owner_id, (None, None))
        if ticket is None:
            return None
        self._store.abort(ticket)
        return ticket.kv

    def forget(self, owner_id: str) -> None:
        """The store is about to drop whatever there is of an owner."""
        self._tickets.pop(owner_id, None)

    def check_integrity(self) -> None:
        """Raise AssertionError where something is under way of which the store knows nothing."""
        for owner_id, (ticket, _) in self._tickets.items():
            if ticket.forgotten or not self._store.parked_bytes(owner_id):
                raise AssertionError(f"the slice of {owner_id} is under way to nowhere")
