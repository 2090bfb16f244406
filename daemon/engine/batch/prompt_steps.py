"""Prompts on a card: chunks captured once for each of a few sizes, written straight into the prompts' slices.

An eager forward costs the host a launch for each of a thousand kernels: a prompt of up to a thousand tokens
waits for launches. A captured one costs one. A chunk is padded at its end to the next size: pads come behind
all tokens, which never see them, and are written nowhere.

    records   uint8, [ token 0 | ... | token n - 1 | room ]     one buffer a prompt, and its slice
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import torch

from batond.daemon.engine.batch.card_steps import RING_RECIPE
from batond.daemon.engine.batch.compiled import CompiledParts
from batond.daemon.engine.batch.graphs import StepOutput, capture_on_card
from batond.daemon.engine.batch.prompt_inputs import MOST_PARTS, Part, PromptInputs
from batond.daemon.engine.batch.prompt_window import PromptWindow
from batond.daemon.engine.batch.ring_attention import RING_ATTENTION, active_window, ignored_arguments
from batond.daemon.engine.batch.ring_cache import ring_cache
from batond.daemon.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batond.daemon.engine.model.causal import CausalModel
    from batond.daemon.engine.model.layout import RecordLayout

#: Tokens of the chunks that have a captured forward of their own.
SIZES: Final = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
#: Up to here, a large block of queries fits into a multiprocessor beside loads in flight.
_WIDE_HEAD_BYTES: Final = 256
#: Few tokens must still occupy a card.
_FEW_TOKENS: Final = 512


def prompt_sizes(most_tokens: int) -> tuple[int, ...]:
    """Sizes to capture where no chunk has more tokens than `most_tokens`."""
    needed = [size for size in SIZES if size < most_tokens]
    return (*needed, *SIZES[len(needed) : len(needed) + 1])


class PromptSteps:
    """Runs chunks of prompts as captured forwards.

    Args:
        model: The model.
        layout: Byte layout of its cache: keys and values only.
        sizes: Tokens of the forwards to capture, ascending.
        compiled: Have the model's small parts compiled in them.

    Attributes:
        graphs: The captured forwards, by tokens.
        most_tokens: Tokens of the largest; 0 without any.

    Raises:
        UnsupportedModelError: The model computes no logits at places that are named, or its cache has layers
            that records can't stand in for.
    """

    def __init__(
        self, model: CausalModel, layout: RecordLayout, sizes: Sequence[int], *, compiled: bool = False
    ) -> None:
        if not model.takes_logits_to_keep:
            raise UnsupportedModelError("the model computes logits at all places")
        self.layout, self.device = layout, model.device
        self._model = model
        self._anchor = torch.zeros(layout.record_bytes, dtype=torch.uint8, device=model.device)
        self._state = torch.zeros(1, 0, dtype=torch.uint8, device=model.device)
        self._ignored = ignored_arguments(model.attention_name)
        head_bytes = max(slot.shape[-1] * slot.dtype.itemsize for slot in layout.token_slots)
        self._inputs = {size: PromptInputs(size, _tile(size, head_bytes), self._anchor) for size in sizes}
        self._parts = CompiledParts(model.model) if compiled else None
        with self._compiled():
            self.graphs = capture_on_card(self._run_of, sizes, model.device)
        self.most_tokens = max(self.graphs.sizes, default=0)

    @property
    def compiled(self) -> bool:
        """Whether the model's small parts are compiled in them."""
        return self._parts is not None

    def run(self, parts: Sequence[Part]) -> torch.Tensor:
        """Compute chunks of one or more prompts, each behind what its records hold.

        Args:
            parts: At most `MOST_PARTS`, and `most_tokens` tokens in all.

        Returns:
            float32 logits behind each part's last token, shape [parts, vocabulary].

        Raises:
            ValueError: They are too many.
        """
        size = self._fill(parts)
        output = self.graphs.run(size)
        if output is None:
            raise ValueError(f"no forward of {size} tokens is captured")
        return output.logits[: len(parts)].clone()  # The next forward overwrites them.

    def run_noting(self, part: Part) -> torch.Tensor:
        """As `run` for one chunk, with the logits behind each of its tokens.

        It is the captured forward's computation, launched kernel by kernel: keys and values have the same
        bits.

        Returns:
            float32 logits, shape [tokens, vocabulary].
        """
        size = self._fill([part])
        with self._compiled():
            return self._forward(size, self._window(size), logits_to_keep=None)[: len(part.token_ids)]

    def _fill(self, parts: Sequence[Part]) -> int:
        """Set the inputs of the smallest forward that has room; returns its size."""
        count = sum(len(part.token_ids) for part in parts)
        size = next((size for size in self.graphs.sizes if size >= count), None)
        if size is None or not 0 < len(parts) <= MOST_PARTS:
            raise ValueError(
                f"{len(parts)} chunks of {count} tokens don't fit into one of {self.most_tokens}"
            )
        self._inputs[size].fill(parts)
        return size

    def _run_of(self, size: int) -> Callable[[], StepOutput]:
        """The forward over so many tokens."""
        window, last = self._window(size), self._inputs[size].last

        def run() -> StepOutput:
            logits = self._forward(size, window, logits_to_keep=last)
            return StepOutput(logits, logits.argmax(dim=-1))

        return run

    def _window(self, size: int) -> PromptWindow:
        most_tokens = self._model.max_context_tokens
        return PromptWindow(self._inputs[size], self.layout.record_bytes, most_tokens, ignored=self._ignored)

    def _forward(
        self, size: int, window: PromptWindow, *, logits_to_keep: torch.Tensor | None
    ) -> torch.Tensor:
        """Logits of the wanted places, or of all; float32, shape [places, vocabulary]."""
        inputs = self._inputs[size]
        cache = ring_cache(self._model, self.layout, self._anchor[None, None], self._state, window)
        window.begin()
        with active_window(window), self._model.attention(RING_ATTENTION):
            logits = self._model.forward(
                inputs.token_ids,
                window.padding_mask(),
                inputs.position_ids,
                cache,
                logits_to_keep=logits_to_keep,
                recipe=RING_RECIPE,
            )
        window.end()
        return logits[0]

    def _compiled(self) -> contextlib.AbstractContextManager[None]:
        return self._parts.in_use() if self._parts is not None else contextlib.nullcontext()


def _tile(size: int, head_bytes: int) -> int:
    """Queries of the kernel's blocks."""
    if head_bytes > 2 * _WIDE_HEAD_BYTES:
        return 32
    return 64 if size <= _FEW_TOKENS or head_bytes > _WIDE_HEAD_BYTES else 128
