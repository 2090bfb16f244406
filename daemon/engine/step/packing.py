"""Several short prompts in one forward, without padding between them.

    column      0                                   total
    row 0     [ a0 a1 a2 a3 | b0 b1 | c0 c1 c2 c3 c4 ]     positions restart with every prompt
    mask        a sees a, b sees b, c sees c               block-diagonal and causal

A forward over one prompt of sixteen tokens costs nearly what one over a hundred costs: both read all weights
once. Prompts no longer than the narrowest sliding window are right under one mask for all layers, because
such a window hides none of their tokens. Whether a model honours the mask is proved on the model itself.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache

from batond.daemon.engine.model.recipe import MaskForm, Recipe
from batond.daemon.engine.proof.probe import MODEL_ERRORS, first_line, relative_error, tolerance
from batond.daemon.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from batond.daemon.engine.batch.prefill import PromptBatch
    from batond.daemon.engine.model.causal import CausalModel
    from batond.daemon.engine.model.layout import RecordLayout
    from batond.offload.slice import KVSlice

DEFAULT_PACK_TOKENS = 512
LEAST_PACK_TOKENS = 64  # The probe's prompts must fit.
MOST_PACK_TOKENS = 1024  # The mask, and an eager model's scores, grow with the square of it.
_FINISHED_MASK = Recipe(mask=MaskForm.COLUMNS)  # The mask reaches the model as it is given.
_PROBE_TOKENS = (5, 13, 1)
_PROBE_STEPS = 2
_WINDOW_FIELDS = ("sliding_window", "attention_chunk_size", "window_size")

_log = logging.getLogger(__name__)


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
    """Computes short prompts together; made by `find_packer`, which proves that it may.

    Args:
        model: The model.
        layout: Byte layout of its cache.
        most_tokens: Tokens of one forward.
        sparing: The model computes logits at the places that are named; otherwise at all.

    Attributes:
        most_tokens: As given, within bounds and the model's context.
        most_prompt_tokens: Tokens of the longest prompt that may be packed.
    """

    def __init__(self, model: CausalModel, layout: RecordLayout, most_tokens: int, *, sparing: bool) -> None:
        self.most_tokens = min(
            max(most_tokens, LEAST_PACK_TOKENS), MOST_PACK_TOKENS, model.max_context_tokens
        )
        half = self.most_tokens // 2  # A longer prompt fills a forward well enough alone.
        self.most_prompt_tokens = min(half, _narrowest_window(model) or half)
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
            elif length > room:
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
        ends = list(accumulate(lengths))
        last = torch.tensor(ends, device=device) - 1
        cache = self._model.new_cache()
        with _logits_at(self._model.model, last) if self._sparing else contextlib.nullcontext():
            logits = self._model.forward(
                torch.tensor([[token for prompt in prompts for token in prompt]], device=device),
                block_mask(lengths, self._model.dtype, device),
                torch.cat([torch.arange(length, device=device) for length in lengths])[None],
                cache,
                all_positions=True,
                recipe=_FINISHED_MASK,
            )[0]
        slices = [
            self._layout.pack(cache, 0, torch.arange(first, end, device=device))
            for first, end in pairwise([0, *ends])
        ]
        return Packed(slices, logits if self._sparing else logits[last])


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


def find_packer(
    model: CausalModel,
    layout: RecordLayout,
    new_prompt_batch: Callable[[], PromptBatch],
    *,
    most_tokens: int | None = None,
) -> Packer | None:
    """A packer for the model, if it computes packed prompts as it computes each alone.

    Args:
        model: The model, its recipe chosen.
        layout: Byte layout of the batch that takes the slices.
        new_prompt_batch: Makes an empty batch of one row; what it computes is the criterion.
        most_tokens: Tokens of one forward; None takes a default.
    """
    reason = _needless_to_try(model, layout)
    sparing = "logits_to_keep" in inspect.signature(model.model.forward).parameters
    for kind in () if reason else (True, False) if sparing else (False,):
        packer = Packer(model, layout, most_tokens or DEFAULT_PACK_TOKENS, sparing=kind)
        reason = pack_error(model, packer, new_prompt_batch)
        if not reason:
            return packer
    _log.debug("prompts of %s are not packed: %s", model.name, reason)
    return None


def _needless_to_try(model: CausalModel, layout: RecordLayout) -> str:
    if not model.takes_cache:
        return "the model takes no cache"
    if model.recipe.own_cache:
        return "the model makes its cache itself"
    if layout.state_slots or not layout.token_slots:
        return "its state mixes all tokens of a row"
    return ""


def pack_error(model: CausalModel, packer: Packer, new_prompt_batch: Callable[[], PromptBatch]) -> str:
    """Why the model can't pack; "" if it can.

    Short prompts are packed in two orders, and steps are decoded from their slices; the longest prompts that
    may be packed are, up to the last column. All logits must be those of each prompt alone.
    """
    longest = packer.most_prompt_tokens
    lives = [
        _Alone(model, min(length, longest), stride, new_prompt_batch)
        for length, stride in zip(_PROBE_TOKENS, (7, 11, 5), strict=True)
    ]
    room = packer.most_tokens - len(lives[0].prompt)
    long = _Alone(model, max(min(longest, room), 1), 13, new_prompt_batch)
    full = [long] * (room // len(long.prompt)) + [lives[0]]
    try:
        for pack in (lives, lives[::-1], full):
            packed = packer.run([life.prompt for life in pack])
            for life, kv, logits in zip(pack, packed.slices, packed.logits, strict=True):
                life.compare(logits, life.logits[0])
                if pack is lives:
                    life.compare_steps(kv)
    except (*MODEL_ERRORS, UnsupportedModelError) as error:
        return f"{type(error).__name__}: {first_line(error)}"
    worst, allowed = max(life.error for life in [*lives, long]), tolerance(model)
    return "" if worst <= allowed else f"logits differ by {worst:.1e} (allowed {allowed:.0e})"


class _Alone:
    """A probe prompt and a few steps behind it, computed alone; what a pack is compared with."""

    def __init__(
        self, model: CausalModel, tokens: int, stride: int, new_prompt_batch: Callable[[], PromptBatch]
    ) -> None:
        self.prompt = [(2 + stride * place + place * place) % model.vocab_size for place in range(tokens)]
        self.error = 0.0
        self._new_prompt_batch = new_prompt_batch
        self._outputs = [(9 + stride * step) % model.vocab_size for step in range(_PROBE_STEPS)]
        batch = new_prompt_batch()
        self.logits = [batch.step({0: self.prompt})[0]]
        self.logits += [batch.step({0: [token]})[0] for token in self._outputs]

    def compare(self, logits: torch.Tensor, expected: torch.Tensor) -> None:
        """Note the relative difference, if it is the largest."""
        self.error = max(self.error, relative_error(logits, expected))

    def compare_steps(self, kv: KVSlice) -> None:
        """Decode from a packed slice."""
        batch = self._new_prompt_batch()
        batch.embed(0, kv)
        for token, expected in zip(self._outputs, self.logits[1:], strict=True):
            self.compare(batch.step({0: [token]})[0], expected)


@contextlib.contextmanager
def _logits_at(model: torch.nn.Module, places: torch.Tensor) -> Iterator[None]:
    """Compute logits at these columns only: over a large vocabulary they cost as much as some layers."""

    def name_places(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "logits_to_keep": places}

    handle = model.register_forward_pre_hook(name_places, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


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
