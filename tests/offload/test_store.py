"""Parked slices: both phases in both directions, roll-back, cancel, damage."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch

from batond.offload.entries import SliceState
from batond.offload.errors import (
    CopyFailedError,
    ForgottenError,
    HostPoolFullError,
    OffloadStateError,
    SliceCorruptError,
)
from batond.offload.poison import POISON
from batond.offload.slice import KVSlice

if TYPE_CHECKING:
    from batond.offload.store import ParkedStore

LAYOUT = "layout-0"
SLICE_BYTES = 5 * 48 + 40


def park(store: ParkedStore, owner: str, kv: KVSlice) -> None:
    store.finish_store(store.begin_store(owner, kv, LAYOUT))


def load(store: ParkedStore, owner: str) -> KVSlice:
    return store.finish_load(store.begin_load(owner, "cpu"))


def poisoned(kv: KVSlice) -> bool:
    return bool((kv.tokens == POISON).all() and (kv.state == POISON).all())


def test_what_is_parked_comes_back(make_store: Any, make_kv: Any, same: Any) -> None:
    store = make_store()
    kv = make_kv("a", 100)
    parked = store.finish_store(store.begin_store("a", kv, LAYOUT))
    assert parked.nbytes == store.parked_bytes("a") == 100 * 48 + 40 == store.pool.used_bytes
    assert (parked.header.owner_id, parked.header.n_tokens, parked.header.layout_hash) == ("a", 100, LAYOUT)
    assert same(load(store, "a"), make_kv("a", 100))
    assert store.parked_bytes("a") == parked.nbytes
    store.discard("a")
    assert store.pool.used_bytes == store.parked_bytes("a") == 0
    assert (store.stats.stores, store.stats.loads) == (1, 1)
    assert store.stats.bytes_out == store.stats.bytes_in == parked.nbytes


@pytest.mark.parametrize(("n_tokens", "state_bytes"), [(0, 0), (0, 24), (1, 0), (333, 7)])
def test_slices_of_every_shape(
    make_store: Any, make_kv: Any, same: Any, n_tokens: int, state_bytes: int
) -> None:
    """R10: a slice of nothing is legal and takes nothing."""
    store = make_store(chunk_bytes=77)
    kv = make_kv("a", n_tokens, state_bytes=state_bytes)
    park(store, "a", kv)
    back = load(store, "a")
    assert back.tokens.shape == (n_tokens, 48)
    assert same(back, make_kv("a", n_tokens, state_bytes=state_bytes))
    store.discard("a")


@pytest.mark.parametrize("first_tokens", [0, 1, 2, 7, 30])
def test_the_oldest_records_can_be_had_alone(make_store: Any, make_kv: Any, first_tokens: int) -> None:
    """Over chunk borders and several extents; the host copy stays whole."""
    store = make_store(48 * 60, chunk_bytes=77)
    for owner in ("left", "middle", "right"):
        park(store, owner, make_kv(owner, 10, state_bytes=0))
    store.forget("left")
    store.forget("right")
    park(store, "a", make_kv("a", 30, state_bytes=0))
    store.forget("middle")
    ticket = store.begin_load("a", "cpu", first_tokens=first_tokens)
    back = store.finish_load(ticket)
    assert torch.equal(back.tokens, make_kv("a", 30, state_bytes=0).tokens[:first_tokens])
    assert store.stats.bytes_in == first_tokens * 48
    assert torch.equal(load(store, "a").tokens, make_kv("a", 30, state_bytes=0).tokens)


def test_records_without_their_state_are_refused(make_store: Any, make_kv: Any, same: Any) -> None:
    store = make_store()
    park(store, "a", make_kv("a"))
    park(store, "b", make_kv("b", state_bytes=0))
    for owner, first_tokens in (("a", 4), ("a", 6), ("b", 6), ("b", -1)):
        with pytest.raises(ValueError, match="can't be had alone"):
            store.begin_load(owner, "cpu", first_tokens=first_tokens)
    assert same(load(store, "a"), make_kv("a")), "nothing has changed"


def test_damage_behind_the_records_asked_for_is_found(make_store: Any, make_kv: Any) -> None:
    """R6: the checksum is over all of the slice."""
    store = make_store()
    park(store, "a", make_kv("a", state_bytes=0))
    store._entries["a"].reservation.views()[-1][-1] ^= 1
    with pytest.raises(SliceCorruptError, match="checksum"):
        store.finish_load(store.begin_load("a", "cpu", first_tokens=1))
    store.discard("a")


def test_each_owner_reads_only_its_own_bytes(make_store: Any, make_kv: Any, same: Any) -> None:
    """R4."""
    chance = random.Random(4)
    store = make_store(20_000, chunk_bytes=700)
    lengths: dict[str, int] = {}
    for round_number in range(1500):
        owner = f"q{chance.randrange(40)}"
        if owner not in lengths:
            lengths[owner] = chance.randrange(0, 40)
            try:
                park(store, owner, make_kv(owner, lengths[owner]))
            except HostPoolFullError:
                del lengths[owner]
        else:
            assert same(load(store, owner), make_kv(owner, lengths.pop(owner))), round_number
            store.discard(owner)
        store.check_integrity()
    assert store.stats.loads > 500
    assert max(len(entry.reservation.extents) for entry in store._entries.values()) > 1


def test_nothing_is_published_or_given_back_before_its_copy_is_over(
    make_store: Any, make_kv: Any, same: Any, delayed: Any
) -> None:
    """R5."""
    store = make_store(copier=delayed)
    kv = make_kv("a")
    ticket = store.begin_store("a", kv, LAYOUT)
    assert not ticket.done
    assert same(kv, make_kv("a")), "the source is the only good copy"
    assert set(torch.cat(store._entries["a"].reservation.views()).tolist()) == {POISON}
    with pytest.raises(OffloadStateError, match="storing"):
        store.begin_load("a", "cpu")
    with pytest.raises(OffloadStateError, match="storing"):
        store.discard("a")
    delayed.complete_all()
    assert ticket.done
    store.finish_store(ticket)
    assert poisoned(kv), "a stale read of the source must show"

    incoming = store.begin_load("a", "cpu")
    assert poisoned(incoming.kv)
    with pytest.raises(OffloadStateError, match="loading"):
        store.discard("a")
    back = store.finish_load(incoming)
    assert delayed.transfers[-1].waits == 1
    assert same(back, make_kv("a"))
    views = store._entries["a"].reservation.views()
    store.discard("a")
    assert set(torch.cat(views).tolist()) == {POISON}


def test_delays_in_any_order_change_nothing(make_store: Any, make_kv: Any, same: Any, delayed: Any) -> None:
    """R5: many copies under way, ended in shuffled order."""
    chance = random.Random(5)
    store = make_store(copier=delayed)
    names = [f"q{number}" for number in range(20)]
    tickets = {name: store.begin_store(name, make_kv(name, 9), LAYOUT) for name in names}
    chance.shuffle(delayed.transfers)
    for transfer in delayed.transfers[:10]:
        transfer.complete()
    for name in chance.sample(names, 20):
        store.finish_store(tickets[name])
    loads = {name: store.begin_load(name, "cpu") for name in chance.sample(names, 20)}
    for transfer in chance.sample(delayed.transfers, 30):
        transfer.complete()
    for name in chance.sample(names, 20):
        assert same(store.finish_load(loads[name]), make_kv(name, 9))
        store.discard(name)
    assert store.pool.used_bytes == 0


@pytest.mark.parametrize("seed", range(60))
def test_a_flipped_bit_in_the_body_is_found(make_store: Any, make_kv: Any, same: Any, seed: int) -> None:
    """R6."""
    chance = random.Random(seed)
    store = make_store(chunk_bytes=100)
    park(store, "a", make_kv("a"))
    park(store, "b", make_kv("b"))
    body = store._entries["a"].reservation.views()
    at = chance.randrange(SLICE_BYTES)
    if seed < 2:  # the very first and the very last byte
        at = [0, SLICE_BYTES - 1][seed]
    for view in body:
        if at < view.numel():
            view[at] ^= 1 << chance.randrange(8)
            break
        at -= view.numel()
    ticket = store.begin_load("a", "cpu")
    with pytest.raises(SliceCorruptError, match="checksum") as caught:
        store.finish_load(ticket)
    assert caught.value.details["owner_id"] == "a"
    assert poisoned(ticket.kv)
    assert store.stats.corruptions == 1
    with pytest.raises(OffloadStateError, match="corrupt"):
        store.begin_load("a", "cpu")
    store.discard("a")
    assert same(load(store, "b"), make_kv("b")), "others are unaffected"


def test_every_flipped_bit_in_the_header_is_found(make_store: Any, make_kv: Any) -> None:
    """R6."""
    store = make_store()
    park(store, "a", make_kv("a"))
    bits = len(store._entries["a"].sealed) * 8
    store.forget("a")
    for bit in range(bits):
        park(store, "a", make_kv("a"))
        store._entries["a"].sealed[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(SliceCorruptError):
            load(store, "a")
        store.discard("a")
    assert store.stats.corruptions == bits


@pytest.mark.parametrize("length", [0, 3, 8, 39, 40])
def test_a_cut_header_is_found(make_store: Any, make_kv: Any, length: int) -> None:
    """R6."""
    store = make_store()
    park(store, "a", make_kv("a"))
    del store._entries["a"].sealed[length:]
    with pytest.raises(SliceCorruptError):
        load(store, "a")


def test_the_slice_of_another_owner_is_never_read(make_store: Any, make_kv: Any) -> None:
    """R6: two slices swapped as a whole, each in itself sound."""
    store = make_store()
    park(store, "a", make_kv("a"))
    park(store, "b", make_kv("b"))
    a, b = store._entries["a"], store._entries["b"]
    a.sealed, b.sealed = b.sealed, a.sealed
    a.reservation, b.reservation = b.reservation, a.reservation
    with pytest.raises(SliceCorruptError, match="doesn't belong to a"):
        load(store, "a")


def test_a_slice_of_another_layout_is_never_read(make_store: Any, make_kv: Any) -> None:
    """R6."""
    store = make_store()
    park(store, "a", make_kv("a"))
    with pytest.raises(SliceCorruptError, match="layout"):
        store.begin_load("a", "cpu", layout_hash="layout-1")
    store.discard("a")
    park(store, "a", make_kv("a"))
    store.finish_load(store.begin_load("a", "cpu", layout_hash=LAYOUT))


def test_without_verification_the_header_is_checked_all_the_same(
    make_store: Any, make_kv: Any, same: Any
) -> None:
    store = make_store()
    store._verifier._checksums = False
    park(store, "a", make_kv("a"))
    assert same(load(store, "a"), make_kv("a"))
    store._entries["a"].sealed[9] ^= 1
    with pytest.raises(SliceCorruptError):
        load(store, "a")


def test_a_pool_of_one_slice_serves_one_owner_after_the_other(
    make_store: Any, make_kv: Any, same: Any
) -> None:
    """M1, at the store: further parks are refused without a trace, and succeed once there is room."""
    store = make_store(SLICE_BYTES, chunk_bytes=64)
    park(store, "a", make_kv("a"))
    for owner in ("b", "c"):
        kv = make_kv(owner)
        with pytest.raises(HostPoolFullError):
            store.begin_store(owner, kv, LAYOUT)
        assert same(kv, make_kv(owner))
        assert store.parked_bytes(owner) == 0
    for owner, following in (("a", "b"), ("b", "c")):
        assert same(load(store, owner), make_kv(owner))
        store.discard(owner)
        park(store, following, make_kv(following))
    assert same(load(store, "c"), make_kv("c"))
    assert store.owners == ("c",)


def test_one_slice_an_owner(make_store: Any, make_kv: Any, same: Any) -> None:
    store = make_store()
    park(store, "a", make_kv("a"))
    with pytest.raises(OffloadStateError, match="already"):
        store.begin_store("a", make_kv("other"), LAYOUT)
    assert same(load(store, "a"), make_kv("a"))


def test_the_only_good_copy_is_not_discarded(make_store: Any, make_kv: Any, same: Any) -> None:
    store = make_store()
    with pytest.raises(OffloadStateError, match="not here"):
        store.discard("a")
    with pytest.raises(OffloadStateError, match="not here"):
        store.begin_load("a", "cpu")
    park(store, "a", make_kv("a"))
    with pytest.raises(OffloadStateError, match="parked"):
        store.discard("a")
    assert same(load(store, "a"), make_kv("a"))
    assert same(load(store, "a"), make_kv("a")), "an embed that failed can be tried again"
    store.discard("a")


def test_only_contiguous_bytes_are_taken(make_store: Any) -> None:
    store = make_store()
    state = torch.empty(0, dtype=torch.uint8)
    for tokens in (
        torch.zeros(4, 8, dtype=torch.float16),
        torch.zeros(32, dtype=torch.uint8),
        torch.zeros(4, 16, dtype=torch.uint8)[:, ::2],
    ):
        with pytest.raises(ValueError, match="contiguous uint8"):
            store.begin_store("a", KVSlice(tokens, state), LAYOUT)
    assert store.pool.used_bytes == 0


def test_a_ticket_is_good_for_one_end(make_store: Any, make_kv: Any) -> None:
    store = make_store()
    ticket = store.begin_store("a", make_kv("a"), LAYOUT)
    store.finish_store(ticket)
    for use in (store.finish_store, store.abort):
        with pytest.raises(OffloadStateError, match="finished or aborted"):
            use(ticket)
    incoming = store.begin_load("a", "cpu")
    store.abort(incoming)
    for again in (store.finish_load, store.abort):
        with pytest.raises(OffloadStateError, match="finished or aborted"):
            again(incoming)


def test_an_aborted_store_leaves_nothing(make_store: Any, make_kv: Any, same: Any) -> None:
    store = make_store()
    kv = make_kv("a")
    store.abort(store.begin_store("a", kv, LAYOUT))
    assert same(kv, make_kv("a"))
    assert (store.pool.used_bytes, store.stats.aborted, store.stats.stores) == (0, 1, 0)
    park(store, "a", kv)


def test_an_aborted_store_keeps_its_bytes_until_the_copy_is_over(
    make_store: Any, make_kv: Any, same: Any, delayed: Any
) -> None:
    store = make_store(SLICE_BYTES, delayed)
    store.abort(store.begin_store("a", make_kv("a"), LAYOUT))
    assert store.parked_bytes("a") == 0
    assert store.retiring_bytes == store.pool.used_bytes == SLICE_BYTES
    with pytest.raises(HostPoolFullError):
        store.begin_store("a", make_kv("b"), LAYOUT)
    delayed.complete_all()
    park(store, "a", make_kv("b"))
    assert same(load(store, "a"), make_kv("b"))
    assert store.stats.late_completions == 1


def test_an_aborted_load_leaves_the_slice_parked(
    make_store: Any, make_kv: Any, same: Any, delayed: Any
) -> None:
    store = make_store(copier=delayed)
    park(store, "a", make_kv("a"))
    first = store.begin_load("a", "cpu")
    store.abort(first)
    assert store._entries["a"].state is SliceState.PARKED
    with pytest.raises(OffloadStateError, match="parked"):
        store.discard("a")
    assert same(load(store, "a"), make_kv("a"))
    store.discard("a")
    assert store.pool.used_bytes == SLICE_BYTES, "the aborted copy still reads them"
    first.transfer.complete()
    assert store.collect() == SLICE_BYTES
    assert same(first.kv, make_kv("a"))
    assert store.pool.used_bytes == 0


def test_an_aborted_load_keeps_nothing_once_its_copy_is_over(
    make_store: Any, make_kv: Any, delayed: Any
) -> None:
    store = make_store(copier=delayed)
    park(store, "a", make_kv("a"))
    for _ in range(3):
        store.abort(store.begin_load("a", "cpu"))
    still_open = store.begin_load("a", "cpu")
    delayed.complete_all()
    assert store.collect() == 0
    assert store._entries["a"].transfers == [still_open.transfer]
    store.finish_load(still_open)
    assert store._entries["a"].transfers == []


def test_a_store_whose_copy_does_not_start_leaves_nothing(
    make_store: Any, make_kv: Any, same: Any, failing: Any
) -> None:
    store = make_store(copier=failing(0))
    kv = make_kv("a")
    with pytest.raises(CopyFailedError, match="on fire"):
        store.begin_store("a", kv, LAYOUT)
    assert same(kv, make_kv("a"))
    assert (store.pool.used_bytes, store.parked_bytes("a"), store.stats.failures) == (0, 0, 1)


def test_a_load_whose_copy_does_not_start_leaves_the_slice_parked(
    make_store: Any, make_kv: Any, same: Any, failing: Any
) -> None:
    copier = failing(1)
    store = make_store(copier=copier)
    park(store, "a", make_kv("a"))
    with pytest.raises(CopyFailedError):
        store.begin_load("a", "cpu")
    copier.left = 1
    assert same(load(store, "a"), make_kv("a"))


def test_a_store_whose_copy_dies_leaves_the_source(
    make_store: Any, make_kv: Any, same: Any, delayed: Any
) -> None:
    """M5."""
    store = make_store(copier=delayed)
    delayed.fails = True
    kv = make_kv("a")
    ticket = store.begin_store("a", kv, LAYOUT)
    with pytest.raises(CopyFailedError, match="died"):
        store.finish_store(ticket)
    assert same(kv, make_kv("a"))
    assert (store.pool.used_bytes, store.parked_bytes("a")) == (0, 0)
    delayed.fails = False
    park(store, "a", kv)


def test_a_load_whose_copy_dies_leaves_the_slice_parked(
    make_store: Any, make_kv: Any, same: Any, delayed: Any
) -> None:
    """M5."""
    store = make_store(copier=delayed)
    park(store, "a", make_kv("a"))
    delayed.fails = True
    ticket = store.begin_load("a", "cpu")
    with pytest.raises(CopyFailedError):
        store.finish_load(ticket)
    delayed.fails = False
    assert same(load(store, "a"), make_kv("a"))


def test_no_room_on_the_device_leaves_the_slice_parked(
    make_store: Any, make_kv: Any, same: Any, monkeypatch: Any
) -> None:
    store = make_store()
    park(store, "a", make_kv("a"))

    def refuse(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("batond.offload.store.torch.empty", refuse)
        with pytest.raises(torch.OutOfMemoryError):
            store.begin_load("a", "cpu")
    assert same(load(store, "a"), make_kv("a"))


def test_forgetting_is_legal_at_any_time(make_store: Any, make_kv: Any) -> None:
    store = make_store()
    assert not store.forget("a")
    for begun in ("stored", "parked", "loading", "loaded"):
        ticket = store.begin_store("a", make_kv("a"), LAYOUT)
        if begun != "stored":
            store.finish_store(ticket)
        if begun in {"loading", "loaded"}:
            incoming = store.begin_load("a", "cpu")
            if begun == "loaded":
                store.finish_load(incoming)
        assert store.forget("a"), begun
        assert not store.forget("a")
        assert (store.pool.used_bytes, store.owners) == (0, ()), begun
        store.check_integrity()
    assert store.stats.late_completions == 0


def test_cancel_while_a_copy_is_in_flight(make_store: Any, make_kv: Any, same: Any, delayed: Any) -> None:
    """C3."""
    store = make_store(4 * SLICE_BYTES, delayed, chunk_bytes=512)
    park(store, "bystander", make_kv("bystander"))
    chance = random.Random(3)
    for number in range(500):
        owner = f"q{number}"
        loading = number % 2
        if loading:
            park(store, owner, make_kv(owner))
            ticket = store.begin_load(owner, "cpu")
        else:
            ticket = store.begin_store(owner, make_kv(owner), LAYOUT)
        flight = delayed.transfers[-1]
        assert store.forget(owner)
        assert flight.waits == 0, "cancelling never waits"
        assert (store.parked_bytes(owner), store.retiring_bytes) == (0, SLICE_BYTES)
        taken = {at for view in store._retired.entries[0].reservation.views() for at in [view.data_ptr()]}
        with pytest.raises(ForgottenError):
            (store.finish_load if loading else store.finish_store)(ticket)
        if chance.random() < 0.5:  # The same id at once again: it must not get the memory under way.
            park(store, owner, make_kv("again"))
            assert not taken & {view.data_ptr() for view in store._entries[owner].reservation.views()}
        flight.complete()
        assert store.stats.late_completions == number
        assert store.collect() == SLICE_BYTES
        assert store.stats.late_completions == number + 1
        if store.parked_bytes(owner):
            assert same(load(store, owner), make_kv("again"))
            store.discard(owner)
        store.check_integrity()
        assert store.pool.used_bytes == SLICE_BYTES
    assert same(load(store, "bystander"), make_kv("bystander"))


def test_close_waits_for_what_is_in_flight(make_store: Any, make_kv: Any, delayed: Any) -> None:
    store = make_store(copier=delayed)
    park(store, "a", make_kv("a"))
    store.begin_load("a", "cpu")
    store.begin_store("b", make_kv("b"), LAYOUT)
    delayed.fails = True
    store.begin_store("c", make_kv("c"), LAYOUT)
    store.close()
    assert all(transfer.done() for transfer in delayed.transfers)
    assert (store.pool.used_bytes, store.owners, store.stats.late_completions) == (0, (), 3)
    store.close()
    store.pool.close()


def test_integrity_finds_what_is_wrong(make_store: Any, make_kv: Any) -> None:
    store = make_store()
    park(store, "a", make_kv("a"))
    stray = store.pool.reserve(7)
    with pytest.raises(AssertionError, match="slices hold"):
        store.check_integrity()
    store.pool.release(stray)
    store._entries["b"] = store._entries["a"]
    with pytest.raises(AssertionError, match="b has a slice of a"):
        store.check_integrity()
    del store._entries["b"]


def test_cycles_of_every_ending_leave_nothing(make_store: Any, make_kv: Any, delayed: Any) -> None:
    """M5."""
    store = make_store(1 << 20, delayed, chunk_bytes=1 << 16)
    process = psutil.Process()

    def cycle(number: int) -> None:
        owner = f"q{number}"
        ending = number % 6
        delayed.fails = ending == 5
        ticket = store.begin_store(owner, make_kv(owner, 4000), LAYOUT)
        if ending == 0:  # cancelled in the copy
            store.forget(owner)
        elif ending == 1:
            store.abort(ticket)
        elif ending == 5:  # died in the copy
            with pytest.raises(CopyFailedError):
                store.finish_store(ticket)
        else:
            store.finish_store(ticket)
            if ending == 2:  # expired while parked
                store.forget(owner)
            elif ending == 3:
                store.abort(store.begin_load(owner, "cpu"))
                store.forget(owner)
            else:
                load(store, owner)
                store.discard(owner)
        delayed.complete_all()
        delayed.transfers.clear()
        store.collect()
        assert store.pool.used_bytes == 0

    for number in range(120):
        cycle(number)
    before = process.memory_info().rss
    for number in range(120, 1120):
        cycle(number)
    assert process.memory_info().rss - before < 4 << 20
    store.check_integrity()
