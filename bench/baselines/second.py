"""A second device that computes prompts and hands their KV over (DistServe, Splitwise).

The prompt is really computed there and its slice really crosses; when both are done is told by the costs, so
that the two devices work beside each other in virtual time whatever this machine can do.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batond.daemon.engine.batch.padded import PaddedBatch
from batond.offload.slice import KVSlice

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from batond.bench.baselines.groups import Job
    from batond.daemon.engine.model.causal import CausalModel
    from batond.daemon.engine.model.layout import RecordLayout
    from batond.daemon.simulator.costs import StepCosts


@dataclass(frozen=True, slots=True, order=True)
class Handed:
    """A prompt that was computed elsewhere.

    Attributes:
        here_s: When its slice is on the device that decodes.
        seq: Order of arrival; breaks ties.
        first_s: When its first token was there.
        job: Whose.
        prompt: Its token ids.
        kv: Its slice.
        logits: Behind its last token, float32, shape [1, vocabulary].
    """

    here_s: float
    seq: int
    first_s: float = field(compare=False)
    job: Job = field(compare=False)
    prompt: list[int] = field(compare=False)
    kv: KVSlice = field(compare=False)
    logits: torch.Tensor = field(compare=False)


class SecondDevice:
    """Computes one prompt after the other.

    Args:
        model: There; may be the same one.
        layout: Of the records.
        costs: Of prompts.
        byte_s: Seconds a byte of KV on the link.
        overlapped: Layers cross while the next ones are computed: only the last one's KV is waited for.
    """

    def __init__(
        self, model: CausalModel, layout: RecordLayout, costs: StepCosts, byte_s: float, *, overlapped: bool
    ) -> None:
        self._model, self._layout, self._costs = model, layout, costs
        layers = int(model.config.num_hidden_layers)
        self._byte_s = byte_s / layers if overlapped else byte_s
        self._free_s, self._taken = 0.0, 0
        self._handed: list[Handed] = []

    @property
    def next_s(self) -> float | None:
        """When the next slice crosses over; None is never."""
        return self._handed[0].here_s if self._handed else None

    def take(self, job: Job, prompt: list[int]) -> None:
        """Compute a prompt as soon as the device is free."""
        batch = PaddedBatch(self._model, 1, self._layout)
        logits = batch.step({0: prompt})
        kv = batch.extract(0)
        batch.close()
        self._free_s = max(self._free_s, job.at_s) + self._costs.prompts_s(len(prompt))
        here_s = self._free_s + len(prompt) * self._costs.kv_token_bytes * self._byte_s
        self._taken += 1
        heapq.heappush(self._handed, Handed(here_s, self._taken, self._free_s, job, prompt, kv, logits))

    def give(self, now_s: float) -> list[Handed]:
        """Those whose slices are here by now."""
        given = []
        while self._handed and self._handed[0].here_s <= now_s:
            given.append(heapq.heappop(self._handed))
        return given


class HandedPrompt(PaddedBatch):
    """Takes the place of a prompt's computation where it was done elsewhere."""

    def __init__(
        self, model: CausalModel, layout: RecordLayout, handed: Mapping[tuple[int, ...], Handed]
    ) -> None:
        super().__init__(model, 1, layout)
        self._prompts = handed

    def step(self, tokens: Mapping[int, Sequence[int]], *, all_positions: bool = False) -> torch.Tensor:
        """As of a batch of one row that computes the whole prompt; only the newest position's logits."""
        del all_positions
        one = self._prompts[tuple(tokens[0])]
        device = self._model.device
        self.embed(0, KVSlice(one.kv.tokens.to(device), one.kv.state.to(device)))
        return one.logits.to(device)
