"""Asks the model itself whether captured prompts come out as those computed kernel by kernel."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from batond.daemon.engine.batch.prefill import LOGITS_TOKENS
from batond.daemon.engine.batch.prompt_batch import CapturedPrompt
from batond.daemon.engine.batch.prompt_steps import PromptSteps, prompt_sizes
from batond.daemon.engine.model.causal import MODEL_ERRORS, first_line
from batond.daemon.engine.proof.probe import Way, chunk_error, relative_error, replay_error
from batond.daemon.errors import UnsupportedModelError

if TYPE_CHECKING:
    from batond.daemon.engine.batch.card_steps import CardUse
    from batond.daemon.engine.model.layout import RecordLayout
    from batond.daemon.engine.proof.probe import References
    from batond.daemon.engine.proof.trial import Trial

_FEWER_TOKENS = 3  # Than there is room for: pads behind them must change nothing.

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptProof:
    """How prompts are computed.

    Attributes:
        way: The padded way, or the same with captured prompts.
        steps: Captured forwards; None without.
        remark: What an operator should know of it, in words; "" if there is nothing.
    """

    way: Way
    steps: PromptSteps | None = None
    remark: str = ""


def prove_prompts(
    trial: Trial, layout: RecordLayout, padded: Way, card: CardUse, most_tokens: int | None
) -> PromptProof:
    """Capture prompts where that is exact; else they stay as they are.

    Args:
        trial: Of the model.
        layout: Of its cache.
        padded: How prompts are computed kernel by kernel.
        card: What of a card may be used; without graphs nothing is captured.
        most_tokens: Of a chunk; None is no bound.
    """
    if not card.graphs:
        return PromptProof(padded)
    if layout.state_slots or not layout.keys_and_values_only:
        return PromptProof(padded, remark="; prompts kernel by kernel: the cache holds a state")
    limits = [trial.model.max_context_tokens, most_tokens, LOGITS_TOKENS if trial.deterministic else None]
    sizes = prompt_sizes(min(limit for limit in limits if limit is not None))
    why = ""
    # Run again to note log-probabilities, a compiled part may choose another of its programs, of other bits.
    for compiled in (True, False) if card.compiled and not trial.deterministic else (False,):
        kept, trial.reasons = trial.reasons, []
        steps = _proved(trial, layout, padded, sizes, compiled=compiled)
        said, trial.reasons = trial.why, kept
        if steps is not None:
            remark = f"; prompts as graphs of {', '.join(map(str, steps.graphs.sizes))} tokens"
            remark += ", compiled" if compiled else f" (not compiled: {why})" if why else ""
            remark += f" ({steps.graphs.why_no_more})" if steps.graphs.why_no_more else ""
            return PromptProof(replace(padded, prompt=partial(CapturedPrompt, steps)), steps, remark)
        why = said
    _log.warning("prompts are computed kernel by kernel: %s", why)
    return PromptProof(padded, remark=f"; prompts kernel by kernel: {why}")


def _proved(
    trial: Trial, layout: RecordLayout, padded: Way, sizes: tuple[int, ...], *, compiled: bool
) -> PromptSteps | None:
    """Captured prompts that hold all that prompts must hold; None, and a reason kept in the trial."""
    try:
        steps = PromptSteps(trial.model, layout, sizes, compiled=compiled)
    except (*MODEL_ERRORS, UnsupportedModelError) as error:
        trial.reasons.append(f"{type(error).__name__}: {first_line(error)}")
        return None
    if not steps.graphs.sizes:
        trial.reasons.append(steps.graphs.why_no_more)
        return None
    way = replace(padded, prompt=partial(CapturedPrompt, steps))

    def sizes_error(tried: Way, _queries: References) -> float:
        return _sizes_error(trial, steps, tried, padded)

    # What holds kernel by kernel must hold captured: nothing is given up for speed. Chunks must hold whatever
    # that way can do: a captured prompt is cut at its largest forward.
    holds = (
        trial.error(sizes_error, way, "captured prompts") is not None
        and trial.error(chunk_error, way, "captured chunks") is not None
        and (trial.holds(replay_error, way) or not trial.holds(replay_error, padded))
        and trial.chunks_hold(layout, way)
        and trial.far_chunks_hold(layout, way)
    )
    if not holds and not trial.reasons:
        trial.reasons.append("behind windows, or far away, captured prompts come out otherwise")
    return steps if holds else None


def _sizes_error(trial: Trial, steps: PromptSteps, captured: Way, padded: Way) -> float:
    """Largest relative difference of logits behind prompts of all sizes, and behind a few tokens more."""
    vocabulary, worst = trial.model.vocab_size, 0.0
    dice = torch.Generator().manual_seed(1)
    for size in steps.graphs.sizes:
        count = min(size, trial.model.max_context_tokens) - 2 * _FEWER_TOKENS
        tokens = torch.randint(vocabulary, (count + _FEWER_TOKENS,), generator=dice).tolist()
        mine, theirs = captured.prompt(), padded.prompt()
        for part in (tokens[:count], tokens[count:]):
            found, expected = (batch.step({0: part})[0] for batch in (mine, theirs))
            worst = max(worst, relative_error(found, expected))
    return worst
