"""The sampling contract on a card: the same logits give the same tokens as on the CPU."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from batond.daemon.engine.queries.query import Query
from batond.daemon.engine.sampling.sampler import Sampler
from batond.daemon.requests.params import SamplingParams
from batond.policies.classes import SlaClasses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]

VOCABULARY = 50_000


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.0, 3.0]),
        top_k=rng.choice([0, 5, 1000]),
        top_p=rng.choice([0.5, 0.95, 1.0]),
        min_p=rng.choice([0.0, 0.01]),
        repetition_penalty=rng.choice([0.8, 1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 1.0]),
        frequency_penalty=rng.choice([0.0, 0.5]),
        logit_bias={rng.randrange(VOCABULARY): rng.uniform(-5, 5) for _ in range(rng.choice([0, 20]))},
        min_tokens=rng.choice([0, 30]),
        stop_token_ids=(5, 6),
        logprobs=rng.choice([None, 0, 5]),
    )


def run_on(device: str, rows: int = 32, steps: int = 40) -> list[tuple[list[int], list[Any]]]:
    rng = random.Random(9)
    model: Any = SimpleNamespace(
        vocab_size=VOCABULARY, device=torch.device(device), eos_token_ids=frozenset({2})
    )
    sampler = Sampler(model, None)
    queries = [
        Query(
            query_id=f"q{row}",
            prompt_token_ids=[rng.randrange(VOCABULARY) for _ in range(20)],
            sampling=random_params(rng),
            sla_class=SlaClasses().get("standard"),
            tenant="a",
            seed=rng.getrandbits(63),
            seq=row,
            arrival_s=0.0,
        )
        for row in range(rows)
    ]
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        logits = torch.randn(rows, VOCABULARY, generator=generator) * 3
        choices = sampler.choose(logits.to(device), queries)
        for query, choice in zip(queries, choices, strict=True):
            query.output_token_ids.append(choice.token_id)
            query.output_logprobs.append(choice.logprobs)
            if rng.random() < 0.1:
                sampler.forget(query)
    return [(query.output_token_ids, query.output_logprobs) for query in queries]


def test_tokens_and_logprobs_equal_the_cpus() -> None:
    """Q3."""
    for (tokens, logprobs), (cpu_tokens, cpu_logprobs) in zip(run_on("cuda"), run_on("cpu"), strict=True):
        assert tokens == cpu_tokens
        for one, other in zip(logprobs, cpu_logprobs, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert one.logprob == pytest.approx(other.logprob, abs=1e-9)
                assert [token for token, _ in one.top] == [token for token, _ in other.top]
