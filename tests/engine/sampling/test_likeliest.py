"""When a step's own choice of the likeliest tokens will do, and when the sampler must see the logits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from batond.daemon.engine import SamplingParams
from batond.daemon.engine.sampling.filters import Draw, sample
from batond.daemon.engine.sampling.sampler import Sampler


@dataclass
class Sampled:
    """The part of a query that the question is about."""

    sampling: SamplingParams
    output_token_ids: list[int] = field(default_factory=lambda: [5, 6])
    seed: int = 1
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


@pytest.mark.parametrize(
    ("options", "raw"),
    [({"temperature": 0.7, "top_p": 0.9, "min_p": 0.1, "top_k": 5}, True), ({"logprobs": 0}, False)],
    ids=["noise", "logprobs"],
)
def test_noise_needs_nothing_but_the_logits(options: dict[str, Any], *, raw: bool) -> None:
    other: Any = Sampled(SamplingParams(max_tokens=9, **options))
    assert Sampler.takes_raw([PLAIN, other]) is raw  # type: ignore[list-item]


def test_tokens_drawn_on_the_device_are_those_of_the_plain_way() -> None:
    """R2: by row of the logits; seed and place of each query count, and nobody's rows have the likeliest."""
    noise = {"max_tokens": 9, "temperature": 0.9}
    queries: list[Any] = [
        Sampled(SamplingParams(**noise)),
        Sampled(SamplingParams(**noise, top_p=0.8), seed=7, output_token_ids=[3]),
        PLAIN,
    ]
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    rows = [3, 0, 4]
    drawn = Sampler.draw(logits, rows, queries)
    draws = [Draw(query.sampling, query.seed, len(query.output_token_ids)) for query in queries]
    assert [int(drawn[row]) for row in rows] == sample(logits[rows], draws)
    assert drawn[[1, 2]].tolist() == logits[[1, 2]].argmax(-1).tolist()
