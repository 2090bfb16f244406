"""Draws random schedules: prompts of telling lengths, all kinds of parameters, any order of moves."""

from __future__ import annotations

import importlib.util
import random
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from batond.bench.families import VOCABULARY
from batond.bench.schedules import Arrival, Move, Request, Schedule
from batond.daemon.requests.params import SamplingParams

if TYPE_CHECKING:
    from batond.daemon.engine.local import LocalEngine

CLASSES = ("interactive", "standard", "batch")
TENANTS = ("lab", "archive", "shop")
DEFAULT_WINDOW_TOKENS = 8
LONGEST_PROMPT_TOKENS = 40
LONGEST_OUTPUT_TOKENS = 12
LONGEST_QUERY_TOKENS = LONGEST_PROMPT_TOKENS + LONGEST_OUTPUT_TOKENS
_CATALOGUE_SIZE = 240  # Requests a family's schedules share, so that most solo runs are made once.
_FRESH_ONCE_IN = 20
_WEIGHTS = {Move.STEP: 16, Move.PARK: 8, Move.RESUME: 5, Move.CANCEL: 1}


def edge_lengths(window_tokens: int) -> tuple[int, ...]:
    """Prompt lengths at which windows begin to matter."""
    window = window_tokens or DEFAULT_WINDOW_TOKENS
    return (1, window - 1, window, window + 1, 2 * window + 1)


class Draws:
    """Draws requests and schedules for a model.

    Args:
        engine: What is drawn for: its window and its end-of-sequence ids matter.
        replays: Some queries bring tokens along.
    """

    def __init__(self, engine: LocalEngine, *, replays: bool = True) -> None:
        self._lengths = edge_lengths(engine.model.window_tokens)
        self._vocabulary = min(VOCABULARY, engine.model.vocab_size)
        self._favourites = [*engine.model.eos_token_ids, 0, 2, 5]
        self._structured = importlib.util.find_spec("xgrammar") is not None
        self._replays = replays
        self._catalogue: dict[int, Request] = {}

    def schedule(self, rng: random.Random) -> Schedule:
        """A few queries and what happens to them."""
        arrivals = tuple(self._arrival(rng) for _ in range(rng.randrange(1, 7)))
        moves: list[tuple[Move, int]] = []
        for _ in arrivals:
            moves.append((Move.SUBMIT, 0))
            kinds = rng.choices(list(_WEIGHTS), weights=list(_WEIGHTS.values()), k=rng.randrange(12))
            moves += [(kind, rng.randrange(8)) for kind in kinds]
        return Schedule(arrivals, tuple(moves))

    def _arrival(self, rng: random.Random) -> Arrival:
        fresh = _once_in(rng, _FRESH_ONCE_IN)
        request = self.request(rng) if fresh else self.catalogued(rng.randrange(_CATALOGUE_SIZE))
        emitted = rng.randrange(1, 5) if self._replays and _once_in(rng, 10) else 0
        return Arrival(request, rng.choice(CLASSES), rng.choice(TENANTS), emitted)

    def catalogued(self, number: int) -> Request:
        """The request of a number: always the same."""
        if number not in self._catalogue:
            self._catalogue[number] = self.request(random.Random(number))  # noqa: S311 - not a secret
        return self._catalogue[number]

    def request(self, rng: random.Random) -> Request:
        """A prompt of a telling length, with a few parameters set."""
        longest = LONGEST_PROMPT_TOKENS if _once_in(rng, 5) else 14
        length = rng.choice([*self._lengths, rng.randrange(2, longest)])
        prompt = tuple(
            rng.choice(self._favourites) if _once_in(rng, 20) else rng.randrange(self._vocabulary)
            for _ in range(length)
        )
        return Request(prompt, self.sampling(rng), rng.randrange(1 << 62))

    def sampling(self, rng: random.Random) -> SamplingParams:
        """Parameters, most of them off."""
        count = rng.choice([1, 2, rng.randrange(3, 9), LONGEST_OUTPUT_TOKENS, LONGEST_OUTPUT_TOKENS])
        fields: dict[str, Any] = {"max_tokens": count, "ignore_eos": _once_in(rng, 2)}
        if _once_in(rng, 2):
            fields |= _noise(rng)
        if _once_in(rng, 3):
            fields |= _penalties(rng)
        if _once_in(rng, 2):
            fields |= {"logprobs": rng.randrange(4)}
        if _once_in(rng, 7):
            fields |= {"prompt_logprobs": rng.randrange(3)}
        if _once_in(rng, 3):
            fields |= {"stop_token_ids": tuple(rng.sample(range(self._vocabulary), rng.randrange(1, 6)))}
        if _once_in(rng, 5):
            fields |= {"min_tokens": rng.randrange(count + 1)}
        if _once_in(rng, 5):
            fields |= {
                "logit_bias": {rng.choice(self._favourites): 6.0, rng.randrange(self._vocabulary): -3.0}
            }
        if _once_in(rng, 5):
            fields |= {"stop": tuple(chr(rng.randrange(33, 127)) for _ in range(rng.randrange(1, 9)))}
        if self._structured and _once_in(rng, 20):
            fields |= {"regex": rng.choice(["[a-f]{3,9}", "(AB|BC)*x", "[^a-z]+"])}
        return SamplingParams(**fields)


def _once_in(rng: random.Random, times: int) -> bool:
    return rng.randrange(times) == 0


def _noise(rng: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {"temperature": rng.choice([0.5, 1.0, 2.0])}
    name, value = rng.choice([("top_k", 7), ("top_p", 0.8), ("min_p", 0.1), ("top_k", 0)])
    return {**fields, name: value}


def _penalties(rng: random.Random) -> dict[str, Any]:
    names = rng.sample(["repetition_penalty", "presence_penalty", "frequency_penalty"], rng.randrange(1, 4))
    values = {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": -0.9}
    return {name: values[name] for name in names}


def byte_tokenizer() -> Tokenizer:
    """One token per byte, for the tiny models' vocabulary: characters are split over tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCABULARY]
    tokenizer = Tokenizer(BPE(vocab={char: place for place, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
