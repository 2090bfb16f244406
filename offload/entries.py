"""What the store keeps of every slice: its state, its bytes, the copies that touch them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batond.offload.errors import ForgottenError, OffloadStateError

if TYPE_CHECKING:
    from batond.offload.checks import Check
    from batond.offload.copies import Transfer
    from batond.offload.header import SliceHeader
    from batond.offload.pool import Reservation
    from batond.offload.slice import KVSlice
    from batond.offload.spill import SpillFile, SpillJob


class SliceState(enum.Enum):
    """Where the host copy of a slice stands, in the pool, in a file, or in both."""

    STORING = "storing"  # Being written; the source is the good copy.
    PARKED = "parked"  # The only good copy.
    LOADING = "loading"  # Being read; still the only good copy.
    LOADED = "loaded"  # A good copy beside the one on the device.
    CORRUPT = "corrupt"  # Not a copy of anything; waits to be discarded.
    GONE = "gone"


MOVES = {
    SliceState.STORING: {SliceState.PARKED, SliceState.GONE},
    SliceState.PARKED: {SliceState.LOADING, SliceState.GONE},
    SliceState.LOADING: {SliceState.LOADED, SliceState.PARKED, SliceState.CORRUPT, SliceState.GONE},
    SliceState.LOADED: {SliceState.LOADING, SliceState.GONE},
    SliceState.CORRUPT: {SliceState.GONE},
    SliceState.GONE: set(),
}


@dataclass(frozen=True, slots=True)
class ParkedSlice:
    """A host copy that is complete.

    Attributes:
        header: Whose, how many tokens, which layout.
        checksum: XXH3 over header and body.
    """

    header: SliceHeader
    checksum: int

    @property
    def nbytes(self) -> int:
        """Bytes it takes in the pool, while it is there."""
        return self.header.body_bytes


@dataclass(slots=True)
class StoreStats:
    """Counters since start.

    Attributes:
        stores: Slices parked.
        loads: Slices brought back.
        late_completions: Copies that ended after their slice was forgotten or aborted.
        corruptions: Slices that failed verification.
        aborted: Tickets taken back.
        failures: Copies that did not happen.
        bytes_out: Copied to host by completed stores.
        bytes_in: Copied to device by completed loads.
    """

    stores: int = 0
    loads: int = 0
    late_completions: int = 0
    corruptions: int = 0
    aborted: int = 0
    failures: int = 0
    bytes_out: int = 0
    bytes_in: int = 0


@dataclass(slots=True, eq=False)
class Entry:
    """One slice of the store, from its first copy until its bytes are given back. Internal to the store.

    Attributes:
        header: Whose, how many tokens, which layout.
        reservation: Its bytes in the pool; None while it is in a file alone.
        state: Changed by `move` only.
        sealed: Encoded header with checksum; empty until the store is finished.
        parked: What the sealed header must say; None until the store is finished.
        ticket: The copy under way, if any.
        transfers: All copies that may still touch the bytes, those of aborted tickets included.
        file: A complete copy on disk, if any.
        job: The write or read of a file under way, if any.
        arriving: Bytes of the pool that a read fills.
        lost: Why its file could not be read, and nothing of it is left; empty otherwise.
    """

    header: SliceHeader
    reservation: Reservation | None
    state: SliceState = SliceState.STORING
    sealed: bytearray = field(default_factory=bytearray)
    parked: ParkedSlice | None = None
    ticket: Ticket | None = None
    transfers: list[Transfer] = field(default_factory=list)
    file: SpillFile | None = None
    job: SpillJob | None = None
    arriving: Reservation | None = None
    lost: str = ""

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool that it takes."""
        return sum(held.nbytes for held in (self.reservation, self.arriving) if held is not None)

    @property
    def resting(self) -> bool:
        """Whether no copy between pool and device touches it, and none is to be expected."""
        still = self.ticket is None and self.state in {SliceState.PARKED, SliceState.LOADED}
        return still and all(transfer.done() for transfer in self.transfers)

    def held(self) -> Reservation:
        """Its bytes in the pool.

        Raises:
            OffloadStateError: They are in a file alone.
        """
        if self.reservation is None:
            raise OffloadStateError(f"the slice of {self.header.owner_id} is in a file alone")
        return self.reservation

    def move(self, state: SliceState) -> None:
        """Change the state: the one door."""
        if state not in MOVES[self.state]:
            raise OffloadStateError(
                f"the slice of {self.header.owner_id} is {self.state.value}, it can't become {state.value}",
                owner_id=self.header.owner_id,
                state=self.state.value,
            )
        self.state = state


@dataclass(slots=True, eq=False)
class Ticket:
    """A copy under way; goes into one `finish_*` or `abort`.

    Attributes:
        owner_id: The query.
        kv: The device side: source of a store, target of a load. Not to be touched before the finish.
        entry: Internal to the store, as the rest.
    """

    owner_id: str
    kv: KVSlice
    entry: Entry
    transfer: Transfer
    forgotten: bool = False
    check: Check | None = None

    @property
    def done(self) -> bool:
        """Whether the copy is over; the checksum may not be, see `ParkedStore.ready`."""
        return self.transfer.done()


class StoreTicket(Ticket):
    """A copy to host under way."""

    __slots__ = ()


class LoadTicket(Ticket):
    """A copy to device under way."""

    __slots__ = ()


def parked_entry(entries: dict[str, Entry], owner_id: str) -> Entry:
    """The entry of an owner, if it can be loaded.

    Raises:
        OffloadStateError: There is none, or a copy of it is under way.
    """
    entry = entries.get(owner_id)
    if entry is None or entry.state not in {SliceState.PARKED, SliceState.LOADED}:
        state = entry.state.value if entry else "not here"
        raise OffloadStateError(
            f"the slice of {owner_id} is {state}, it can't be loaded", owner_id=owner_id, state=state
        )
    return entry


def entry_of(entries: dict[str, Entry], ticket: Ticket) -> Entry:
    """The entry of a ticket that was not used yet.

    Raises:
        ForgottenError: The owner was forgotten meanwhile.
        OffloadStateError: The ticket was used before.
    """
    entry = ticket.entry
    if ticket.forgotten:
        raise ForgottenError(f"{ticket.owner_id} was forgotten meanwhile", owner_id=ticket.owner_id)
    if entry.ticket is not ticket or entries.get(ticket.owner_id) is not entry:
        raise OffloadStateError(
            f"the ticket of {ticket.owner_id} was finished or aborted before", owner_id=ticket.owner_id
        )
    return entry


def check_entry(entry: Entry) -> None:
    """Raise AssertionError where an entry that is in use contradicts itself."""
    owner_id, state = entry.header.owner_id, entry.state
    if state is SliceState.GONE:
        raise AssertionError(f"the slice of {owner_id} is gone, and is still here")
    if (state in {SliceState.STORING, SliceState.LOADING}) != (entry.ticket is not None):
        raise AssertionError(f"{owner_id} is {state.value}, its ticket is {entry.ticket}")
    if entry.reservation is not None and entry.header.body_bytes != entry.reservation.nbytes:
        raise AssertionError(f"{owner_id} has {entry.reservation.nbytes} bytes for {entry.header}")
    if entry.reservation is None and entry.file is None and not entry.lost:
        raise AssertionError(f"nothing is left of the slice of {owner_id}")
