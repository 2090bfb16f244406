"""The latest times of the classes: bounded, and forgotten after some minutes."""

from __future__ import annotations

import pytest

from batond.daemon.front.recent import MOST_SAMPLES, WINDOW_S, Recent, Times


def test_half_and_95_percent_are_times_that_occurred() -> None:
    recent = Recent(["batch"])
    for place in range(100, 0, -1):
        recent.first_token("batch", float(place), 0.0)
    assert recent.first_tokens("batch", 0.0) == Times(100, 50.0, 95.0)
    assert recent.output_tokens("batch", 0.0) == Times(0)


@pytest.mark.parametrize("value_s", [0.0, 7.5])
def test_one_time_is_both(value_s: float) -> None:
    recent = Recent(["batch"])
    recent.output_token("batch", value_s, 0.0)
    assert recent.output_tokens("batch", 0.0) == Times(1, value_s, value_s)


def test_old_times_are_forgotten() -> None:
    recent = Recent(["batch"])
    recent.first_token("batch", 9.0, 0.0)
    recent.first_token("batch", 1.0, 10.0)
    assert recent.first_tokens("batch", WINDOW_S).samples == 2
    assert recent.first_tokens("batch", WINDOW_S + 5.0) == Times(1, 1.0, 1.0)
    assert recent.first_tokens("batch", WINDOW_S + 11.0) == Times(0)


def test_a_busy_class_keeps_the_latest_alone() -> None:
    recent = Recent(["batch"])
    for place in range(3 * MOST_SAMPLES):
        recent.first_token("batch", float(place), 0.0)
    assert recent.first_tokens("batch", 0.0).samples == MOST_SAMPLES
    assert recent.first_tokens("batch", 0.0).p50_s == 2.5 * MOST_SAMPLES - 1


def test_classes_that_are_not_configured_take_no_room() -> None:
    recent = Recent(["batch"])
    recent.first_token("gone", 1.0, 0.0)
    recent.output_token("gone", 1.0, 0.0)
    assert recent.first_tokens("batch", 0.0) == Times(0)
    with pytest.raises(KeyError):
        recent.first_tokens("gone", 0.0)
