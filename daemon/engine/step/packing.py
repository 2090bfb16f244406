"""Several short prompts in one forward, without padding between them.

    column      0                                   total
    row 0     [ a0 a1 a2 a3 | b0 b1 | c0 c1 c2 c3 c4 ]     positions restart with every prompt
    mask        a sees a, b sees b, c sees c               block-diagonal and causal

A forward over one prompt of sixteen tokens costs nearly what one over a hundred costs: both read all weights
once. Prompts no longer than the narrowest sliding window are right under one mask for all layers, because
such a window hides none of their tokens. Captured forwards (`batch/prompt_steps.py`) need no mask: their
kernel knows whose a token is, windows included. Whether a model honours all that, `proof/packing.py` asks the
model itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import DynamicCache

from batond.daemon.engine.batch.prompt_inputs import MOST_PARTS, Part
from batond.daemon.engine.model.recipe import MaskForm, Recipe
from batond.offload.slice import KVSlice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batond.daemon.engine.batch.prompt_steps import PromptSteps
    from batond.daemon.engine.model.causal import CausalModel
    from batond.daemon.engine.model.layout import RecordLayout

DEFAULT_PACK_TOKENS = 512
LEAST_PACK_TOKENS = 64  # The probe's prompts must fit.
MOST_PACK_TOKENS = 1024  # The mask, and an eager model's scores, grow with the square of it.
_FINISHED_MASK = Recipe(mask=MaskForm.COLUMNS)  # The mask reaches the model as it is given.
_WINDOW_FIELDS = ("sliding_window", "attention_chunk_size", "window_size")


@dataclass(frozen=True, slots=True)
class Packed:
    """What one forward computed.

    Attributes:
        slices: The KV of each prompt, in the order in which they were given.
        logits: float32, shape [prompts, vocabulary]: those behind each prompt's last token.
    """

    slices: list[KVSlice]
    logits: torch.Tensor


class Packer:
    """Computes short prompts together; made by `proof.packing.find_packer`, which proves that it may.

    Args:
        model: The model.
        layout: Byte layout of its cache.
        most_tokens: Tokens of one forward.
        sparing: The model computes logits at the places that are named; otherwise at all.
        steps: Captured forwards; None computes kernel by kernel.

    Attributes:
        most_tokens: As given, within bounds and the model's context.
        most_prompt_tokens: Tokens of the longest prompt that may be packed.
        most_prompts: Prompts of one forward.
    """

    def __init__(
        self,
        model: CausalModel,
        layout: RecordLayout,
        most_tokens: int,
        *,
        sparing: bool,
        steps: PromptSteps | None = None,
    ) -> None:
        self.most_tokens = min(
            max(most_tokens, LEAST_PACK_TOKENS), MOST_PACK_TOKENS, model.max_context_tokens
        )
        if steps is not None:
            self.most_tokens = min(self.most_tokens, steps.most_tokens)
        half = self.most_tokens // 2  # A longer prompt fills a forward well enough alone.
        window = _narrowest_window(model) if steps is None else 0
        self.most_prompt_tokens = min(half, window or half)
        self.most_prompts = self.most_tokens if steps is None else MOST_PARTS
        self._steps = steps
        self._model = model
        self._layout = layout
        self._sparing = sparing

    def packs(self, lengths: Sequence[int]) -> list[list[int]]:
        """Divide prompts into packs.

        Args:
            lengths: Tokens of every prompt.

        Returns:
            Indices of the prompts of every pack, in order. A prompt that is too long stands alone.
        """
        packs: list[list[int]] = []
        room = 0
        for index, length in enumerate(lengths):
            if length > self.most_prompt_tokens:
                packs.append([index])
                room = 0
            elif length > room or len(packs[-1]) == self.most_prompts:
                packs.append([index])
                room = self.most_tokens - length
            else:
                packs[-1].append(index)
                room -= length
        return packs

    def run(self, prompts: Sequence[Sequence[int]]) -> Packed:
        """Compute whole prompts in one forward.

        Args:
            prompts: Token ids; none is empty.

        Raises:
            ValueError: A prompt is longer than `most_prompt_tokens`, or all together than `most_tokens`.
        """
        lengths = [len(prompt) for prompt in prompts]
        if max(lengths) > self.most_prompt_tokens or sum(lengths) > self.most_tokens:
            raise ValueError(f"prompts of {lengths} tokens don't fit into a pack of {self.most_tokens}")
        device = self._model.device
        if self._steps is not None:
            return self._run_captured(self._steps, prompts)
        ends = list(accumulate(lengths))
        last = torch.tensor(ends, device=device) - 1
        cache = self._model.new_cache()
        logits = self._model.forward(
            torch.tensor([[token for prompt in prompts for token in prompt]], device=device),
            block_mask(lengths, self._model.dtype, device),
            torch.cat([torch.arange(length, device=device) for length in lengths])[None],
            cache,
            logits_to_keep=last if self._sparing else None,
            recipe=_FINISHED_MASK,
        )[0]
        slices = [
            self._layout.pack(cache, 0, torch.arange(first, end, device=device))
            for first, end in pairwise([0, *ends])
        ]
        return Packed(slices, logits if self._sparing else logits[last])

    def _run_captured(self, steps: PromptSteps, prompts: Sequence[Sequence[int]]) -> Packed:
        """Have one forward write every prompt's slice."""
        device, record_bytes = self._model.device, self._layout.record_bytes
        slices = [
            KVSlice(
                torch.empty(len(prompt), record_bytes, dtype=torch.uint8, device=device),
                torch.empty(0, dtype=torch.uint8, device=device),
            )
            for prompt in prompts
        ]
        parts = [Part(prompt, 0, kv.tokens.data_ptr()) for prompt, kv in zip(prompts, slices, strict=True)]
        return Packed(slices, steps.run(parts))


def block_mask(lengths: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The finished mask of a pack, added to the scores.

    Args:
        lengths: Tokens of every prompt.
        dtype: Of the model.
        device: Of the model.

    Returns:
        Shape [1, 1, tokens, tokens]: 0 where a token sees another one, the dtype's least number elsewhere.
    """
    counts = torch.tensor(lengths, device=device)
    owner = torch.arange(len(lengths), device=device).repeat_interleave(counts)
    visible = (owner[:, None] == owner[None, :]).tril()
    mask = torch.zeros(visible.shape, dtype=dtype, device=device)
    return mask.masked_fill(~visible, torch.finfo(dtype).min)[None, None]


def _narrowest_window(model: CausalModel) -> int:
    """Tokens of the narrowest window or chunk that the cache or the configuration tells of; 0 without one."""
    config = model.config.get_text_config(decoder=True)
    told = [getattr(config, field, None) for field in _WINDOW_FIELDS]
    told += [
        getattr(layer, "sliding_window", None)
        for layer in DynamicCache(config=model.config).layers
        if getattr(layer, "is_sliding", False)
    ]
    return min((int(tokens) for tokens in told if isinstance(tokens, int) and tokens > 0), default=0)
