"""Asks the model itself whether prompts packed into one forward come out as each does alone."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from batond.daemon.engine.model.causal import MODEL_ERRORS, first_line
from batond.daemon.engine.proof.probe import relative_error, tolerance
from batond.daemon.engine.step.packing import DEFAULT_PACK_TOKENS, Packer
from batond.daemon.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from batond.daemon.engine.batch.prefill import PromptBatch
    from batond.daemon.engine.batch.prompt_steps import PromptSteps
    from batond.daemon.engine.model.causal import CausalModel
    from batond.daemon.engine.model.layout import RecordLayout
    from batond.daemon.engine.proof.probe import Reference, References
    from batond.offload.slice import KVSlice

_STEPS = 2  # Decoded behind a packed prompt: its slice must be as good as its logits.

_log = logging.getLogger(__name__)


def find_packer(
    model: CausalModel,
    layout: RecordLayout,
    new_prompt_batch: Callable[[], PromptBatch],
    queries: References,
    *,
    most_tokens: int | None = None,
    steps: PromptSteps | None = None,
) -> Packer | None:
    """A packer for the model, if packed prompts come out as each does alone.

    Args:
        model: The model, its recipe chosen.
        layout: Byte layout of the batch that takes the slices.
        new_prompt_batch: Makes an empty batch of one row.
        queries: What transformers generates alone: the criterion.
        most_tokens: Tokens of one forward; None takes a default.
        steps: Captured forwards, which are tried first.
    """
    reason = _needless_to_try(model, layout)
    kinds: list[tuple[bool, PromptSteps | None]] = [(True, None), (False, None)]
    if not model.takes_logits_to_keep:
        kinds = [(False, None)]
    elif steps is not None:
        kinds = [(True, steps), *kinds]
    for sparing, captured in [] if reason else kinds:
        packer = Packer(model, layout, most_tokens or DEFAULT_PACK_TOKENS, sparing=sparing, steps=captured)
        reason = _fault(model, packer, new_prompt_batch, queries)
        if not reason:
            return packer
    _log.info("prompts of %s are not packed: %s", model.name, reason)
    return None


def _needless_to_try(model: CausalModel, layout: RecordLayout) -> str:
    if not model.takes_cache:
        return "the model takes no cache"
    if model.recipe.own_cache:
        return "the model makes its cache itself"
    if layout.state_slots or not layout.token_slots:
        return "its state mixes all tokens of a row"
    return ""


def _fault(
    model: CausalModel, packer: Packer, new_prompt_batch: Callable[[], PromptBatch], queries: References
) -> str:
    """Why the model can't pack; "" if it can."""
    try:
        found = _pack_error(model, packer, new_prompt_batch, queries)
    except (*MODEL_ERRORS, UnsupportedModelError) as error:
        return f"{type(error).__name__}: {first_line(error)}"
    allowed = tolerance(model)
    return "" if found <= allowed else f"logits differ by {found:.1e} (allowed {allowed:.0e})"


def _pack_error(
    model: CausalModel, packer: Packer, new_prompt_batch: Callable[[], PromptBatch], queries: References
) -> float:
    """Largest relative difference of packed prompts' logits, and of steps decoded from their slices.

    Short prompts are packed in two orders; then the longest that may be packed, up to the last column.
    """
    lives = [query for query in queries if len(query.prompt) <= packer.most_prompt_tokens]
    errors = []
    for pack in (lives, lives[::-1]):
        packed = packer.run([life.prompt for life in pack])
        errors += [
            relative_error(logits, life.logits[0]) for life, logits in zip(pack, packed.logits, strict=True)
        ]
    for life, kv in zip(lives[::-1], packed.slices, strict=True):
        errors += _step_errors(new_prompt_batch(), life, kv)
    shortest = min(lives, key=lambda life: len(life.prompt))
    room = packer.most_tokens - len(shortest.prompt)
    long = [
        (2 + 13 * place + place * place) % model.vocab_size
        for place in range(min(packer.most_prompt_tokens, room))
    ]
    alone = new_prompt_batch().step({0: long})[0]
    full = packer.run([*[long] * (room // len(long)), shortest.prompt])
    expected: Sequence[torch.Tensor] = [*[alone] * (room // len(long)), shortest.logits[0]]
    errors += [relative_error(*pair) for pair in zip(full.logits, expected, strict=True)]
    return max(errors)


def _step_errors(batch: PromptBatch, life: Reference, kv: KVSlice) -> list[float]:
    batch.embed(0, kv)
    return [
        relative_error(batch.step({0: [life.tokens[step]]})[0], life.logits[step + 1])
        for step in range(_STEPS)
    ]
