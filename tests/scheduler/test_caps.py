"""A learned cap is lowered at once, raised slowly, and more slowly each time that was too soon."""

from __future__ import annotations

from batond.daemon.scheduler.caps import CALM_STEPS, MOST_CALM_STEPS, LearnedCap


def steps_until_raised(cap: LearnedCap, full: int) -> int:
    before, steps = cap.most, 0
    while cap.most == before:
        cap.note_calm(full)
        steps += 1
    return steps


def test_nothing_is_bound_before_something_failed() -> None:
    cap = LearnedCap(2.0)
    cap.note_calm(8)
    assert cap.most is None
    assert cap.bound(1000) == 1000


def test_a_cap_never_leaves_nothing() -> None:
    cap = LearnedCap(2.0)
    cap.lower(0)
    assert cap.most == 1
    cap.lower(5)
    assert cap.most == 1, "a failure raised it"


def test_it_is_raised_after_calm_steps_and_forgotten_at_the_top() -> None:
    cap = LearnedCap(1.125)
    cap.lower(6)
    raises = []
    while cap.most is not None:
        assert steps_until_raised(cap, 8) == CALM_STEPS
        raises.append(cap.most)
    assert raises == [7, None]
    assert cap.bound(8) == 8


def test_large_caps_rise_by_a_share() -> None:
    cap = LearnedCap(1.25)
    cap.lower(100)
    steps_until_raised(cap, 2048)
    assert cap.most == 125


def test_each_raise_that_was_too_soon_doubles_the_wait() -> None:
    cap = LearnedCap(1.125)
    cap.lower(4)
    waits = []
    for _ in range(8):
        waits.append(steps_until_raised(cap, 8))
        cap.lower(4)
    assert waits[:3] == [CALM_STEPS, 2 * CALM_STEPS, 4 * CALM_STEPS]
    assert waits[-1] == MOST_CALM_STEPS
