"""When a step's own choice of the likeliest tokens will do, and when the sampler must see the logits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from batond.daemon.engine import SamplingParams
from batond.daemon.engine.sampling.sampler import Sampler


@dataclass
class Sampled:
    """The part of a query that the question is about."""

    sampling: SamplingParams
    output_token_ids: list[int] = field(default_factory=lambda: [5, 6])
    grammar: Any = None


PLAIN = Sampled(SamplingParams(max_tokens=9))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.5},
        {"logprobs": 0},
        {"logit_bias": {3: 1.0}},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"min_tokens": 3},
    ],
    ids=lambda options: next(iter(options)),
)
def test_one_query_that_wants_more_makes_the_sampler_look(options: dict[str, Any]) -> None:
    other: Any = Sampled(SamplingParams(max_tokens=9, **options))
    assert not Sampler.takes_likeliest([PLAIN, other])  # type: ignore[list-item]


def test_a_grammar_makes_the_sampler_look() -> None:
    other: Any = Sampled(SamplingParams(max_tokens=9), grammar=object())
    assert not Sampler.takes_likeliest([other])


def test_greedy_queries_take_the_likeliest() -> None:
    satisfied: Any = Sampled(SamplingParams(max_tokens=9, min_tokens=2, top_k=3))
    assert Sampler.takes_likeliest([PLAIN, satisfied])  # type: ignore[list-item]
