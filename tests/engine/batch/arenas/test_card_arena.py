"""The card's arena when its driver says no: books as before, nothing lost, and the next try works."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from batond.daemon.engine.batch.arenas.arena import ArenaShape
from batond.daemon.engine.batch.arenas.card import CardArena
from batond.daemon.engine.batch.arenas.driver import DriverError

if TYPE_CHECKING:
    from collections.abc import Callable

    MakeArena = Callable[..., CardArena]

PAGE = 4096
SHAPE = ArenaShape(rows=3, capacity=100, record_bytes=384)
ROW_PAGES = 10
FULL, REFUSED = torch.OutOfMemoryError("full"), DriverError("no")


def books(arena: CardArena) -> tuple[Any, ...]:
    arena.check_integrity()
    return (arena.use.committed_bytes, *(arena.row_bytes(row) for row in range(SHAPE.rows)))


@pytest.mark.parametrize("error", [FULL, REFUSED])
@pytest.mark.parametrize(
    ("call", "after"),
    [
        *((call, after) for call in ("create", "map") for after in range(4)),
        ("set_access", 0),
        ("set_access", 1),
    ],
)
def test_a_commit_that_fails_half_way_changes_nothing(
    make_card_arena: MakeArena, driver: Any, call: str, error: Exception, after: int
) -> None:
    """M5, M6: pages that it got are pooled, those that the row had stay, and it can be tried again."""
    arena = make_card_arena()
    arena.commit(0, 0, 10)
    arena.commit(0, 50, 55)  # Two runs of pages are missing.
    arena.tensor[0, :10] = 9
    arena.trim()
    before, had = books(arena), driver.used_bytes
    driver.cue(call, error, after=after)
    with pytest.raises(type(error)):
        arena.commit(0, 0, 80)
    assert books(arena) == before
    assert arena.holds(0, 0, 10)
    assert arena.holds(0, 50, 55)
    assert not arena.holds(0, 40, 41)
    assert driver.used_bytes == had + arena.use.pooled_bytes
    arena.commit(0, 0, 80)
    arena.tensor[0, 10:80] = 8
    assert bool((arena.tensor[0, :10] == 9).all())
    arena.release(0, [(0, 80)])
    arena.trim()
    assert driver.used_bytes == 0
    assert driver.stray_bytes() == 0


def test_an_access_and_then_an_unmap_that_fail_leave_the_page_for_later(
    make_card_arena: MakeArena, driver: Any, caplog: pytest.LogCaptureFixture
) -> None:
    arena = make_card_arena()
    arena.trim()
    driver.cue("set_access", FULL)
    driver.cue("unmap", REFUSED)
    with pytest.raises(torch.OutOfMemoryError):
        arena.commit(1, 0, 10)
    assert "could not be unmapped" in caplog.text
    assert books(arena) == (0, 0, 0, 0)
    assert arena.use.pooled_bytes == PAGE
    arena.commit(1, 0, 10)  # Taken back, but not without access.
    arena.tensor[1, :10] = 1
    assert driver.stray_bytes() == 0


def test_a_page_that_can_not_be_unmapped_is_tried_again(
    make_card_arena: MakeArena, driver: Any, caplog: pytest.LogCaptureFixture
) -> None:
    arena = make_card_arena()
    arena.commit(0, 0, 100)
    arena.release(0, [])
    driver.cue("unmap", REFUSED, after=3, times=1)
    driver.cue("unmap", REFUSED, after=ROW_PAGES, times=2)
    assert arena.trim() == (ROW_PAGES - 1) * PAGE
    assert "could not be unmapped" in caplog.text
    assert arena.use.pooled_bytes == PAGE
    assert arena.trim() == PAGE
    assert driver.used_bytes == 0


def test_memory_that_the_driver_does_not_take_back_stays_pooled(
    make_card_arena: MakeArena, driver: Any, caplog: pytest.LogCaptureFixture
) -> None:
    arena = make_card_arena()
    arena.commit(0, 0, 100)
    arena.release(0, [])
    driver.cue("destroy", REFUSED, after=4)
    assert arena.trim() == 4 * PAGE
    assert "does not take memory back" in caplog.text
    assert arena.use.pooled_bytes == (ROW_PAGES - 4) * PAGE
    assert arena.trim(keep_bytes=2 * PAGE) == (ROW_PAGES - 6) * PAGE
    assert arena.use.pooled_bytes == 2 * PAGE


def test_what_is_leaving_is_used_before_memory_is_out(make_card_arena: MakeArena, driver: Any) -> None:
    """M6: a full card, and a freed row whose last step still runs: wait for it, then take its pages."""
    driver.card_bytes = ROW_PAGES * PAGE
    arena = make_card_arena()
    arena.commit(0, 0, 100)
    driver.busy = True
    arena.release(0, [])
    arena.commit(1, 0, 100)
    assert driver.fences[-1].waited.is_set()
    assert arena.row_bytes(1) == ROW_PAGES * PAGE
    with pytest.raises(torch.OutOfMemoryError):
        arena.commit(2, 0, 1)
    assert books(arena) == (ROW_PAGES * PAGE, 0, ROW_PAGES * PAGE, 0)


def test_a_card_that_is_done_right_after_it_was_asked_is_no_full_card(
    make_card_arena: MakeArena, driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M6: its memory is there, though there is nothing left to wait for."""
    driver.card_bytes = ROW_PAGES * PAGE
    arena = make_card_arena()
    arena.commit(0, 0, 100)
    driver.busy = True
    arena.release(0, [])
    answers = iter([False])
    monkeypatch.setattr(driver.fences[-1], "done", lambda: next(answers, True))
    arena.commit(1, 0, 100)
    assert next(answers, None) is None, "it was asked"
    assert arena.row_bytes(1) == ROW_PAGES * PAGE


def test_a_commit_has_access_to_all_its_pages_in_one_call(make_card_arena: MakeArena, driver: Any) -> None:
    """Access costs ten times what mapping does, whatever the size."""
    arena = make_card_arena()
    before = driver.calls["set_access"]
    arena.commit(1, 0, 100)
    assert driver.calls["set_access"] == before + 1
    arena.commit(2, 40, 50)
    arena.commit(2, 0, 100)
    assert driver.calls["set_access"] == before + 4


def test_nothing_is_unmapped_that_the_card_may_still_read(make_card_arena: MakeArena, driver: Any) -> None:
    arena = make_card_arena()
    arena.commit(0, 0, 100)
    driver.busy = True
    arena.release(0, [])
    unmapped = driver.calls["unmap"]
    assert not arena._pages.shrink(0)
    arena.commit(1, 0, 50)
    assert driver.calls["unmap"] == unmapped
    driver.finish()
    assert arena.trim() == ROW_PAGES * PAGE
    assert driver.calls["unmap"] == unmapped + ROW_PAGES


@pytest.mark.parametrize("busy", [True, False])
def test_a_row_takes_back_what_it_gave(make_card_arena: MakeArena, driver: Any, *, busy: bool) -> None:
    """Also long after: nobody else wanted the memory, and access costs by the page."""
    arena = make_card_arena(background=not busy)
    arena.commit(0, 0, 100)
    arena.tensor[0, :] = 4
    driver.busy = busy
    arena.release(0, [])
    if not busy:
        _until_followed(arena)
    calls = driver.calls.copy()
    arena.commit(0, 30, 60)
    assert {name: driver.calls[name] for name in ("create", "map", "unmap")} == {
        name: calls[name] for name in ("create", "map", "unmap")
    }
    assert bool((arena.tensor[0, 30:60] == 4).all())
    driver.finish()
    assert arena.trim() == (ROW_PAGES - arena.row_bytes(0) // PAGE) * PAGE


def test_new_memory_is_had_before_a_page_is_taken_from_where_it_is(
    make_card_arena: MakeArena, driver: Any
) -> None:
    """Creating costs less than unmapping; what is idle for long is what is too much to keep."""
    arena = make_card_arena()
    arena.commit(0, 0, 100)
    arena.release(0, [])
    unmapped = driver.calls["unmap"]
    arena.commit(1, 0, 50)
    assert driver.calls["unmap"] == unmapped
    assert arena.use.pooled_bytes == ROW_PAGES * PAGE
    driver.card_bytes = driver.used_bytes
    arena.commit(1, 50, 100)
    assert driver.calls["unmap"] > unmapped
    assert arena.use.pooled_bytes < ROW_PAGES * PAGE


def test_who_waits_for_memory_keeps_nobody_from_the_books(make_card_arena: MakeArena, driver: Any) -> None:
    """A full card, and what is leaving is still read: the keeper and whoever asks for use go on."""
    driver.card_bytes = ROW_PAGES * PAGE
    arena = make_card_arena()
    arena.commit(0, 0, 100)
    driver.busy = True
    driver.held_up.set()
    arena.release(0, [])
    waits = threading.Thread(target=arena.commit, args=(1, 0, 100), daemon=True)
    waits.start()
    assert driver.fences[-1].waited.wait(30)
    asks = threading.Thread(target=arena.check_integrity, daemon=True)
    asks.start()
    asks.join(10)
    assert not asks.is_alive(), "the lock is not held"
    assert waits.is_alive()
    driver.finish()
    waits.join(30)
    assert books(arena) == (ROW_PAGES * PAGE, 0, ROW_PAGES * PAGE, 0)
    driver.held_up.clear()


def test_a_close_that_waits_for_the_card_keeps_nobody_from_the_books(
    make_card_arena: MakeArena, driver: Any
) -> None:
    arena = make_card_arena()
    arena.commit(0, 0, 100)
    driver.busy = True
    driver.held_up.set()
    closes = threading.Thread(target=arena.close, daemon=True)
    closes.start()
    while not (driver.fences and driver.fences[-1].waited.wait(0.01)):
        assert closes.is_alive()
    arena._pages.commit_if_held(0, range(3))  # As the keeper might; there is nothing to be had any more.
    arena.check_integrity()
    driver.finish()
    closes.join(30)
    assert not driver.used_bytes
    assert not driver.reserved
    driver.held_up.clear()


def test_an_arena_that_can_not_be_made_leaves_nothing_behind(driver: Any) -> None:
    for call in ("reserve", "create", "map", "set_access", "tensor"):
        driver.cue(call, REFUSED)
        with pytest.raises(DriverError):
            CardArena(SHAPE, driver, background=False)
        assert not driver.reserved
        assert not driver.used_bytes


def test_closing_gives_everything_back_once(make_card_arena: MakeArena, driver: Any) -> None:
    arena = make_card_arena()
    arena.commit(0, 0, 100)
    arena.commit(1, 0, 10)
    arena.release(1, [])
    arena.close()
    arena.close()
    assert not driver.used_bytes
    assert not driver.reserved


def test_a_close_that_the_driver_refuses_is_logged(
    make_card_arena: MakeArena, driver: Any, caplog: pytest.LogCaptureFixture
) -> None:
    arena = make_card_arena()
    arena.commit(0, 0, 100)
    driver.cue("unmap", REFUSED)
    driver.cue("destroy", REFUSED)
    arena.close()
    assert "could not be given back whole" in caplog.text


# -- with its thread ----------------------------------------------------------------------------------


def test_the_keeper_maps_ahead_of_the_cursor(make_card_arena: MakeArena, driver: Any) -> None:
    arena = make_card_arena(background=True, pool_bytes=1 << 20)
    behind = arena.commit(0, 0, 1)
    mapped = driver.calls["set_access"]
    arena.expect(0, 1 + behind)
    arena.expect(2, 50)  # Holds nothing: it was freed meanwhile.
    arena.close()  # Orders are followed first.
    assert driver.calls["set_access"] == mapped + 1
    assert driver.threads


def test_the_keeper_gives_back_what_is_too_much(make_card_arena: MakeArena, driver: Any) -> None:
    """M5: nobody asks, and the driver has its memory again; a small pool stays."""
    given = threading.Event()
    destroy = driver.destroy

    def noted(handle: int) -> None:
        destroy(handle)
        if driver.used_bytes == 2 * PAGE:
            given.set()

    driver.destroy = noted
    arena = make_card_arena(background=True, pool_bytes=2 * PAGE)
    arena.commit(0, 0, 100)
    driver.busy = True
    driver.held_up.set()
    arena.release(0, [])
    assert arena.use.pooled_bytes == ROW_PAGES * PAGE
    driver.finish()
    assert given.wait(30)
    assert arena.use.pooled_bytes == 2 * PAGE


def test_a_keeper_survives_what_the_driver_says(
    make_card_arena: MakeArena, driver: Any, caplog: pytest.LogCaptureFixture
) -> None:
    arena = make_card_arena(background=True)
    arena.commit(0, 0, 1)
    arena.trim()  # The first page, or what the driver was tried with.
    for error in (FULL, REFUSED):
        driver.cue("map", error, times=1)
        arena.expect(0, 99)
        arena.release(1, [])
        _until_followed(arena)
    assert "keeper failed" in caplog.text
    before = driver.calls["map"]
    arena.expect(0, 99)
    _until_followed(arena)
    assert driver.calls["map"] > before
    assert arena.holds(0, 99, 100)


def test_a_trim_that_waits_for_the_card_holds_nobody_up(make_card_arena: MakeArena, driver: Any) -> None:
    """M8: ordered by any thread, done by the keeper, which is attached; the engine goes on meanwhile."""
    arena = make_card_arena(background=True)
    assert arena._keeper is not None
    arena.commit(0, 0, 100)
    driver.busy = True
    driver.held_up.set()
    arena._pages.release(0)  # As `release`, but the keeper is told nothing.
    arena.trim_soon()
    assert driver.fences[-1].waited.wait(30)
    free = threading.Thread(target=arena._pages.commit, args=(1, range(1)), daemon=True)
    free.start()
    free.join(10)
    assert not free.is_alive(), "the lock is not held"
    arena.trim_soon()
    arena.trim_soon()
    driver.finish()
    _until_followed(arena)
    assert driver.used_bytes == arena.use.committed_bytes == PAGE
    assert driver.threads == {arena._keeper.ident}
    driver.held_up.clear()


def _until_followed(arena: CardArena) -> None:
    """Wait until the keeper has followed all orders so far."""
    followed = threading.Event()
    assert arena._keeper is not None
    arena._keeper._orders.put(followed.set)
    assert followed.wait(30)


def test_an_arena_that_nobody_holds_gives_its_memory_back(driver: Any) -> None:
    """As a tensor does: probes at load make many rings and close none."""
    for background in (False, True):
        arena = CardArena(SHAPE, driver, background=background)
        keeper = arena._keeper
        arena.commit(1, 0, 100)
        del arena
        gc.collect()
        if keeper is not None:
            keeper.join(30)
        assert not driver.used_bytes
        assert not driver.reserved


def test_engine_and_keeper_together_lose_no_page(make_card_arena: MakeArena, driver: Any) -> None:
    """A few hundred rows come and go while the keeper maps ahead and unmaps behind."""
    arena = make_card_arena(background=True, pool_bytes=3 * PAGE)
    for turn in range(300):
        row, start = turn % 3, turn * 7 % 60
        end = start + 1 + arena.commit(row, start, start + 1)
        while end < 100:
            arena.tensor[row, start:end] = turn % 200
            arena.expect(row, end)
            end += 1 + arena.commit(row, end, end + 1)
        assert bool((arena.tensor[row, start : end - 12] == turn % 200).all())
        arena.release(row, [])
        arena.check_integrity()
    arena.trim()
    _until_followed(arena)
    arena.trim()
    assert arena.use.committed_bytes == 0
    assert driver.used_bytes == 0
