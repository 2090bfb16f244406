"""Asks the model itself whether a way to serve it is exact.

The criterion is transformers' own `generate`, alone: two queries are generated there, then served by the
batch under test beside each other, parked and embedded elsewhere, and their logits compared step by step.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from batond.daemon.engine.model.causal import MODEL_ERRORS, first_line
from batond.daemon.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from batond.daemon.engine.batch.prefill import PromptBatch
    from batond.daemon.engine.batch.protocol import Batch
    from batond.daemon.engine.model.causal import CausalModel
    from batond.offload.slice import KVSlice

_PROMPT_TOKENS = (5, 13, 1)  # The query under test, a longer mate, and the shortest: all embedding cases.
_PERIOD = 7  # Of the longer mate's tokens: what repeats scores equally, which a selection may tell apart.
_STEPS = 9
_STEPS_AGAIN = 3
SHARED_ROWS = 3
LONGEST_WINDOW_TOKENS = 512  # A wider window is too dear to be crossed at every start.
_THRESHOLDS = re.compile("window|top_?k|block|chunk|floor|keep|sparse|stride|budget|compress|segment|bucket")
_NO_THRESHOLDS = re.compile("expert|moe|layer|head|num_|router|group|vocab")
_RELATIVE_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 1e-1}


@contextlib.contextmanager
def memory_named() -> Iterator[None]:
    """Let a lack of memory be called so, and not be taken for a fault of the model.

    Raises:
        ConfigError: The device has no memory left for the probe inside.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the device has no memory left to probe the model: {first_line(error)}; take a smaller model, or"
            " give the device more room"
        ) from error


@dataclass(frozen=True, slots=True)
class Reference:
    """One query as transformers generates it alone.

    Attributes:
        prompt: Its prompt.
        tokens: What was generated.
        logits: float32, shape [len(tokens), vocabulary]: entry i stands behind prompt + tokens[:i].
    """

    prompt: list[int]
    tokens: list[int]
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class Way:
    """A way of serving under test.

    Attributes:
        batch: Makes an empty decode batch of that many rows.
        prompt: Makes an empty batch of one row for a prompt.
    """

    batch: Callable[[int], Batch]
    prompt: Callable[[], PromptBatch]


#: Returns the largest relative difference between a way of serving and the references.
Question = Callable[[Way, "References"], float]
References = tuple[Reference, ...]


def tolerance(model: CausalModel) -> float:
    """Largest relative difference of logits that rounding explains."""
    return _RELATIVE_TOLERANCE.get(model.dtype, 1e-1)


def longest_threshold(model: CausalModel) -> int:
    """The longest length at which the model may begin to work otherwise and that is cheap to cross; 0: none.

    Windows and numbers in the configuration whose names sound like a window, a block or a selection. They
    decide on the length of a probe query and on nothing else.
    """
    config = model.config.get_text_config(decoder=True)
    named = [
        value
        for name, value in vars(config).items()
        if _THRESHOLDS.search(name) and not _NO_THRESHOLDS.search(name) and type(value) is int
    ]
    return max(
        (tokens for tokens in (*named, model.window_tokens) if tokens <= LONGEST_WINDOW_TOKENS), default=0
    )


def references(model: CausalModel) -> References:
    """The probe queries; the second one's prompt is longer than what the configuration names as a length.

    Raises:
        UnsupportedModelError: The model can't generate, or not twice the same.
    """
    short, long, shortest = _PROMPT_TOKENS
    long = max(long, longest_threshold(model) + 4)
    room = model.max_context_tokens - _STEPS - 1
    found = tuple(
        _generate(model, min(length, room), stride, period)
        for length, stride, period in ((short, 7, short), (long, 11, _PERIOD), (shortest, 5, 1))
    )
    again, first = _generate(model, shortest, 5, 1, _STEPS_AGAIN).logits, found[2].logits[:_STEPS_AGAIN]
    if not torch.equal(again, first) and not torch.allclose(
        again, first, rtol=tolerance(model), atol=tolerance(model)
    ):
        raise UnsupportedModelError(
            "transformers' own generate gives other logits the second time: the model keeps state outside of"
            " its cache, or draws at random"
        )
    return found


def shared_error(way: Way, queries: References) -> float:
    """Largest relative difference of queries served beside each other, one parked and moved."""
    mine, mate, last = lives = [_Life(reference) for reference in queries]
    batch = way.batch(SHARED_ROWS)
    batch.embed(0, mine.prefill(way.prompt()))
    _advance(batch, {0: mine}, 2)
    batch.embed(1, mate.prefill(way.prompt()))
    _advance(batch, {0: mine, 1: mate}, 3)
    parked = _take(batch, 0)
    _advance(batch, {1: mate}, 2)
    batch.embed(0, last.prefill(way.prompt()))
    _advance(batch, {1: mate, 0: last}, 1)
    batch.embed(2, parked)
    _advance(batch, {1: mate, 2: mine, 0: last}, 2)
    batch.free(1)
    _advance(batch, {2: mine, 0: last}, mine.left)
    batch.free(2)
    _advance(batch, {0: last}, last.left)
    return _worst(lives)


def alone_error(way: Way, queries: References) -> float:
    """The same for queries that take turns in a batch of one row."""
    mine, mate, last = lives = [_Life(reference) for reference in queries]
    batch = way.batch(1)
    batch.embed(0, mine.prefill(way.prompt()))
    _advance(batch, {0: mine}, 3)
    parked = _take(batch, 0)
    batch.embed(0, mate.prefill(way.prompt()))
    _advance(batch, {0: mate}, 4)
    batch.free(0)
    batch.embed(0, last.prefill(way.prompt()))
    _advance(batch, {0: last}, last.left)
    batch.free(0)
    batch.embed(0, parked)
    _advance(batch, {0: mine}, mine.left)
    return _worst(lives)


def chunk_error(way: Way, queries: References) -> float:
    """Largest relative difference of prompts computed in chunks, parked between two of them."""
    worst = 0.0
    for reference in queries:
        life, batch = _Life(reference), way.prompt()
        length = len(reference.prompt)
        bounds = sorted({0, 1, length // 2, length - 1, length})  # Single tokens at both ends, too.
        for first, last in itertools.pairwise(bounds):
            kv = batch.extract(0) if first else None
            if kv is not None:
                batch = way.prompt()
                batch.embed(0, kv)
            logits = batch.step({0: reference.prompt[first:last]})
        life.note(logits[0])
        _advance(batch, {0: life}, 1)
        worst = max(worst, life.error)
    return worst


def replay_error(way: Way, queries: References) -> float:
    """Largest relative difference when prompt and output so far are computed in one forward."""
    worst = 0.0
    for reference in queries:
        life, batch = _Life(reference, done=_STEPS // 2 - 1), way.prompt()
        life.note(batch.step({0: [*reference.prompt, *reference.tokens[: life.done + 1]]})[0])
        _advance(batch, {0: life}, 1)
        worst = max(worst, life.error)
    return worst


def alone_references(way: Way, queries: References) -> References:
    """The same queries with the logits that a way gives them alone: what is deterministic gives no others."""
    found = []
    for reference in queries:
        life, batch = _Life(reference), way.batch(SHARED_ROWS)
        batch.embed(1, life.prefill(way.prompt()))
        _advance(batch, {1: life}, life.left)
        found.append(replace(reference, logits=torch.stack(life.logits)))
    return tuple(found)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """How far logits are off; infinite for what is not a number, which must never pass for a small error."""
    error = float((found - expected).norm() / expected.norm())
    return error if error == error else float("inf")  # noqa: PLR0124 - NaN alone differs from itself


class _Life:
    """One probe query on its way through batches."""

    def __init__(self, reference: Reference, done: int = -1) -> None:
        self.reference = reference
        self.done = done  # Index of the newest logits noted.
        self.error = 0.0
        self.logits: list[torch.Tensor] = []

    @property
    def left(self) -> int:
        return len(self.reference.tokens) - 1 - self.done

    def prefill(self, batch: PromptBatch) -> KVSlice:
        self.note(batch.step({0: self.reference.prompt})[0])
        return batch.extract(0)

    def note(self, logits: torch.Tensor) -> None:
        self.done += 1
        expected = self.reference.logits[self.done]
        self.error = max(self.error, relative_error(logits, expected))
        self.logits.append(logits.clone())  # The batch may overwrite them.


def _advance(batch: Batch, lives: dict[int, _Life], steps: int) -> None:
    for _ in range(steps):
        logits = batch.step({row: [life.reference.tokens[life.done]] for row, life in lives.items()})
        for row, life in lives.items():
            life.note(logits[row])


def _worst(lives: list[_Life]) -> float:
    return max(life.error for life in lives)


def _take(batch: Batch, row: int) -> KVSlice:
    kv = batch.extract(row)
    batch.free(row)
    return kv


def _generate(
    model: CausalModel, prompt_tokens: int, stride: int, period: int, steps: int = _STEPS
) -> Reference:
    places = [place % period for place in range(prompt_tokens)]
    prompt = [(3 + stride * place + place * place) % model.vocab_size for place in places]
    ids = torch.tensor([prompt], device=model.device)
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": steps,
        "min_new_tokens": None,
        "do_sample": False,
        "num_beams": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    try:
        with memory_named():
            out = model.model.generate(ids, **options)
    except MODEL_ERRORS as error:
        raise UnsupportedModelError(
            f"transformers' own generate fails: {type(error).__name__}: {first_line(error)}"
        ) from error
    logits = torch.stack([step[0] for step in out.logits]).float()
    return Reference(prompt, out.sequences[0, len(prompt) :].tolist(), logits)
