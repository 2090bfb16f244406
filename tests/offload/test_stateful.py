"""Random lives of reservations and slices against simple models."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from batond.offload.entries import SliceState, StoreTicket
from batond.offload.errors import (
    CopyFailedError,
    ForgottenError,
    HostPoolFullError,
    OffloadStateError,
    SliceLostError,
)
from batond.offload.pool import HostPool
from batond.offload.store import ParkedStore

if TYPE_CHECKING:
    from batond.offload.entries import Entry, Ticket
    from batond.offload.pool import Reservation
    from batond.offload.slice import KVSlice

CAPACITY_BYTES = 3001
SETTINGS = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
PICK = st.integers(0, 1 << 16)


class PoolMachine(RuleBasedStateMachine):
    """A pool against a list of (reservation, the number written into all of its bytes)."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = HostPool(CAPACITY_BYTES, chunk_bytes=256)
        self.held: list[tuple[Reservation, int]] = []
        self.dead: list[Reservation] = []
        self.number = 0

    @rule(nbytes=st.one_of(st.integers(0, 200), st.integers(0, CAPACITY_BYTES + 1)))
    def reserve(self, nbytes: int) -> None:
        free = CAPACITY_BYTES - sum(reservation.nbytes for reservation, _ in self.held)
        if nbytes > free:
            with pytest.raises(HostPoolFullError):
                self.pool.reserve(nbytes)
            return
        self.number = (self.number + 1) % 256
        reservation = self.pool.reserve(nbytes)
        for view in reservation.views():
            view.fill_(self.number)
        self.held.append((reservation, self.number))

    @precondition(lambda self: self.held)
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        reservation, _ = self.held.pop(pick % len(self.held))
        self.pool.release(reservation)
        self.dead.append(reservation)

    @precondition(lambda self: self.dead)
    @rule(pick=PICK)
    def release_twice(self, pick: int) -> None:
        with pytest.raises(OffloadStateError):
            self.pool.release(self.dead[pick % len(self.dead)])

    @rule()
    def warm_up(self) -> None:
        self.pool.warm_up().join(30)

    @invariant()
    def everybody_keeps_its_bytes(self) -> None:
        self.pool.check_integrity()
        for reservation, number in self.held:
            views = reservation.views()
            assert sum(view.numel() for view in views) == reservation.nbytes
            assert all(bool((view == number).all()) for view in views)

    def teardown(self) -> None:
        for reservation, _ in self.held:
            self.pool.release(reservation)
        assert self.pool.free_bytes == CAPACITY_BYTES
        self.pool.close()


class StoreMachine(RuleBasedStateMachine):
    """A store with copies that end whenever they like, or die, against a dictionary of slices.

    Args:
        copier: Its copies wait for the machine.
        make_kv: Factory of slices.
    """

    def __init__(self, copier: Any, make_kv: Any) -> None:
        super().__init__()
        self.copier = copier
        self.make_kv = make_kv
        self.store = self._new_store()
        self.names: dict[str, tuple[str, int]] = {}  # Owner to the pattern and length of its slice.
        self.sources: dict[str, KVSlice] = {}
        self.open: list[Ticket] = []
        self.closed: list[Ticket] = []
        self.count = 0

    def _new_store(self, tier: Any = None) -> ParkedStore:
        return ParkedStore(HostPool(CAPACITY_BYTES, chunk_bytes=256), self.copier, poison=True, tier=tier)

    def _expected(self, owner: str) -> torch.Tensor:
        kv = self.make_kv(*self.names[owner])
        return torch.cat([kv.tokens.view(-1), kv.state])

    def _take(self, pick: int, tickets: list[Ticket]) -> Ticket:
        ticket = tickets[pick % len(tickets)]
        self.open.remove(ticket)
        self.closed.append(ticket)
        return ticket

    def _drop(self, owner: str) -> None:
        del self.names[owner]
        self.sources.pop(owner, None)

    @rule(owner=st.sampled_from("abcdef"), n_tokens=st.integers(0, 30))
    def begin_store(self, owner: str, n_tokens: int) -> None:
        self.count += 1
        pattern = f"{owner}{self.count}"
        kv = self.make_kv(pattern, n_tokens)
        if owner in self.names:
            with pytest.raises(OffloadStateError):
                self.store.begin_store(owner, kv, "layout")
            return
        self.store.collect()
        fits = kv.nbytes <= self.store.room_bytes
        try:
            ticket = self.store.begin_store(owner, kv, "layout")
        except HostPoolFullError:
            assert not fits
            return
        assert fits
        self.names[owner], self.sources[owner] = (pattern, n_tokens), kv
        self.open.append(ticket)

    @precondition(lambda self: any(isinstance(ticket, StoreTicket) for ticket in self.open))
    @rule(pick=PICK)
    def finish_store(self, pick: int) -> None:
        ticket = self._take(pick, [ticket for ticket in self.open if isinstance(ticket, StoreTicket)])
        assert isinstance(ticket, StoreTicket)
        try:
            self.store.finish_store(ticket)
        except CopyFailedError:
            self._drop(ticket.owner_id)
        else:
            del self.sources[ticket.owner_id]

    @rule(owner=st.sampled_from("abcdef"))
    def begin_load(self, owner: str) -> None:
        entry = self.store._entries.get(owner)
        if entry is None or entry.ticket is not None:
            with pytest.raises(OffloadStateError):
                self.store.begin_load(owner, "cpu")
            return
        self._begin_load(owner)

    def _begin_load(self, owner: str) -> None:
        self.open.append(self.store.begin_load(owner, "cpu"))

    @precondition(lambda self: any(not isinstance(ticket, StoreTicket) for ticket in self.open))
    @rule(pick=PICK)
    def finish_load(self, pick: int) -> None:
        ticket: Any = self._take(
            pick, [ticket for ticket in self.open if not isinstance(ticket, StoreTicket)]
        )
        try:
            kv = self.store.finish_load(ticket)
        except CopyFailedError:
            return
        assert torch.equal(torch.cat([kv.tokens.view(-1), kv.state]), self._expected(ticket.owner_id))

    @rule(owner=st.sampled_from("abcdef"))
    def discard(self, owner: str) -> None:
        entry = self.store._entries.get(owner)
        if entry is None or entry.state is not SliceState.LOADED:
            with pytest.raises(OffloadStateError):
                self.store.discard(owner)
            return
        self.store.discard(owner)
        self._drop(owner)

    @precondition(lambda self: self.open)
    @rule(pick=PICK)
    def abort(self, pick: int) -> None:
        ticket = self._take(pick, self.open)
        self.store.abort(ticket)
        if isinstance(ticket, StoreTicket):
            self._drop(ticket.owner_id)

    @rule(owner=st.sampled_from("abcdef"))
    def forget(self, owner: str) -> None:
        assert self.store.forget(owner) == (owner in self.names)
        if owner in self.names:
            self._drop(owner)
        late = [ticket for ticket in self.open if ticket.owner_id == owner]
        for ticket in late:
            self.open.remove(ticket)
            with pytest.raises(ForgottenError):
                self.store.abort(ticket)

    @precondition(lambda self: self.closed)
    @rule(pick=PICK)
    def use_a_ticket_twice(self, pick: int) -> None:
        with pytest.raises(OffloadStateError):
            self.store.abort(self.closed[pick % len(self.closed)])

    @precondition(lambda self: self.copier.transfers)
    @rule(pick=PICK)
    def a_copy_ends(self, pick: int) -> None:
        self.copier.transfers.pop(pick % len(self.copier.transfers)).complete()

    @precondition(lambda self: self.copier.transfers)
    @rule(pick=PICK)
    def a_copy_dies(self, pick: int) -> None:
        transfer = self.copier.transfers.pop(pick % len(self.copier.transfers))
        if not transfer.done():
            transfer._fails = True
            transfer.complete()

    @invariant()
    def a_good_copy_of_every_slice_exists(self) -> None:
        self.store.check_integrity()
        assert set(self.store.owners) == set(self.names)
        for owner, entry in self.store._entries.items():
            if entry.state is SliceState.STORING:
                source = self.sources[owner]
                found = torch.cat([source.tokens.view(-1), source.state])
            elif entry.reservation is None:
                self._in_a_file(owner, entry)
                continue
            else:
                found = torch.cat([*entry.reservation.views(), torch.empty(0, dtype=torch.uint8)])
            assert torch.equal(found, self._expected(owner)), (owner, entry.state)

    def _in_a_file(self, owner: str, entry: Entry) -> None:
        raise AssertionError(f"nothing is left of {owner}: {entry}")

    def teardown(self) -> None:
        for owner in tuple(self.names):
            self.store.forget(owner)
        for transfer in self.copier.transfers:
            transfer.complete()
        self._finish()
        self.store.collect()
        assert (self.store.pool.used_bytes, self.store.retiring_bytes) == (0, 0)
        self.store.close()
        self.store.pool.close()

    def _finish(self) -> None:
        """Let everything else happen that is under way."""


class SpillMachine(StoreMachine):
    """The same with files, written and read whenever the machine likes, on a disk that fails and lies.

    Args:
        copier: As above.
        make_kv: As above.
        later_tier: Factory of tiers whose jobs wait for the machine.
    """

    def __init__(self, copier: Any, make_kv: Any, later_tier: Any) -> None:
        self.tier, self.folder, self.jobs = later_tier(5 * 8192)
        self.broken: set[str] = set()  # Files that can't be read as they were written.
        super().__init__(copier, make_kv)

    def _new_store(self, tier: Any = None) -> ParkedStore:
        return super()._new_store(tier or self.tier)

    def _begin_load(self, owner: str) -> None:
        entry = self.store._entries[owner]
        away, room = entry.reservation is None, self.store.room_bytes
        try:
            super()._begin_load(owner)
        except HostPoolFullError:
            assert away
            assert entry.arriving is None
            assert entry.header.body_bytes > room
        except SliceLostError:
            assert away
            assert entry.lost
            self.store.discard(owner)
            self._drop(owner)

    @rule(owner=st.sampled_from("abcdef"))
    def begin_spill(self, owner: str) -> None:
        entry = self.store._entries.get(owner)
        able = (
            entry is not None
            and entry.reservation is not None
            and (entry.file, entry.job) == (None, None)
            and entry.resting
            and entry.header.body_bytes > 0
            and self.tier.free_bytes >= 8192
        )
        assert self.store.spiller.begin_write(owner) == able

    @rule(owner=st.sampled_from("abcdef"))
    def begin_fetch(self, owner: str) -> None:
        entry = self.store._entries.get(owner)
        away = entry is not None and entry.reservation is None and entry.file is not None
        try:
            assert self.store.spiller.begin_fetch(owner) == away
        except HostPoolFullError:
            assert away
            assert entry is not None
            assert entry.header.body_bytes > self.store.room_bytes

    @precondition(lambda self: self.jobs.jobs)
    @rule(pick=PICK, fault=st.sampled_from([0, 0, 0, errno.EIO, errno.ENOSPC]))
    def a_job_runs(self, pick: int, fault: int) -> None:
        self.folder.fault = fault
        self.jobs.jobs.pop(pick % len(self.jobs.jobs)).run()
        self.folder.fault = 0

    @precondition(lambda self: self.folder.files)
    @rule(pick=PICK, place=PICK, away=st.booleans())
    def a_file_breaks(self, pick: int, place: int, *, away: bool) -> None:
        """In its header, which is noticed when it is read; its body is what checksums are for."""
        name = list(self.folder.files)[pick % len(self.folder.files)]
        if name.endswith(".part"):
            return
        self.broken.add(name)
        if away:
            del self.folder.files[name]
        else:
            self.folder.files[name][place % 50] ^= 1

    @rule()
    def somebody_needs_room(self) -> None:
        room = self.store.room_bytes
        self.store.pool.release(self.store.spiller.reserve(room))
        assert self.store.pool.free_bytes == room

    @rule()
    def the_disk_has_rested(self) -> None:
        self.tier._rested_s = -1.0

    def _in_a_file(self, owner: str, entry: Entry) -> None:
        if entry.lost:
            return
        assert entry.file is not None
        if entry.file.name not in self.broken:
            body = self.folder.files[entry.file.name][4096 : 4096 + entry.file.body_bytes]
            assert torch.equal(torch.frombuffer(body, dtype=torch.uint8).clone(), self._expected(owner))

    def _finish(self) -> None:
        self.jobs.shutdown(wait=True)
        self.store.collect()
        self.jobs.shutdown(wait=True)  # Files of writes that were complete before they heard of their end.
        use = self.store.spill_use
        assert (self.folder.files, use.used_bytes, use.files) == ({}, 0, 0)


def test_pool_against_its_model() -> None:
    """M2."""
    run_state_machine_as_test(PoolMachine, settings=SETTINGS)


def test_store_against_its_model(delayed: Any, make_kv: Any) -> None:
    """R4, R5, M5, C3: never zero good copies, whatever ends when."""
    run_state_machine_as_test(lambda: StoreMachine(type(delayed)(), make_kv), settings=SETTINGS)


def test_store_with_files_against_its_model(delayed: Any, make_kv: Any, later_tier: Any) -> None:
    """R4, R6, M5: the same with a second tier: a good copy here or there, whatever the disk does."""
    run_state_machine_as_test(lambda: SpillMachine(type(delayed)(), make_kv, later_tier), settings=SETTINGS)
