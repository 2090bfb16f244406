"""A prompt, computed as the engine computes it apart from the batch, against its floor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from batond.bench.gpu.timing import Spread, Stopwatch
from batond.bench.gpu.witness import Seen, watch
from batond.daemon.engine.batch.prefill import Prefill

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.bench.gpu.ceilings import Ceilings
    from batond.bench.gpu.sizes import Sizes
    from batond.daemon.engine.batch.prefill import PromptBatch

PROMPT_TOKENS: Final = (64, 128, 256, 512, 1024, 2048)
_WARM_UP: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTime:
    """One length of prompt, in one chunk.

    Attributes:
        tokens: Of the prompt.
        time_ms: Of the forward, logits of the newest token included.
        slice_ms: Of making a slice of what was computed.
        compute_floor_ms: Operations at the rate of a large matrix product.
        weights_floor_ms: All weights once at the copy bandwidth.
        seen: What ran, in the profiler's eyes.
    """

    tokens: int
    time_ms: Spread
    slice_ms: Spread
    compute_floor_ms: float
    weights_floor_ms: float
    seen: Seen | None

    @property
    def of_floor(self) -> float:
        """Part of the higher floor that is reached."""
        return max(self.compute_floor_ms, self.weights_floor_ms) / self.time_ms.median


def measure(
    new_batch: Callable[[], PromptBatch],
    tokens: int,
    sizes: Sizes,
    ceilings: Ceilings,
    device: torch.device,
    *,
    rounds: int,
) -> PromptTime:
    """Compute random prompts of one length.

    Args:
        new_batch: Makes the engine's empty batch for a prompt.
        tokens: Of each prompt.
        sizes: Of the model.
        ceilings: Of the device.
        device: Where the model is.
        rounds: Prompts timed.
    """
    dice = torch.Generator().manual_seed(tokens)

    def prompt() -> list[int]:
        return torch.randint(sizes.vocab_size, (tokens,), generator=dice).tolist()

    forwards, slices = Stopwatch(device), Stopwatch(device)
    for _ in range(_WARM_UP + rounds):
        token_ids, prefill = prompt(), Prefill(new_batch())
        with forwards.lap():
            prefill.run(token_ids)
        with slices.lap():
            prefill.slice()
        del prefill
    token_ids, prefill = prompt(), Prefill(new_batch())
    return PromptTime(
        tokens=tokens,
        time_ms=Spread.of(forwards.take()[_WARM_UP:], 1e3),
        slice_ms=Spread.of(slices.take()[_WARM_UP:], 1e3),
        compute_floor_ms=1e3 * ceilings.compute_s(sizes.prefill_ops(tokens)),
        weights_floor_ms=1e3 * ceilings.read_s(sizes.step_weight_bytes),
        seen=watch(device, lambda: prefill.run(token_ids)),
    )
