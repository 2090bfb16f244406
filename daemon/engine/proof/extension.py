"""Asks the model itself whether a kept slice may be extended by a prompt: what sessions rest on.

    slice      [ prompt, in one forward | decoded, token by token ]
    cut        [ half the prompt ]
    turn 2     [ from the slice, or from its cut | computed in one forward ]
    expected   [ all in one forward ]

Parks don't need it: what was decoded is only ever followed by decoding, and nothing is cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batond.daemon.engine.model.causal import MODEL_ERRORS
from batond.daemon.engine.proof.probe import relative_error, tolerance
from batond.offload.slice import KVSlice

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.engine.batch.prefill import PromptBatch
    from batond.daemon.engine.batch.protocol import Batch
    from batond.daemon.engine.model.causal import CausalModel

_MOST_TOKENS = 60  # Beyond the windows and selections of tiny models, and cheap for large ones.
_FEWEST_TOKENS = 6
_MOST_DECODED = 6
#: A model that selects tokens by score finds equal scores where tokens repeat, as answers do; what it selects
#: then may depend on how many are computed together.
_PERIOD = 7


def extends_exactly(
    model: CausalModel, batch: Batch, new_prompt_batch: Callable[[], PromptBatch], most_tokens: int
) -> bool:
    """Whether the logits after an extended slice are those of the whole prompt, but for rounding.

    Args:
        model: The model.
        batch: The decode batch; empty, and so it is left.
        new_prompt_batch: Makes an empty batch of one row for a prompt.
        most_tokens: Longest query the batch takes.
    """
    try:
        return _extension_error(model, batch, new_prompt_batch, most_tokens) <= tolerance(model)
    except MODEL_ERRORS:
        return False


def _extension_error(
    model: CausalModel, batch: Batch, new_prompt_batch: Callable[[], PromptBatch], most_tokens: int
) -> float:
    """Largest relative difference of the logits behind the last token; infinite without room to ask."""
    count = min(_MOST_TOKENS, most_tokens)
    if count < _FEWEST_TOKENS:
        return float("inf")
    varied = range(count // 4)
    places = [*varied, *(place % _PERIOD for place in range(count - len(varied)))]
    tokens = [(3 + 7 * place + place * place) % model.vocab_size for place in places]
    prompt_tokens = count // 2
    kept_tokens = prompt_tokens + min(count // 6, _MOST_DECODED)
    kept = _decoded(batch, new_prompt_batch, tokens[:kept_tokens], prompt_tokens)
    slices = [kept]
    if not batch.layout.state_slots:
        slices.append(KVSlice(kept.tokens[: prompt_tokens // 2], kept.state))
    expected = new_prompt_batch().step({0: tokens})[0]
    worst = 0.0
    for kv in slices:
        extended = new_prompt_batch()
        extended.embed(0, kv)
        logits = extended.step({0: tokens[kv.n_tokens :]})[0]
        worst = max(worst, relative_error(logits, expected))
    return worst


def _decoded(
    batch: Batch, new_prompt_batch: Callable[[], PromptBatch], tokens: list[int], prompt_tokens: int
) -> KVSlice:
    """The slice of a query whose tokens behind the prompt were decoded one by one."""
    prompt = new_prompt_batch()
    prompt.step({0: tokens[:prompt_tokens]})
    batch.embed(0, prompt.extract(0))
    try:
        for token in tokens[prompt_tokens:]:
            batch.step({0: [token]})
        return batch.extract(0)
    finally:
        batch.free(0)
