"""Random lives of reservations and slices against simple models."""

from __future__ import annotations

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
from batond.offload.errors import CopyFailedError, ForgottenError, HostPoolFullError, OffloadStateError
from batond.offload.pool import HostPool
from batond.offload.store import ParkedStore

if TYPE_CHECKING:
    from batond.offload.entries import Ticket
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
        self.store = ParkedStore(HostPool(CAPACITY_BYTES, chunk_bytes=256), copier, poison=True)
        self.names: dict[str, tuple[str, int]] = {}  # Owner to the pattern and length of its slice.
        self.sources: dict[str, KVSlice] = {}
        self.open: list[Ticket] = []
        self.closed: list[Ticket] = []
        self.count = 0

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
        fits = kv.nbytes <= self.store.pool.free_bytes
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
            else:
                found = torch.cat([*entry.reservation.views(), torch.empty(0, dtype=torch.uint8)])
            assert torch.equal(found, self._expected(owner)), (owner, entry.state)

    def teardown(self) -> None:
        for owner in tuple(self.names):
            self.store.forget(owner)
        for transfer in self.copier.transfers:
            transfer.complete()
        self.store.collect()
        assert (self.store.pool.used_bytes, self.store.retiring_bytes) == (0, 0)
        self.store.close()
        self.store.pool.close()


def test_pool_against_its_model() -> None:
    """M2."""
    run_state_machine_as_test(PoolMachine, settings=SETTINGS)


def test_store_against_its_model(delayed: Any, make_kv: Any) -> None:
    """R4, R5, M5, C3: never zero good copies, whatever ends when."""
    run_state_machine_as_test(lambda: StoreMachine(type(delayed)(), make_kv), settings=SETTINGS)
