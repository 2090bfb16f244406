"""The next token of every row, on the tensors of the whole batch.

Noise is counter-based: the number drawn for a token depends on (seed, position, token id) and on nothing
else, so neither batch mates, nor rows, nor parks change it, and nothing has to be saved when a query is
parked. Sampling is by the Gumbel-max trick: argmax(logits / temperature + Gumbel noise) has the softmax
distribution (Gumbel 1954; Maddison et al. 2014, "A* sampling").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from batond.daemon.engine.model.read_back import to_list
from batond.daemon.engine.sampling.tensors import on_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batond.daemon.requests.params import SamplingParams

_MASK32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Draw:
    """One row's request for a token.

    Attributes:
        params: The query's sampling parameters.
        seed: The query's 64-bit seed.
        position: Index of the output token to be drawn, from 0.
    """

    params: SamplingParams
    seed: int
    position: int


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Choose one token per row.

    Args:
        logits: float32, shape [len(draws), vocabulary].
        draws: One per row.

    Returns:
        Token ids, one per row.
    """
    chosen: list[int] = to_list(sample_on_device(logits, draws))
    return chosen


def sample_on_device(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """As `sample`, without waiting for the device: int64, shape [len(draws)]."""
    tokens = logits.argmax(dim=-1)
    noisy = [row for row, draw in enumerate(draws) if draw.params.temperature > 0.0]
    if noisy:
        index = on_device(noisy, torch.int64, logits.device)
        tokens[index] = _sample_noisy(logits[index], [draws[row] for row in noisy])
    return tokens


def _sample_noisy(logits: torch.Tensor, draws: list[Draw]) -> torch.Tensor:
    """Tokens by temperature, top-k, top-p, min-p and noise; shape [rows]."""
    device = logits.device
    temperature = on_device([draw.params.temperature for draw in draws], torch.float64, device)
    # float64: a temperature of 1e-6 must not overflow, and CPU and GPU must agree.
    scaled = logits.double() / temperature[:, None]
    scaled = scaled - scaled.amax(dim=-1, keepdim=True)
    scaled = _keep_near(_keep_top(scaled, draws), draws)
    noise = gumbel_noise(
        [draw.seed for draw in draws], [draw.position for draw in draws], logits.shape[-1], device
    )
    return (scaled + noise).argmax(dim=-1)


def _keep_top(scaled: torch.Tensor, draws: list[Draw]) -> torch.Tensor:
    """Set everything outside top-k and top-p to minus infinity; shape [rows, vocabulary]."""
    vocabulary = scaled.shape[-1]
    if all(draw.params.top_k == 0 and draw.params.top_p == 1.0 for draw in draws):
        return scaled
    device = scaled.device
    top_k = on_device(
        [min(draw.params.top_k or vocabulary, vocabulary) for draw in draws], torch.int64, device
    )
    top_p = on_device([draw.params.top_p for draw in draws], torch.float64, device)
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    beyond_k = torch.arange(vocabulary, device=device)[None, :] >= top_k[:, None]
    ordered = ordered.masked_fill(beyond_k, -torch.inf)
    probability = ordered.softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability  # Mass of the strictly likelier tokens.
    beyond_p = (before >= top_p[:, None]) & (top_p[:, None] < 1.0)
    beyond_p[:, 0] = False
    ordered = ordered.masked_fill(beyond_p, -torch.inf)
    return torch.empty_like(scaled).scatter_(-1, order, ordered)


def _keep_near(scaled: torch.Tensor, draws: list[Draw]) -> torch.Tensor:
    """Set everything below min-p of the likeliest (whose entry is 0) to minus infinity."""
    if all(draw.params.min_p == 0.0 for draw in draws):
        return scaled
    min_p = on_device([draw.params.min_p for draw in draws], torch.float64, scaled.device)
    return scaled.masked_fill(scaled < min_p.log()[:, None], -torch.inf)


def gumbel_noise(
    seeds: Sequence[int], positions: Sequence[int], vocabulary: int, device: torch.device
) -> torch.Tensor:
    """Standard Gumbel noise for every (row, token id).

    Args:
        seeds: One 64-bit seed per row.
        positions: Output index per row.
        vocabulary: Number of token ids.
        device: Where to compute; the result is the same everywhere up to rounding of the logarithm.

    Returns:
        float64, shape [rows, vocabulary].
    """
    low, high = [seed & _MASK32 for seed in seeds], [(seed >> 32) & _MASK32 for seed in seeds]
    places = [position & _MASK32 for position in positions]
    keys = on_device([*low, *high, *places], torch.int64, device).view(3, len(seeds))
    row_key = _mix(keys[0] ^ _mix(keys[1] ^ _mix(keys[2] + 0x9E3779B9 & _MASK32)))
    ids = torch.arange(vocabulary, dtype=torch.int64, device=device)
    bits = _mix(_mix(ids)[None, :] ^ row_key[:, None])
    uniform = (bits.double() + 0.5) / (1 << 32)  # In (0, 1): neither logarithm sees 0.
    return -torch.log(-torch.log(uniform))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Bijective 32-bit finalizer with low bias (Wellons, "lowbias32"), on int64 holding 32 bits."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)
