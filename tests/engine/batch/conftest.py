"""One schedule of parks for every way of decoding on a ring, and what measures a card's memory."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import pytest

from batond.bench import families
from batond.daemon.engine import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.engine import LocalEngine

    Played = tuple[list[list[int]], LocalEngine]


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """Where it runs; the CPU passes for a card."""
    if request.param == "cpu":
        request.getfixturevalue("card_on_cpu")
    return str(request.param)


@pytest.fixture
def whole_card() -> None:
    """For tests that fill a card, or measure what is free of it: with others beside them they say nothing."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("measures the memory of the whole card: run it without -n")


@pytest.fixture
def play(make_engine: Callable[..., LocalEngine]) -> Callable[..., Played]:
    """Twelve queries on four rows of a small ring, parked and resumed at random."""

    def play_once(family: str, **options: Any) -> Played:
        """What they say, greedy ones and others, and the engine afterwards."""
        rng = random.Random(1)
        engine = make_engine(
            families.make_family(family),
            rows=4,
            batch="ring",
            chunk_tokens=8,
            max_query_tokens=48,
            **options,
        )
        queries = [
            engine.submit(
                [3 + (3 + n) * place % 110 for place in range(rng.randrange(1, 24))],
                SamplingParams(
                    max_tokens=rng.randrange(4, 20), ignore_eos=True, temperature=0.7 * (n % 4 == 3)
                ),
                seed=n,
            )
            for n in range(12)
        ]
        while any(query.live for query in queries):
            engine.step()
            for query in queries:
                if query.live and not query.held and rng.random() < 0.1:
                    engine.park(query)
                elif query.held and rng.random() < 0.5:
                    engine.resume(query)
            engine.check_integrity()
        return [query.output_token_ids for query in queries], engine

    return play_once
