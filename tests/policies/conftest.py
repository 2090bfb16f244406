"""Factory of query views."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import pytest

from batond.policies.base import Phase, QueryView

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def make_query() -> Callable[..., QueryView]:
    """Return a factory of waiting standard queries, each later than the one before."""
    numbers = count(1)

    def make(**changes: object) -> QueryView:
        number = next(numbers)
        values: dict[str, object] = {
            "query_id": f"q{number}",
            "tenant": "t0",
            "sla_class": "standard",
            "class_order": 1,
            "preemptible": True,
            "arrival_s": float(number),
            "seq": number,
            "phase": Phase.WAITING,
            "prompt_tokens": 8,
            "prefilled_tokens": 0,
            "output_tokens": 0,
            "max_tokens": 16,
        }
        return QueryView(**(values | changes))

    return make
