"""Request mixes with forced lengths; the same seed gives the same mix everywhere."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable


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


#: Prompt and output of each kind of query in the published mixes, by how often it comes.
_KINDS: Final = (("long", "short"), ("short", "long"), ("short", "short"), ("short", "short"))
_LENGTHS: Final = {"short": (32, 512), "long": (3500, 4500)}


def mix(vocab_size: int, *, queries: int = 120, scale: int = 1, seed: int = 0) -> list[Request]:
    """The published mix: long prompts, long outputs, and neither, 1 to 1 to 2, in random order.

    Long is 3500 to 4500 tokens, short 32 to 512.

    Args:
        vocab_size: Token ids are drawn below it.
        queries: Number of queries.
        scale: All lengths are so many times as long.
        seed: Of lengths, order and token ids.
    """
    rng = random.Random(seed)  # noqa: S311 - a repeatable workload, not a secret
    kinds = [_KINDS[place % len(_KINDS)] for place in range(queries)]
    rng.shuffle(kinds)
    lengths = [tuple(scale * rng.randint(*_LENGTHS[length]) for length in kind) for kind in kinds]
    return [
        Request(tuple(rng.randrange(3, vocab_size) for _ in range(prompt)), output)
        for prompt, output in lengths
    ]


WORKLOADS: Final[dict[str, Callable[[int], list[Request]]]] = {"short": short, "mix": mix}
