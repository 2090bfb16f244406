"""Spreads and laps."""

from __future__ import annotations

import pytest
import torch

from batond.bench.gpu.timing import Spread, Stopwatch, repeat

CPU = torch.device("cpu")


def test_a_spread_is_median_and_tenths() -> None:
    spread = Spread.of([float(number) for number in range(101)], scale=2.0)
    assert (spread.median, spread.low, spread.high) == pytest.approx((100.0, 20.0, 180.0))
    assert (spread.worst, spread.rounds) == (200.0, 101)
    assert spread.text(1) == "100.0 (20.0-180.0)"


def test_one_value_is_its_own_spread_and_none_is_refused() -> None:
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0, 3.0, 1)
    with pytest.raises(ValueError, match="nothing was measured"):
        Spread.of([])


def test_laps_are_taken_once() -> None:
    watch = Stopwatch(CPU)
    for _ in range(3):
        with watch.lap():
            pass
    laps = watch.take()
    assert len(laps) == 3
    assert all(lap >= 0 for lap in laps)
    assert watch.take() == []


def test_warm_up_is_done_and_not_timed() -> None:
    done: list[int] = []
    assert len(repeat(CPU, lambda: done.append(1), rounds=4, warm_up=2)) == 4
    assert len(done) == 6
