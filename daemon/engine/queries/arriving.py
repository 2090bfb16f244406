"""Slices on their way to the device: their rows are given when their bytes have come, and not before.

host pool ──copy, checksum on threads──> slice on the device ──embed──> row
  good until then, and afterwards            the batch decodes all the while
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from batond.daemon.engine.queries.card_share import card_share_bytes

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Container

    import torch

    from batond.offload.entries import LoadTicket
    from batond.offload.store import ParkedStore

#: Device memory that copies begun before their rows may take together, on a small card less; one is begun
#: however large it is.
MOST_BYTES: Final = 1 << 30


class Arriving:
    """Loads that were begun and not finished.

    Args:
        store: Where they come from.
        device: Where they go.
        counters: Counts copies begun ahead of a row, and those that were wanted.
    """

    def __init__(self, store: ParkedStore, device: torch.device, counters: Counter[str]) -> None:
        self._store, self._device, self._counters = store, device, counters
        self._tickets: dict[str, LoadTicket] = {}  # Oldest first.
        self._ahead: set[str] = set()  # Begun before a row was due.
        self._due: set[str] = set()
        self._crowded: set[str] = set()
        self._given_up: set[str] = set()

    def __contains__(self, owner_id: str) -> bool:
        """Whether a copy was begun for an owner."""
        return owner_id in self._tickets

    @property
    def due(self) -> bool:
        """Whether a copy has yet to land for somebody who would have a row by now."""
        return any(not self._store.ready(self._tickets[one]) for one in self._due if one in self._tickets)

    def expect(self, due: Container[str], likely: Container[str]) -> None:
        """Give up what was begun for anybody else; the host copies stay.

        Args:
            due: Owners that would have a row if their bytes were here.
            likely: Those that are likely to get one soon.
        """
        self._crowded.clear()
        self._due = {owner_id for owner_id in (*self._tickets, *self._given_up) if owner_id in due}
        self._given_up &= self._due
        for owner_id in list(self._tickets):
            if owner_id not in due and owner_id not in likely:
                self._abort(owner_id)

    def begin(self, owner_id: str, *, due: bool) -> None:
        """Begin to copy an owner's slice, if there is room for it beside the others.

        Args:
            owner_id: Has a complete copy on the host, and none under way.
            due: It would have a row if its bytes were here.

        Raises:
            Exception: As `ParkedStore.begin_load`.
        """
        if due:
            self._due.add(owner_id)
        if owner_id in self._given_up:
            return
        if due and self._crowds(owner_id):
            self.give_up_likely()
        if self._crowds(owner_id):
            self._crowded.add(owner_id)
            return
        self._tickets[owner_id] = self._store.begin_load(owner_id, self._device)
        if not due:
            self._ahead.add(owner_id)
            self._counters["loads_ahead"] += 1

    def landed(self, owner_id: str) -> bool:
        """Whether taking an owner's slice would wait for nothing.

        Also true where no copy could be begun: then whoever loads it finds out why. So it is after a copy was
        given up for want of memory: beside the others' work it might never come.
        """
        ticket = self._tickets.get(owner_id)
        return owner_id not in self._crowded if ticket is None else self._store.ready(ticket)

    def take(self, owner_id: str) -> LoadTicket | None:
        """The copy begun for an owner, to be finished by the caller; None if there is none."""
        self._given_up.discard(owner_id)
        if owner_id in self._ahead:
            self._counters["loads_ahead_used"] += 1
        return self._drop(owner_id)

    def give_up(self) -> None:
        """Give up everything: its memory is needed at once."""
        self._given_up |= self._due.intersection(self._tickets)
        for owner_id in list(self._tickets):
            self._abort(owner_id)

    def give_up_likely(self) -> None:
        """Give up what is due to nobody yet."""
        for owner_id in [owner_id for owner_id in self._tickets if owner_id not in self._due]:
            self._abort(owner_id)

    def forget(self, owner_id: str) -> None:
        """The store is about to drop whatever there is of an owner, its copy included."""
        self._drop(owner_id)
        self._given_up.discard(owner_id)

    def check_integrity(self) -> None:
        """Raise AssertionError where a copy is under way of which the store knows nothing."""
        for owner_id, ticket in self._tickets.items():
            if ticket.forgotten or not self._store.parked_bytes(owner_id):
                raise AssertionError(f"a copy of {owner_id} was begun, and nothing is parked")
        if not self._ahead <= set(self._tickets):
            raise AssertionError(f"copies begun ahead are not under way: {self._ahead - set(self._tickets)}")

    @property
    def _most_bytes(self) -> int:
        return min(MOST_BYTES, card_share_bytes(self._device))

    def _crowds(self, owner_id: str) -> bool:
        """Whether there is no room for an owner's slice beside those under way."""
        taken = sum(ticket.kv.nbytes for ticket in self._tickets.values())
        return bool(self._tickets) and taken + self._store.parked_bytes(owner_id) > self._most_bytes

    def _drop(self, owner_id: str) -> LoadTicket | None:
        self._ahead.discard(owner_id)
        self._due.discard(owner_id)
        self._crowded.discard(owner_id)
        return self._tickets.pop(owner_id, None)

    def _abort(self, owner_id: str) -> None:
        ticket = self._drop(owner_id)
        if ticket is not None:
            self._store.abort(ticket)
