"""Request mixes with forced lengths; the same seed gives the same mix everywhere."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """One query of a workload.

    Attributes:
        prompt_token_ids: The prompt.
        output_tokens: Tokens it must emit: end-of-sequence ids are ignored.
    """

    prompt_token_ids: tuple[int, ...]
    output_tokens: int


def short(
    vocab_size: int, *, queries: int = 30, low: int = 32, high: int = 260, seed: int = 0
) -> list[Request]:
    """The published short workload: 30 queries, prompts and outputs of 32 to 260 tokens each.

    Args:
        vocab_size: Token ids are drawn below it.
        queries: Number of queries.
        low: Shortest prompt and output.
        high: Longest prompt and output.
        seed: Of lengths and token ids.
    """
    rng = random.Random(seed)  # noqa: S311 - a repeatable workload, not a secret
    lengths = [(rng.randint(low, high), rng.randint(low, high)) for _ in range(queries)]
    return [
        Request(tuple(rng.randrange(3, vocab_size) for _ in range(prompt)), output)
        for prompt, output in lengths
    ]


WORKLOADS = {"short": short}
