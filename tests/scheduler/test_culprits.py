"""Who is to blame that memory ran out."""

from __future__ import annotations

import pytest

from batond.daemon.scheduler.culprits import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MOST_TRIES,
    PATIENCE_S,
    Culprits,
)


def test_who_fails_again_although_another_went_on_is_the_culprit() -> None:
    """M6: at once, whatever the time."""
    culprits = Culprits()
    assert not culprits.failed_alone("a", 5, 0.0)
    culprits.succeeded(["b"])
    assert culprits.failed_alone("a", 5, 0.1)


@pytest.mark.parametrize("succeeded", [[], ["a"]])
def test_while_nothing_else_goes_well_tries_and_time_must_both_be_spent(succeeded: list[str]) -> None:
    """Its own chunks, computed again up to where it failed, say nothing."""
    culprits = Culprits()
    for _ in range(2 * MOST_TRIES):
        assert not culprits.failed_alone("a", 5, 0.0)
        culprits.succeeded(succeeded)
    assert culprits.failed_alone("a", 5, PATIENCE_S)
    assert not culprits.failed_alone("b", 5, 0.0)
    assert not culprits.failed_alone("b", 5, 2 * PATIENCE_S), "that were two tries"


def test_who_has_come_further_is_judged_anew() -> None:
    culprits = Culprits()
    culprits.failed_alone("a", 5, 0.0)
    culprits.succeeded(["b"])
    assert not culprits.failed_alone("a", 6, 1.0)


def test_who_has_ended_is_forgotten() -> None:
    culprits = Culprits()
    culprits.failed_alone("a", 5, 0.0)
    culprits.succeeded(["b"])
    culprits.keep(["b"])
    assert not culprits.failed_alone("a", 5, 1.0)


def test_pauses_grow_until_something_succeeds() -> None:
    culprits = Culprits()
    assert culprits.resume_s < 0
    pauses = []
    for _ in range(8):
        culprits.pause(100.0)
        pauses.append(culprits.resume_s - 100.0)
    assert pauses[:3] == pytest.approx([FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S])
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE_S)
    culprits.succeeded([])
    culprits.pause(100.0)
    assert culprits.resume_s == pytest.approx(100.0 + LONGEST_PAUSE_S), "nobody has succeeded"
    culprits.succeeded(["b"])
    culprits.pause(100.0)
    assert culprits.resume_s == pytest.approx(100.0 + FIRST_PAUSE_S)


def test_a_prompt_beside_rows_is_tried_less_and_less_often_and_overdue_in_the_end() -> None:
    culprits = Culprits()
    waits = [culprits.failed_among("a", 5, 0.0) for _ in range(8)]
    assert waits == sorted(waits)
    assert waits[-1] == LONGEST_PAUSE_S
    assert not culprits.overdue("a", PATIENCE_S - 1)
    assert culprits.overdue("a", PATIENCE_S)
    assert not culprits.overdue("b", PATIENCE_S)
    assert not culprits.failed_alone("a", 5, PATIENCE_S), "it was never alone"
