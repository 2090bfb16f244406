"""A chunk of prompts as a forward on a card sees it: nothing known on the host of whose its tokens are.

The model gets the keys and values that it has just computed, as if all tokens of the chunk were one short
prompt; the kernel knows better, and reads what lies before the chunk in the prompts' records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from batond.daemon.engine.batch.card_window import CardView, check_states, launched
from batond.daemon.engine.batch.ring_rule import Fresh
from batond.daemon.errors import UnsupportedModelError

if TYPE_CHECKING:
    from batond.daemon.engine.batch.prompt_inputs import PromptInputs


class PromptWindow(CardView):
    """The card's kernels over a chunk of prompts; the counterpart of `CardWindow`.

    Args:
        inputs: Which tokens are whose, on the card.
        record_bytes: Of a token's record.
        most_tokens: The most a prompt may have.
        ignored: Arguments that the model passes and its own attention ignores.

    Attributes:
        size: One more than the columns that the model is told of, which are none before the chunk.
    """

    size = 1

    def __init__(
        self,
        inputs: PromptInputs,
        record_bytes: int,
        most_tokens: int,
        *,
        ignored: frozenset[str] = frozenset(),
    ) -> None:
        tokens = inputs.tokens
        super().__init__((1, 1, tokens, tokens), most_tokens, inputs.device, ignored=ignored)
        self._inputs, self._record_bytes = inputs, record_bytes
        self._stores: tuple[torch.Tensor, ...] = ()
        self._states: tuple[torch.Tensor, ...] = ()
        self._written = self._attended = 0
        self._all_seen = torch.ones(1, tokens, dtype=torch.int64, device=inputs.device)

    def padding_mask(self) -> torch.Tensor:
        """All ones: what the model knows of padding; int64, shape [1, tokens]."""
        return self._all_seen

    def begin(self) -> None:
        """A forward begins."""
        self._written = self._attended = 0

    def end(self) -> None:
        """A forward has ended.

        Raises:
            UnsupportedModelError: A layer has attended in another way than by the kernel.
        """
        self._stores = self._states = ()
        if not self._written or self._attended != self._written:
            raise UnsupportedModelError(
                f"{self._written} layers keep keys and values, {self._attended} attend by the kernel"
            )

    def update(
        self,
        key_store: torch.Tensor,
        value_store: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's keys and values into the prompts' records.

        Args:
            key_store: The layer's part of the anchor, shape [1, 1, heads, key dim].
            value_store: Shape [1, 1, heads, value dim].
            key_states: Shape [1, heads, tokens, key dim].
            value_states: Shape [1, heads, tokens, value dim].

        Returns:
            The states, shape [1, tokens, heads, dim].

        Raises:
            UnsupportedModelError: The kernel can't.
        """
        kernels = _kernels()
        check_states(key_states, value_states, key_store)
        key_states, value_states = (
            one if one.stride(-1) == 1 else one.contiguous() for one in (key_states, value_states)
        )
        self._stores, self._states = (key_store[0, 0], value_store[0, 0]), (key_states, value_states)
        self._written += 1
        launched(lambda: kernels.write_tokens(self._fresh(), self._inputs.places))
        return key_states.transpose(1, 2), value_states.transpose(1, 2)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of each token over its own prompt up to itself; see `CardView.attend`."""
        kernels = _kernels()
        check_states(query, key, value)
        if len(self._states) != 2 or not all(map(_same, (key, value), self._states)):  # noqa: PLR2004 - key, value
            raise UnsupportedModelError("attention reads other keys or values than its layer has just kept")
        rule = self.rule(query, key, value, mask, scale=scale, softcap=softcap, sinks=sinks)
        self._attended += 1
        states = query[0] if query.stride(-1) == 1 else query[0].contiguous()
        inputs = self._inputs
        out: torch.Tensor = launched(
            lambda: kernels.prompt_attention(states, self._fresh(), inputs.blocks, inputs.tile, rule)
        )
        return out[None]

    def _fresh(self) -> Fresh:
        (key, value), (key_anchor, value_anchor) = self._states, self._stores
        return Fresh(key[0], value[0], key_anchor, value_anchor, self._record_bytes)


def _same(found: torch.Tensor, kept: torch.Tensor) -> bool:
    """Whether two tensors are the same numbers at the same place."""
    return (
        found.data_ptr() == kept.data_ptr()
        and found.shape == kept.shape
        and found.stride() == kept.stride()
        and found.dtype == kept.dtype
    )


def _kernels() -> Any:
    from batond.daemon.engine.batch import prompt_attention  # noqa: PLC0415 - there is no Triton without a card

    return prompt_attention
