"""Slices in files: the same bytes come back, or it is said that they don't; nothing is ever left behind."""

from __future__ import annotations

import errno
import os
import shutil
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch

from batond.offload.errors import HostPoolFullError, SliceCorruptError, SliceLostError
from batond.offload.spill import SpillTier, SpillUse
from batond.offload.staging import pieces

if TYPE_CHECKING:
    from pathlib import Path

    from batond.offload.slice import KVSlice
    from batond.offload.store import ParkedStore

LAYOUT = "layout"
SLICE_BYTES = 5 * 48 + 40


def park(store: ParkedStore, owner: str, kv: KVSlice) -> None:
    store.finish_store(store.begin_store(owner, kv, LAYOUT))


def settle(store: ParkedStore) -> None:
    """Wait for what is under way between pool and files, and take it in."""
    for entry in list(store._entries.values()):
        if entry.job is not None:
            entry.job.wait()
    store.collect()
    store.check_integrity()


def spill(store: ParkedStore, owner: str) -> None:
    assert store.spiller.begin_write(owner)
    settle(store)


def load(store: ParkedStore, owner: str, **options: Any) -> KVSlice:
    return store.finish_load(store.begin_load(owner, "cpu", **options))


def to_disk_alone(store: ParkedStore, owner: str, kv: KVSlice) -> None:
    """Park, spill, and have the pool need the room."""
    park(store, owner, kv)
    spill(store, owner)
    store.pool.release(store.spiller.reserve(store.pool.capacity_bytes))
    store.check_integrity()
    assert store._entries[owner].reservation is None


def file_of(store: ParkedStore, owner: str) -> Path:
    file = store._entries[owner].file
    assert file is not None
    assert store.spiller.tier is not None
    return store.spiller.tier.path / file.name


@pytest.mark.parametrize("n_tokens", [0, 1, 5, 84, 85, 170, 171, 1000])
@pytest.mark.parametrize("state_bytes", [0, 40])
def test_the_same_bytes_come_back(
    spill_store: Any, make_kv: Any, same: Any, n_tokens: int, state_bytes: int
) -> None:
    """R4: over the borders of blocks, pieces and chunks of the pool."""
    store = spill_store()
    kv = make_kv("a", n_tokens, state_bytes=state_bytes)
    park(store, "a", kv)
    if not kv.nbytes:
        assert not store.spiller.begin_write("a")
        return
    to_disk_alone_again = make_kv("a", n_tokens, state_bytes=state_bytes)
    store.forget("a")
    to_disk_alone(store, "a", to_disk_alone_again)
    assert store.pool.used_bytes == 0
    assert same(load(store, "a"), make_kv("a", n_tokens, state_bytes=state_bytes))
    use = store.spill_use
    assert (use.spills, use.fetches, use.bytes_out, use.bytes_in) == (1, 1, kv.nbytes, kv.nbytes)
    store.discard("a")


def test_a_written_slice_is_room_and_still_there(spill_store: Any, make_kv: Any, same: Any) -> None:
    """M1: whoever comes back before somebody needs the room is read from no disk."""
    store = spill_store(SLICE_BYTES)
    park(store, "a", make_kv("a"))
    assert store.room_bytes == 0
    spill(store, "a")
    assert (store.room_bytes, store.pool.free_bytes) == (SLICE_BYTES, 0)
    assert store.spiller.take_ended() == [("a", True)]
    assert same(load(store, "a"), make_kv("a"))
    assert store.spill_use.fetches == 0
    store.discard("a")
    settle(store)
    assert store.pool.free_bytes == SLICE_BYTES


def test_a_pool_of_one_slice_parks_many(spill_store: Any, make_kv: Any, same: Any) -> None:
    """M1: the one that waits in the pool makes room for the next, and all come back."""
    store = spill_store(SLICE_BYTES)
    owners = [f"q{number}" for number in range(8)]
    for owner in owners:
        park(store, owner, make_kv(owner))
        spill(store, owner)
    for owner in reversed(owners):
        assert same(load(store, owner), make_kv(owner))
        store.discard(owner)
    assert store.spill_use.fetches == 7, "the last one was still in the pool"


def test_what_is_in_the_pool_alone_makes_no_room(
    spill_store: Any, make_kv: Any, same: Any, cue_folder: Any
) -> None:
    """The only good copy stays, also while it is being written."""
    store = spill_store(SLICE_BYTES)
    park(store, "a", make_kv("a"))
    cue_folder.gate.clear()
    assert store.spiller.begin_write("a")
    assert not store.spiller.begin_write("a"), "it is under way"
    assert cue_folder.entered.wait(30)
    with pytest.raises(HostPoolFullError):
        store.begin_store("b", make_kv("b"), LAYOUT)
    assert same(load(store, "a"), make_kv("a")), "resumable while it is written"
    cue_folder.gate.set()
    settle(store)
    park(store, "b", make_kv("b"))
    store.forget("b")
    assert same(load(store, "a", layout_hash=LAYOUT), make_kv("a"))
    assert store.spill_use.fetches == 1


def test_the_first_written_makes_room_first(spill_store: Any, make_kv: Any) -> None:
    """The caller writes the least valuable first."""
    store = spill_store(3 * SLICE_BYTES)
    for owner in "abc":
        park(store, owner, make_kv(owner))
    for owner in "bca":
        spill(store, owner)
    store.pool.release(store.spiller.reserve(2 * SLICE_BYTES))
    assert [owner for owner in "abc" if store._entries[owner].reservation is not None] == ["a"]


def test_bytes_that_a_copy_reads_are_no_room(spill_store: Any, make_kv: Any, same: Any, delayed: Any) -> None:
    """R5: also of a slice that is in a file, too."""
    store = spill_store(2 * SLICE_BYTES, copier=delayed)
    for owner in "ab":
        park(store, owner, make_kv(owner))
        spill(store, owner)
    ticket = store.begin_load("a", "cpu")
    assert store.room_bytes == SLICE_BYTES
    park(store, "c", make_kv("c"))
    with pytest.raises(HostPoolFullError):
        store.begin_store("d", make_kv("d"), LAYOUT)
    assert same(store.finish_load(ticket), make_kv("a"))
    store.collect()
    assert store.room_bytes == SLICE_BYTES
    park(store, "d", make_kv("d"))


def test_a_slice_is_read_ahead(spill_store: Any, make_kv: Any, same: Any, cue_folder: Any) -> None:
    store = spill_store()
    to_disk_alone(store, "a", make_kv("a"))
    cue_folder.gate.clear()
    assert store.spiller.begin_fetch("a")
    assert store.spiller.begin_fetch("a"), "still under way"
    store.collect()
    store.check_integrity()
    cue_folder.gate.set()
    settle(store)
    assert not store.spiller.begin_fetch("a")
    assert not store.spiller.begin_fetch("nobody")
    assert same(load(store, "a"), make_kv("a"))
    assert store.spill_use.fetches == 1


def test_a_read_needs_room_and_says_so(spill_store: Any, make_kv: Any, same: Any) -> None:
    store = spill_store(SLICE_BYTES)
    to_disk_alone(store, "a", make_kv("a"))
    park(store, "b", make_kv("b"))
    for read in (lambda: store.spiller.begin_fetch("a"), lambda: store.begin_load("a", "cpu")):
        with pytest.raises(HostPoolFullError):
            read()
    store.forget("b")
    assert same(load(store, "a"), make_kv("a"))


def test_a_system_without_memory_for_the_pool_is_a_pool_that_is_full(
    spill_store: Any, make_kv: Any, same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = spill_store()
    to_disk_alone(store, "a", make_kv("a"))

    def refuse(_: int) -> None:
        raise MemoryError("no chunk")

    with monkeypatch.context() as patch:
        patch.setattr(store.pool, "reserve", refuse)
        with pytest.raises(HostPoolFullError):
            store.spiller.begin_fetch("a")
    store.check_integrity()
    assert same(load(store, "a"), make_kv("a"))


@pytest.mark.parametrize(
    "cue",
    [
        ("create", 0, errno.EROFS),
        ("create", 0, errno.ENOSPC),
        ("write", 0, errno.ENOSPC),
        ("write", 1, errno.ENOSPC),
        ("write", 2, errno.EIO),
        ("write", 1, errno.EDQUOT),
        ("publish", 0, errno.ENOENT),
    ],
)
def test_a_write_that_fails_leaves_the_slice_in_the_pool(
    spill_store: Any, make_kv: Any, same: Any, cue_folder: Any, cue: tuple[str, int, int]
) -> None:
    """A full or broken disk means a tier that is full, for a while."""
    now_s = [0.0]
    store = spill_store(clock=lambda: now_s[0])
    park(store, "a", make_kv("a", 400))
    cue_folder.fails[cue[0]] = cue[1:]
    spill(store, "a")
    assert store.spiller.take_ended() == [("a", False)]
    use = store.spill_use
    assert (use.failures, use.spills, use.used_bytes, use.files, use.resting) == (1, 0, 0, 0, True)
    assert len(list(cue_folder.path.iterdir())) == 1, "the lock alone"
    assert not store.spiller.begin_write("a"), "not again at once"
    assert same(load(store, "a"), make_kv("a", 400))
    now_s[0] = 5.0
    spill(store, "a")
    assert store.spill_use.spills == 1


def test_a_short_write_is_gone_on_with(spill_store: Any, make_kv: Any, same: Any, cue_folder: Any) -> None:
    store = spill_store()
    cue_folder.fails["write"] = (2, 0)
    to_disk_alone(store, "a", make_kv("a", 400))
    assert store.spill_use.failures == 0
    assert same(load(store, "a"), make_kv("a", 400))


def test_each_failure_makes_the_rest_longer_up_to_a_bound(
    spill_store: Any, make_kv: Any, cue_folder: Any
) -> None:
    now_s = [0.0]
    store = spill_store(clock=lambda: now_s[0])
    park(store, "a", make_kv("a"))
    for rest_s in (5, 10, 20, 40, 60, 60):
        cue_folder.fails["create"] = (0, errno.EIO)
        spill(store, "a")
        now_s[0] += rest_s - 0.1
        assert not store.spiller.begin_write("a")
        now_s[0] += 0.1
    spill(store, "a")
    assert store.spill_use.spills == 1


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("place", [0, 4, 30, 4096, 4096 + 8191, 4096 + 400 * 48 + 39])
def test_every_flipped_bit_is_found(spill_store: Any, make_kv: Any, same: Any, place: int) -> None:
    """R6: in the header or the body; the others are unaffected."""
    store = spill_store()
    to_disk_alone(store, "a", make_kv("a", 400))
    to_disk_alone(store, "b", make_kv("b", 400))
    flip(file_of(store, "a"), place)
    with pytest.raises(SliceCorruptError):
        load(store, "a")
    store.discard("a")
    assert store.spill_use.failures + store.stats.corruptions == 1
    assert same(load(store, "b"), make_kv("b", 400))


def test_two_files_exchanged_are_found(spill_store: Any, make_kv: Any) -> None:
    """R6: each in itself sound."""
    store = spill_store()
    for owner in "ab":
        to_disk_alone(store, owner, make_kv(owner))
    a, b = file_of(store, "a"), file_of(store, "b")
    content = a.read_bytes(), b.read_bytes()
    b.write_bytes(content[0])
    a.write_bytes(content[1])
    for owner in "ab":
        with pytest.raises(SliceLostError, match="header"):
            load(store, owner)
        store.discard(owner)


def cut(store: ParkedStore, owner: str) -> None:
    with file_of(store, owner).open("r+b") as file:
        file.truncate(8192)


def vanish(store: ParkedStore, _: str) -> None:
    assert store.spiller.tier is not None
    shutil.rmtree(store.spiller.tier.path)


def become_a_link(store: ParkedStore, owner: str) -> None:
    path = file_of(store, owner)
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


@pytest.mark.parametrize("damage", [cut, vanish, become_a_link])
def test_a_file_that_is_not_there_any_more_is_a_slice_that_is_lost(
    spill_store: Any, make_kv: Any, cue_folder: Any, damage: Any
) -> None:
    store = spill_store()
    to_disk_alone(store, "a", make_kv("a", 400))
    damage(store, "a")
    assert store.spiller.begin_fetch("a")
    settle(store)
    assert not store.spiller.begin_fetch("a"), "there is nothing to wait for"
    with pytest.raises(SliceLostError):
        store.begin_load("a", "cpu")
    store.discard("a")
    assert (store.spill_use.failures, store.pool.used_bytes) == (1, 0)
    if cue_folder.path.exists():
        (cue_folder.path / "moved").unlink(missing_ok=True)
    else:
        park(store, "b", make_kv("b"))
        spill(store, "b")
        assert store.spill_use.resting, "nor can anything be written"


@pytest.mark.parametrize(
    "cue",
    [("open", 0, errno.EIO), ("read", 0, errno.EIO), ("read", 1, errno.EIO), ("read", 2, 0)],
)
def test_a_read_that_fails_loses_one_slice(
    spill_store: Any, make_kv: Any, same: Any, cue_folder: Any, cue: tuple[str, int, int]
) -> None:
    store = spill_store()
    for owner in "ab":
        to_disk_alone(store, owner, make_kv(owner, 400))
    cue_folder.fails[cue[0]] = cue[1:]
    with pytest.raises(SliceLostError):
        load(store, "a")
    assert store.forget("a")
    assert store.spill_use.failures == 1
    assert not store.spill_use.resting, "writing may still work"
    assert same(load(store, "b"), make_kv("b", 400))


def test_a_tier_that_is_full_takes_nothing_until_something_goes(spill_store: Any, make_kv: Any) -> None:
    store = spill_store(spill_bytes=2 * 8192)
    for owner in "abc":
        park(store, owner, make_kv(owner))
    spill(store, "a")
    spill(store, "b")
    assert not store.spiller.begin_write("c")
    assert (store.spill_use.failures, store.spill_use.resting) == (0, False)
    store.forget("a")
    store.spiller.tier._out.submit(int).result()
    spill(store, "c")


def test_the_space_that_is_left_to_others_is_not_taken(
    spill_store: Any, make_kv: Any, cue_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = spill_store()
    park(store, "a", make_kv("a"))
    monkeypatch.setattr(cue_folder, "free_bytes", lambda: 8191)
    spill(store, "a")
    assert (store.spill_use.resting, cue_folder.calls["write"]) == (True, 1), "the probe of the start"


@pytest.mark.parametrize("reading", [False, True])
def test_forgotten_while_a_file_is_under_way(
    spill_store: Any, make_kv: Any, same: Any, cue_folder: Any, *, reading: bool
) -> None:
    """C3: bytes come back when the disk is done with them; the id may be used again at once."""
    store = spill_store(4 * SLICE_BYTES)
    (to_disk_alone if reading else park)(store, "a", make_kv("a"))
    cue_folder.gate.clear()
    cue_folder.entered.clear()
    assert store.spiller.begin_fetch("a") if reading else store.spiller.begin_write("a")
    assert cue_folder.entered.wait(30)
    assert store.forget("a")
    assert store.pool.used_bytes == store.retiring_bytes == SLICE_BYTES
    park(store, "a", make_kv("again"))
    store.check_integrity()
    job = store._retired.entries[0].job
    cue_folder.gate.set()
    job.wait()
    assert store.collect() == SLICE_BYTES
    assert same(load(store, "a"), make_kv("again"))


def test_closing_waits_for_what_is_under_way(spill_store: Any, make_kv: Any, cue_folder: Any) -> None:
    store = spill_store()
    to_disk_alone(store, "a", make_kv("a"))
    park(store, "b", make_kv("b"))
    assert store.spiller.begin_fetch("a")
    assert store.spiller.begin_write("b")
    store.close()
    store.close()
    assert list(cue_folder.path.iterdir()) == []
    assert store.pool.used_bytes == 0
    assert store.spill_use.files == 0


def test_cycles_of_every_ending_leave_nothing(
    spill_store: Any, make_kv: Any, cue_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M5: no file, no descriptor, no memory."""
    cue_folder.direct = False  # Through the cache, and unsynced: a thousand times to the disk takes long.
    monkeypatch.setattr(os, "fdatasync", lambda _: None)
    store = spill_store(1 << 15)
    process = psutil.Process()

    def cycle(number: int) -> None:
        owner, ending = f"q{number}", number % 5
        park(store, owner, make_kv("a", 180))
        assert store.spiller.begin_write(owner)
        if ending == 1:  # Cancelled while it is written.
            store.forget(owner)
            return
        settle(store)
        if ending == 2:
            store.forget(owner)
            return
        store.pool.release(store.spiller.reserve(store.pool.capacity_bytes - store.retiring_bytes))
        if ending == 3:  # Cancelled while it is read.
            assert store.spiller.begin_fetch(owner)
            store.forget(owner)
            return
        if ending == 4:
            cue_folder.fails["read"] = (0, errno.EIO)
            with pytest.raises(SliceLostError):
                load(store, owner)
        else:
            load(store, owner)
        store.discard(owner)

    def finish() -> None:
        for entry in store._retired.entries:
            entry.job.wait()
        store.collect()
        store.spiller.tier._out.submit(int).result()

    for number in range(100):
        cycle(number)
    finish()
    before, descriptors = process.memory_info().rss, process.num_fds()
    for number in range(100, 1100):
        cycle(number)
    finish()
    assert process.memory_info().rss - before < 4 << 20
    assert process.num_fds() == descriptors
    assert store.pool.used_bytes == store.spill_use.used_bytes == store.spill_use.files == 0
    assert len(list(cue_folder.path.iterdir())) == 1, "the lock alone"


def test_nonsense_is_refused(cue_folder: Any) -> None:
    for capacity, piece in ((-1, 4096), (1, 0), (1, 1000)):
        with pytest.raises(ValueError, match="no sense"):
            SpillTier(cue_folder, capacity, piece_bytes=piece)
    cue_folder.close()


def test_without_a_tier_nothing_spills(make_store: Any, make_kv: Any) -> None:
    store = make_store()
    park(store, "a", make_kv("a"))
    assert not store.spiller.begin_write("a")
    assert not store.spiller.begin_write("nobody")
    assert not store.spiller.begin_fetch("a")
    assert store.spill_use == SpillUse()
    assert store.room_bytes == store.pool.free_bytes


def test_pieces_are_cut_wherever_parts_end() -> None:
    body = [torch.arange(start, start + size, dtype=torch.uint8) for start, size in ((0, 3), (3, 0), (3, 7))]
    found = [b"".join(part.tobytes() for part in piece) for piece in pieces(body, 4)]
    assert found == [bytes([0, 1, 2, 3]), bytes([4, 5, 6, 7]), bytes([8, 9])]
