"""Parked slices: two-phase copies in both directions, so that never zero good copies of a slice exist.

    source, device   good ─────────────────┐ may be overwritten
    host copy               STORING ─ finish ─> PARKED ── begin_load ──> LOADING ─ finish ─> LOADED ─ discard
    target, device                                                                 good, embed it ───────────

`abort` takes the last `begin` back. `forget` ends every story, at cancel: bytes that a copy still reads or
writes are given back only after that copy is over. With a second tier a host copy may lie in a file, too,
or in a file alone: see `spiller.py`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from batond.offload.entries import (
    Entry,
    LoadTicket,
    ParkedSlice,
    SliceState,
    StoreStats,
    StoreTicket,
    check_entry,
    entry_of,
    parked_entry,
)
from batond.offload.errors import (
    CopyFailedError,
    OffloadStateError,
    SliceCorruptError,
    SliceLostError,
)
from batond.offload.header import describe, seal
from batond.offload.landing import empty_records
from batond.offload.poison import fill
from batond.offload.retired import Retired
from batond.offload.slice import KVSlice
from batond.offload.spill import SpillUse
from batond.offload.spiller import Spiller
from batond.offload.verify import Verifier

if TYPE_CHECKING:
    from batond.offload.copies import Copier
    from batond.offload.entries import Ticket
    from batond.offload.pool import HostPool
    from batond.offload.spill import SpillTier


class ParkedStore:
    """Parks one slice an owner in a host pool. For one thread: the engine's.

    Args:
        pool: Holds the bytes; no one else reserves from it.
        copier: Does the copies.
        poison: Fill bytes that nobody may read (freed host regions, sources given back, targets before their
            copy) with 0xFF, so that a stale read shows. For tests.
        verify: Compute and check checksums; headers are checked always.
        tier: Files for what the pool can't hold; closed with the store.

    Attributes:
        pool: As given.
        stats: Counters.
        spiller: Moves slices between pool and files.
    """

    def __init__(
        self,
        pool: HostPool,
        copier: Copier,
        *,
        poison: bool = False,
        verify: bool = True,
        tier: SpillTier | None = None,
    ) -> None:
        self.pool = pool
        self.stats = StoreStats()
        self._copier = copier
        self._poison = poison
        self._verifier = Verifier(checksums=verify)
        self._entries: dict[str, Entry] = {}
        self.spiller = Spiller(pool, self._entries, tier, poison=poison)
        self._copying: dict[Entry, None] = {}  # Those with transfers.
        self._retired = Retired(self.spiller, self.stats)

    @property
    def owners(self) -> tuple[str, ...]:
        """Everybody who has bytes here, in the order of their stores."""
        return tuple(self._entries)

    @property
    def retiring_bytes(self) -> int:
        """Bytes of forgotten slices that wait for the end of a copy."""
        return self._retired.nbytes

    @property
    def room_bytes(self) -> int:
        """Bytes that a store may take at once: free ones, and those of slices that are in files, too."""
        return self.pool.free_bytes + self.spiller.spare_bytes

    @property
    def spill_use(self) -> SpillUse:
        """The second tier as it stands; all zero without one."""
        tier = self.spiller.tier
        return SpillUse() if tier is None else tier.use

    def parked_bytes(self, owner_id: str) -> int:
        """Bytes the owner has parked, a store under way included; 0 if none."""
        entry = self._entries.get(owner_id)
        return entry.header.body_bytes if entry else 0

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
        reservation = self.spiller.reserve(header.body_bytes)
        entry = Entry(header, reservation)
        try:
            if self._poison:
                fill(reservation.views())
            transfer = self._copier.store(kv, reservation)
        except Exception as error:
            self.pool.release(reservation)
            self.stats.failures += 1
            raise CopyFailedError(f"storing {owner_id} failed: {error}", owner_id=owner_id) from error
        ticket = StoreTicket(owner_id, kv, entry, transfer)
        self._add(ticket)
        self._entries[owner_id] = entry
        return ticket

    def finish_store(self, ticket: StoreTicket) -> ParkedSlice:
        """Wait for copy and checksum and publish it. From now on the source may be overwritten.

        Raises:
            CopyFailedError: The copy did not happen; the source is the good copy, nothing is parked.
            ForgottenError: The owner was forgotten meanwhile.
            OffloadStateError: The ticket was used before.
        """
        entry = entry_of(self._entries, ticket)
        self._wait(entry, ticket)
        checksum = self._verifier.check(ticket).value()
        entry.sealed = bytearray(seal(entry.header, checksum))
        entry.parked = ParkedSlice(entry.header, checksum)
        entry.move(SliceState.PARKED)
        self.stats.stores += 1
        self.stats.bytes_out += entry.header.body_bytes
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
        """Start copying a parked slice to a device. The host copy stays. One in a file alone is waited for.

        Args:
            owner_id: Whose.
            device: Where to.
            layout_hash: If given, the slice must have been stored with it.
            first_tokens: Copy only so many of the oldest records; the whole slice is verified all the same.
                None copies all.

        Raises:
            ValueError: There are not so many records, or a state belongs to the whole slice.
            SliceCorruptError: It has another layout, or its file is lost; it can only be discarded.
            HostPoolFullError: It is in a file, and there is no room to read it to.
            CopyFailedError: The copy did not start; nothing has changed.
            OffloadStateError: Nothing is parked for the owner, or its copy is under way.
            torch.OutOfMemoryError: No room on the device; nothing has changed.
        """
        entry = parked_entry(self._entries, owner_id)
        header = entry.header
        self.collect()
        if layout_hash is not None and header.layout_hash != layout_hash:
            entry.move(SliceState.LOADING)
            raise self._corrupt(entry, f"layout {header.layout_hash} instead of {layout_hash}")
        count = header.n_tokens if first_tokens is None else first_tokens
        if not 0 <= count <= header.n_tokens or (count < header.n_tokens and header.state_bytes):
            raise ValueError(f"the first {count} tokens can't be had alone from {header}")
        self.spiller.bring(entry)
        if entry.lost:
            entry.move(SliceState.LOADING)
            raise self._lost(entry)
        kv = KVSlice(
            empty_records(count, header.record_bytes, device),
            torch.empty(header.state_bytes, dtype=torch.uint8, device=device),
        )
        if self._poison:
            fill([kv.tokens, kv.state])
        try:
            source = entry.held()
            transfer = self._copier.load(source if count == header.n_tokens else source.head(kv.nbytes), kv)
        except Exception as error:
            self.stats.failures += 1
            raise CopyFailedError(f"loading {owner_id} failed: {error}", owner_id=owner_id) from error
        entry.move(SliceState.LOADING)
        ticket = LoadTicket(owner_id, kv, entry, transfer)
        self._add(ticket)
        self.spiller.use_now(entry)
        self._verifier.check(ticket)  # Beside the copy.
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
        entry = entry_of(self._entries, ticket)
        self._wait(entry, ticket)
        wrong = self._verifier.damage(ticket, layout_hash)
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
        return ticket.forgotten or (ticket.done and self._verifier.check(ticket).done)

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
        entry = entry_of(self._entries, ticket)
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

    def wait_copies(self, owner_id: str) -> None:
        """Wait until no copy touches an owner's bytes: `forget` gives them back at once then."""
        entry = self._entries.get(owner_id)
        for transfer in entry.transfers if entry else ():
            with suppress(Exception):  # One that fails is over, too.
                transfer.wait()

    def collect(self) -> int:
        """Give back the bytes of forgotten slices whose copies are over. Cheap; call it once a step.

        Returns:
            Bytes given back.
        """
        for parked in list(self._copying):
            # An aborted load is of no use any more, but keeps its target on the device as long as we keep it.
            parked.transfers = [
                transfer
                for transfer in parked.transfers
                if not transfer.done() or (parked.ticket is not None and parked.ticket.transfer is transfer)
            ]
            if not parked.transfers:
                del self._copying[parked]
        self.spiller.settle()
        before = self.retiring_bytes
        self._retired.collect()
        return before - self.retiring_bytes

    def check_integrity(self) -> None:
        """Raise AssertionError where slices, pool and files contradict each other."""
        self.pool.check_integrity()
        self.spiller.check_integrity()
        self._retired.check_integrity()
        for owner_id, entry in self._entries.items():
            if entry.header.owner_id != owner_id:
                raise AssertionError(f"{owner_id} has a slice of {entry.header.owner_id}")
            check_entry(entry)
        held = sum(entry.pool_bytes for entry in self._entries.values()) + self.retiring_bytes
        if held != self.pool.used_bytes:
            raise AssertionError(f"slices hold {held} bytes, the pool has given {self.pool.used_bytes}")

    def close(self) -> None:
        """Wait for all copies, give all bytes back to the pool, remove all files; the pool stays open."""
        for owner_id in self.owners:
            self.forget(owner_id)
        self._retired.close()
        self._verifier.close()
        if self.spiller.tier is not None:
            self.spiller.tier.close()

    def _add(self, ticket: Ticket) -> None:
        ticket.entry.ticket = ticket
        ticket.entry.transfers.append(ticket.transfer)
        self._copying[ticket.entry] = None

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

    def _corrupt(self, entry: Entry, wrong: str) -> SliceCorruptError:
        entry.move(SliceState.CORRUPT)
        self.stats.corruptions += 1
        owner_id = entry.header.owner_id
        return SliceCorruptError(f"the parked slice of {owner_id}: {wrong}", owner_id=owner_id)

    def _lost(self, entry: Entry) -> SliceLostError:
        entry.move(SliceState.CORRUPT)
        owner_id = entry.header.owner_id
        return SliceLostError(f"the spilled slice of {owner_id}: {entry.lost}", owner_id=owner_id)

    def _retire(self, entry: Entry) -> None:
        """Take the slice from its owner; give its bytes back now, or after the last copy touching them."""
        entry.move(SliceState.GONE)
        del self._entries[entry.header.owner_id]
        self._copying.pop(entry, None)
        self._retired.add(entry)
