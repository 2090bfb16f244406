"""Figures: percentiles, fairness, starvation, targets."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from batond.daemon.queue.limits import TenantLimits
from batond.daemon.simulator.report import report, spread
from batond.daemon.simulator.trace import Request

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.simulator.world import Outcome


def test_percentiles_are_interpolated_and_nothing_is_no_number() -> None:
    assert spread([3.0, 1.0, 2.0]).p50 == 2.0
    assert spread([float(number) for number in range(101)]).p99 == 99.0
    assert math.isnan(spread([]).p50)


def two_tenants() -> list[Request]:
    """One tenant sends all its work before the other does."""
    many = [Request(0.0, 40, 40, "a", "batch") for _ in range(300)]
    return many + [Request(0.001, 40, 40, "b", "batch") for _ in range(300)]


def test_the_queue_shares_fairly_and_by_weight(simulate: Callable[..., Outcome]) -> None:
    even = simulate(two_tenants(), "fcfs")
    assert report(even).jain > 0.95
    # With these weights b is owed three quarters; its share over its weight is again a's.
    weighted = simulate(two_tenants(), "fair", tenants={"b": TenantLimits(weight=3.0)})
    assert report(weighted).jain > 0.9
    served = weighted.windows[1].served
    assert served["batch", "b"] == pytest.approx(3 * served["batch", "a"], rel=0.3)


def test_starvation_and_targets_are_those_of_the_longest_wait(simulate: Callable[..., Outcome]) -> None:
    first = report(simulate([Request(0.0, 20, 3000), Request(0.0, 20, 50)], rows=1)).groups[0]
    assert first.starved_s == pytest.approx(first.last_end_s, rel=0.2)
    assert first.requests == 2
    lone = report(simulate([Request(0.0, 20, 50)], rows=1))
    assert lone.groups[0].met == 1.0
    assert lone.starved_s == 0.0
    assert lone.busy == pytest.approx(1.0)
    assert 0 < lone.rows_taken <= 1
