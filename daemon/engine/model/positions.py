"""Each row's own positions, for models that would derive them from the batch's padded length."""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_SHORTEST_LIMIT_TOKENS = 64
_ROWS_TOKENS_DIM = 3  # [rows, tokens, dim]


class RowPositions:
    """Gives position embeddings the rows' own positions while a forward runs.

    Decoders of encoder-decoder families count positions from the cache's length and take no `position_ids`
    themselves, but their position embeddings do. A hook hands them over; the model stays unmodified.

    Args:
        model: A Hugging Face model whose forward ignores `position_ids`.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._current: torch.Tensor | None = None
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and _takes_positions(module):
                module.register_forward_pre_hook(self._hand_over, with_kwargs=True)
                module.register_forward_hook(_drop_extra_axis)

    @contextlib.contextmanager
    def given(self, position_ids: torch.Tensor) -> Iterator[None]:
        """Use these positions inside.

        Args:
            position_ids: int64, shape [rows, new columns].
        """
        self._current = position_ids
        try:
            yield
        finally:
            self._current = None

    def _hand_over(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._current is None:
            return None
        return args, {**kwargs, "position_ids": self._current}


@dataclass(frozen=True, slots=True)
class PositionLimit:
    """Longest query that can be served without its batch mates changing it."""

    tokens: int
    reason: str


def position_limit(model: torch.nn.Module) -> PositionLimit | None:
    """Where the model starts to compute all rows by the longest one.

    - longrope and dynamic RoPE switch their frequencies by the largest position of the whole batch;
    - temperature tuning of attention counts the batch's columns, not the row's tokens.

    Up to there nothing depends on mates; None is no such place.
    """
    limits = [limit for module in model.modules() for limit in _limits(module)]
    return min(limits, key=lambda limit: limit.tokens, default=None)


def _limits(module: Any) -> Iterator[PositionLimit]:
    kinds = getattr(module, "rope_type", None)
    by_layer_type: dict[str | None, Any] = kinds if isinstance(kinds, dict) else {None: kinds}
    for layer_type, kind in by_layer_type.items():
        if kind == "longrope":
            parameters = module.config.rope_parameters
            parameters = parameters if layer_type is None else parameters[layer_type]
            tokens = int(parameters["original_max_position_embeddings"])
            yield PositionLimit(tokens, "longrope switches by the longest query of the batch beyond")
        elif isinstance(kind, str) and "dynamic" in kind:
            tokens = int(module.original_max_seq_len)
            yield PositionLimit(tokens, "dynamic RoPE scales by the longest query of the batch beyond")
    if getattr(module, "attn_temperature_tuning", False) and hasattr(module, "floor_scale"):
        tokens = int(module.floor_scale) - 1
        if tokens >= _SHORTEST_LIMIT_TOKENS:  # Else the probe crosses it, and tells.
            yield PositionLimit(tokens, "temperature tuning counts the batch's columns beyond")


def _drop_extra_axis(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
    """Some add an axis of rows to what they take for one row's positions."""
    return output.squeeze(0) if output.ndim > _ROWS_TOKENS_DIM else output


def _takes_positions(module: torch.nn.Module) -> bool:
    return "position_ids" in inspect.signature(type(module).forward).parameters
