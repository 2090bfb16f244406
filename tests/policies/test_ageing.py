"""The waits that follow from ageing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from batond.daemon.errors import ConfigError
from batond.policies.ageing import aged_level, check_ageing, worst_finish_s, worst_first_row_s
from batond.policies.base import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.policies.base import QueryView


@pytest.mark.parametrize(
    ("phase", "now_s", "level"),
    [
        (Phase.WAITING, 10.0, 2),
        (Phase.WAITING, 19.9, 2),
        (Phase.PARKED, 20.0, 1),
        (Phase.READY, 45.0, -1),
        (Phase.WAITING, 5.0, 2),
        (Phase.RUNNING, 500.0, 2),
    ],
)
def test_level_falls_by_one_a_time_unit(
    make_query: Callable[..., QueryView], phase: Phase, now_s: float, level: float
) -> None:
    query = make_query(class_order=2, arrival_s=10.0, phase=phase)
    assert aged_level(query, now_s, ageing_s=10.0) == level


@pytest.mark.parametrize("ageing_s", [0.0, -1.0, math.nan])
def test_meaningless_ageing_is_refused(ageing_s: float) -> None:
    with pytest.raises(ConfigError, match="ageing_s must be above 0"):
        check_ageing(ageing_s)


def test_infinity_turns_ageing_off(make_query: Callable[..., QueryView]) -> None:
    assert check_ageing(math.inf) == math.inf
    assert aged_level(make_query(class_order=2, arrival_s=0.0), 1e9, math.inf) == 2


def test_bounds_add_up() -> None:
    first_row_s = worst_first_row_s(2, 60.0, backlog_tokens=3000, tokens_per_s=100)
    assert first_row_s == 150
    assert worst_finish_s(first_row_s, longest_turn_s=4, own_tokens=200, token_s=0.05, max_parks=8) == 192
