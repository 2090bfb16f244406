"""Parked slices: two-phase copies in both directions, so that never zero good copies of a slice exist.

    source, device   good ─────────────────┐ may be overwritten
    host copy               STORING ─ finish ─> PARKED ── begin_load ──> LOADING ─ finish ─> LOADED ─ discard
    target, device                                                                 good, embed it ───────────

`abort` takes the last `begin` back. `forget` ends every story, at cancel: bytes that a copy still reads or
writes are given back only after that copy is over.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from batond.offload.checks import Checker
from batond.offload.entries import Entry, LoadTicket, ParkedSlice, SliceState, StoreStats, StoreTicket
from batond.offload.errors import CopyFailedError, ForgottenError, OffloadStateError, SliceCorruptError
from batond.offload.header import describe, seal, unseal
from batond.offload.poison import fill
from batond.offload.slice import KVSlice

if TYPE_CHECKING:
    from batond.offload.checks import Check
    from batond.offload.copies import Copier
    from batond.offload.entries import Ticket
    from batond.offload.pool import HostPool

logger = logging.getLogger(__name__)


class ParkedStore:
    """Parks one slice an owner in a host pool. For one thread: the engine's.

    Args:
        pool: Holds the bytes; no one else reserves from it.
        copier: Does the copies.
        poison: Fill bytes that nobody may read (freed host regions, sources given back, targets before their
            copy) with 0xFF, so that a stale read shows. For tests.
        verify: Compute and check checksums; headers are checked always.

    Attributes:
        pool: As given.
        stats: Counters.
    """

    def __init__(self, pool: HostPool, copier: Copier, *, poison: bool = False, verify: bool = True) -> None:
        self.pool = pool
        self.stats = StoreStats()
        self._copier = copier
        self._poison = poison
        self._verify = verify
        self._checker = Checker()
        self._entries: dict[str, Entry] = {}
        self._retiring: list[Entry] = []

    @property
    def owners(self) -> tuple[str, ...]:
        """Everybody who has bytes here, in the order of their stores."""
        return tuple(self._entries)

    @property
    def retiring_bytes(self) -> int:
        """Bytes of forgotten slices that wait for the end of a copy."""
        return sum(entry.reservation.nbytes for entry in self._retiring)

    def parked_bytes(self, owner_id: str) -> int:
        """Bytes the owner has in the pool, a store under way included; 0 if none."""
        entry = self._entries.get(owner_id)
        return entry.reservation.nbytes if entry else 0

    def begin_store(self, owner_id: str, kv: KVSlice, layout_hash: str) -> StoreTicket:
        """Reserve bytes and start copying a slice to host.

        The source must stay as it is until `finish_store` returns.

        Args:
            owner_id: Who owns the slice; has nothing parked yet.
            kv: The slice.
            layout_hash: Digest of the layout of its records.

        Raises:
            HostPoolFullError: No room; nothing has changed.
            CopyFailedError: The copy did not start; nothing has changed.
            OffloadStateError: The owner has a slice here already.
            ValueError: The slice isn't made of contiguous bytes.
        """
        if owner_id in self._entries:
            raise OffloadStateError(f"{owner_id} has a parked slice already", owner_id=owner_id)
        header = describe(owner_id, kv, layout_hash)
        self.collect()
        entry = Entry(header, self.pool.reserve(header.body_bytes))
        try:
            if self._poison:
                fill(entry.reservation.views())
            transfer = self._copier.store(kv, entry.reservation)
        except Exception as error:
            self.pool.release(entry.reservation)
            self.stats.failures += 1
            raise CopyFailedError(f"storing {owner_id} failed: {error}", owner_id=owner_id) from error
        ticket = StoreTicket(owner_id, kv, entry, transfer)
        entry.ticket = ticket
        entry.transfers.append(transfer)
        self._entries[owner_id] = entry
        return ticket

    def finish_store(self, ticket: StoreTicket) -> ParkedSlice:
        """Wait for copy and checksum and publish it. From now on the source may be overwritten.

        Raises:
            CopyFailedError: The copy did not happen; the source is the good copy, nothing is parked.
            ForgottenError: The owner was forgotten meanwhile.
            OffloadStateError: The ticket was used before.
        """
        entry = self._entry_of(ticket)
        self._wait(entry, ticket)
        checksum = self._check(ticket).value()
        entry.sealed = bytearray(seal(entry.header, checksum))
        entry.parked = ParkedSlice(entry.header, checksum)
        entry.move(SliceState.PARKED)
        self.stats.stores += 1
        self.stats.bytes_out += entry.reservation.nbytes
        if self._poison:
            fill([ticket.kv.tokens, ticket.kv.state])
        return entry.parked

    def begin_load(
        self,
        owner_id: str,
        device: torch.device | str,
        *,
        layout_hash: str | None = None,
        first_tokens: int | None = None,
    ) -> LoadTicket:
        """Start copying a parked slice to a device. The host copy stays.

        Args:
            owner_id: Whose.
            device: Where to.
            layout_hash: If given, the slice must have been stored with it.
            first_tokens: Copy only so many of the oldest records; the whole slice is verified all the same.
                None copies all.

        Raises:
            ValueError: There are not so many records, or a state belongs to the whole slice.
            SliceCorruptError: It has another layout; it can only be discarded.
            CopyFailedError: The copy did not start; nothing has changed.
            OffloadStateError: Nothing is parked for the owner, or its copy is under way.
            torch.OutOfMemoryError: No room on the device; nothing has changed.
        """
        entry = self._parked_entry(owner_id)
        header = entry.header
        self.collect()
        if layout_hash is not None and header.layout_hash != layout_hash:
            entry.move(SliceState.LOADING)
            raise self._corrupt(entry, f"layout {header.layout_hash} instead of {layout_hash}")
        count = header.n_tokens if first_tokens is None else first_tokens
        if not 0 <= count <= header.n_tokens or (count < header.n_tokens and header.state_bytes):
            raise ValueError(f"the first {count} tokens can't be had alone from {header}")
        kv = KVSlice(
            torch.empty((count, header.record_bytes), dtype=torch.uint8, device=device),
            torch.empty(header.state_bytes, dtype=torch.uint8, device=device),
        )
        if self._poison:
            fill([kv.tokens, kv.state])
        try:
            source = entry.reservation
            transfer = self._copier.load(source if count == header.n_tokens else source.head(kv.nbytes), kv)
        except Exception as error:
            self.stats.failures += 1
            raise CopyFailedError(f"loading {owner_id} failed: {error}", owner_id=owner_id) from error
        entry.move(SliceState.LOADING)
        ticket = LoadTicket(owner_id, kv, entry, transfer)
        entry.ticket = ticket
        entry.transfers.append(transfer)
        self._check(ticket)  # Beside the copy.
        return ticket

    def finish_load(self, ticket: LoadTicket, *, layout_hash: str | None = None) -> KVSlice:
        """Wait for the copy and verify it. The host copy stays until `discard`.

        Args:
            ticket: Of `begin_load`.
            layout_hash: As in `begin_load`, for a copy that was begun without it.

        Raises:
            SliceCorruptError: Header, checksum or layout is wrong: `discard` it and recompute the query.
            CopyFailedError: The copy did not happen; the slice is parked as before.
            ForgottenError: The owner was forgotten meanwhile.
            OffloadStateError: The ticket was used before.
        """
        entry = self._entry_of(ticket)
        self._wait(entry, ticket)
        wrong = self._damage(ticket)
        if not wrong and layout_hash not in {None, entry.header.layout_hash}:
            wrong = f"layout {entry.header.layout_hash} instead of {layout_hash}"
        if wrong:
            if self._poison:
                fill([ticket.kv.tokens, ticket.kv.state])
            raise self._corrupt(entry, wrong)
        entry.move(SliceState.LOADED)
        self.stats.loads += 1
        self.stats.bytes_in += ticket.kv.nbytes
        return ticket.kv

    def ready(self, ticket: Ticket) -> bool:
        """Whether its finish would not wait; begins the checksum once the copy is over. Call it each step."""
        return ticket.forgotten or (ticket.done and self._check(ticket).done)

    def discard(self, owner_id: str) -> None:
        """Give the host copy back, after its embed or after it was found corrupt.

        Raises:
            OffloadStateError: It may be the only good copy (`forget` it if unneeded), or there is none.
        """
        entry = self._entries.get(owner_id)
        if entry is None or entry.state not in {SliceState.LOADED, SliceState.CORRUPT}:
            state = entry.state.value if entry else "not here"
            raise OffloadStateError(
                f"the slice of {owner_id} is {state}, it can't be discarded", owner_id=owner_id, state=state
            )
        self._retire(entry)

    def abort(self, ticket: Ticket) -> None:
        """Take a `begin_*` back, without waiting. A store leaves nothing parked; a load leaves it parked.

        The device side of the ticket may be overwritten or unmapped once the ticket is `done`.

        Raises:
            ForgottenError: The owner was forgotten meanwhile.
            OffloadStateError: The ticket was used before.
        """
        entry = self._entry_of(ticket)
        entry.ticket = None
        self.stats.aborted += 1
        if isinstance(ticket, StoreTicket):
            self._retire(entry)
        else:
            entry.move(SliceState.PARKED)

    def forget(self, owner_id: str) -> bool:
        """Drop whatever there is of an owner, without waiting; legal at any time and more than once.

        Returns:
            Whether there was something.
        """
        self.collect()
        entry = self._entries.get(owner_id)
        if entry is None:
            return False
        if entry.ticket is not None:
            entry.ticket.forgotten = True
            entry.ticket = None
        self._retire(entry)
        return True

    def collect(self) -> int:
        """Give back the bytes of forgotten slices whose copies are over. Cheap; call it once a step.

        Returns:
            Bytes given back.
        """
        for parked in self._entries.values():
            # An aborted load is of no use any more, but keeps its target on the device as long as we keep it.
            parked.transfers = [
                transfer
                for transfer in parked.transfers
                if not transfer.done() or (parked.ticket is not None and parked.ticket.transfer is transfer)
            ]
        before = self.retiring_bytes
        waiting: list[Entry] = []
        for entry in self._retiring:
            running = [transfer for transfer in entry.transfers if not transfer.done()]
            self.stats.late_completions += len(entry.transfers) - len(running)
            entry.transfers = running
            if running:
                waiting.append(entry)
            else:
                self._release(entry)
        self._retiring = waiting
        return before - self.retiring_bytes

    def check_integrity(self) -> None:
        """Raise AssertionError where slices and pool contradict each other."""
        self.pool.check_integrity()
        for owner_id, entry in self._entries.items():
            moving = entry.state in {SliceState.STORING, SliceState.LOADING}
            if entry.header.owner_id != owner_id or entry.state is SliceState.GONE:
                raise AssertionError(
                    f"{owner_id} has a slice of {entry.header.owner_id}, {entry.state.value}"
                )
            if moving != (entry.ticket is not None):
                raise AssertionError(f"{owner_id} is {entry.state.value}, its ticket is {entry.ticket}")
            if entry.header.body_bytes != entry.reservation.nbytes:
                raise AssertionError(f"{owner_id} has {entry.reservation.nbytes} bytes for {entry.header}")
        if any(not entry.transfers or entry.state is not SliceState.GONE for entry in self._retiring):
            raise AssertionError("a slice waits for its release without a copy under way")
        held = sum(entry.reservation.nbytes for entry in self._entries.values()) + self.retiring_bytes
        if held != self.pool.used_bytes:
            raise AssertionError(f"slices hold {held} bytes, the pool has given {self.pool.used_bytes}")

    def close(self) -> None:
        """Wait for all copies and give everything back to the pool; the pool stays open."""
        for owner_id in self.owners:
            self.forget(owner_id)
        for entry in self._retiring:
            for transfer in entry.transfers:
                try:
                    transfer.wait()
                except Exception:  # the bytes are given up anyway
                    logger.exception("a copy failed while the store was closed")
            self.stats.late_completions += len(entry.transfers)
            entry.transfers = []
            self._release(entry)
        self._retiring = []
        self._checker.close()

    def _parked_entry(self, owner_id: str) -> Entry:
        entry = self._entries.get(owner_id)
        if entry is None or entry.state not in {SliceState.PARKED, SliceState.LOADED}:
            state = entry.state.value if entry else "not here"
            raise OffloadStateError(
                f"the slice of {owner_id} is {state}, it can't be loaded", owner_id=owner_id, state=state
            )
        return entry

    def _entry_of(self, ticket: Ticket) -> Entry:
        entry = ticket.entry
        if ticket.forgotten:
            raise ForgottenError(f"{ticket.owner_id} was forgotten meanwhile", owner_id=ticket.owner_id)
        if entry.ticket is not ticket or self._entries.get(ticket.owner_id) is not entry:
            raise OffloadStateError(
                f"the ticket of {ticket.owner_id} was finished or aborted before", owner_id=ticket.owner_id
            )
        return entry

    def _wait(self, entry: Entry, ticket: Ticket) -> None:
        """Wait for the ticket's copy and close the ticket; roll back if the copy failed."""
        transfer = ticket.transfer
        try:
            transfer.wait()
        except Exception as error:
            entry.ticket = None
            entry.transfers.remove(transfer)
            self.stats.failures += 1
            if isinstance(ticket, StoreTicket):
                self._retire(entry)
            else:
                entry.move(SliceState.PARKED)
            raise CopyFailedError(
                f"the copy of {ticket.owner_id} failed: {error}", owner_id=ticket.owner_id
            ) from error
        entry.ticket = None
        entry.transfers.remove(transfer)

    def _damage(self, ticket: LoadTicket) -> str:
        """What is wrong with the host copy; empty if nothing is."""
        entry = ticket.entry
        try:
            header, checksum = unseal(bytes(entry.sealed))
        except SliceCorruptError as error:
            return error.message
        if entry.parked is None or header != entry.parked.header:
            return f"header {header} doesn't belong to {entry.header.owner_id}"
        if self._verify and checksum != self._check(ticket).value():
            return "checksum doesn't match"
        return ""

    def _check(self, ticket: Ticket) -> Check:
        """The checksum of what lies on the host; begun now, if it was not before."""
        if ticket.check is None:
            body = ticket.entry.reservation.views() if self._verify else []
            ticket.check = self._checker.begin(ticket.entry.header.encode(), body)
        return ticket.check

    def _corrupt(self, entry: Entry, wrong: str) -> SliceCorruptError:
        entry.move(SliceState.CORRUPT)
        self.stats.corruptions += 1
        owner_id = entry.header.owner_id
        return SliceCorruptError(f"the parked slice of {owner_id}: {wrong}", owner_id=owner_id)

    def _retire(self, entry: Entry) -> None:
        """Take the slice from its owner; give its bytes back now, or after the last copy touching them."""
        entry.move(SliceState.GONE)
        del self._entries[entry.header.owner_id]
        entry.transfers = [transfer for transfer in entry.transfers if not transfer.done()]
        if entry.transfers:
            self._retiring.append(entry)
        else:
            self._release(entry)

    def _release(self, entry: Entry) -> None:
        if self._poison:
            fill(entry.reservation.views())
        self.pool.release(entry.reservation)
