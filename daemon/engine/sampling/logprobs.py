"""Log-probabilities of emitted and of prompt tokens.

They are of the model's own distribution: raw logits, before bias, penalties, bans, grammar, temperature and
truncation; in float64, so that a large vocabulary's sum loses nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batond.daemon.engine.model.read_back import to_list
from batond.daemon.wire.messages import TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], tops: Sequence[int]
) -> list[TokenLogprobs]:
    """Log-probabilities at several places, of one row or of many.

    Args:
        logits: Raw logits, shape [places, vocabulary].
        token_ids: The token that stands at each place.
        tops: How many of the likeliest tokens are wanted at each place.

    Returns:
        One per place, the likeliest tokens first.
    """
    every = logits.double().log_softmax(dim=-1)
    chosen = to_list(every.gather(-1, every.new_tensor(token_ids).long()[:, None])[:, 0])
    values, ids = every.topk(min(max(tops), every.shape[-1]), dim=-1)
    likeliest = zip(to_list(ids), to_list(values), strict=True)
    return [
        TokenLogprobs(logprob=logprob, top=list(zip(row_ids, row_values, strict=True))[:top])
        for logprob, top, (row_ids, row_values) in zip(chosen, tops, likeliest, strict=True)
    ]
