"""Each row's own positions, for models that would derive them from the batch's padded length."""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def _drop_extra_axis(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
    """Some add an axis of rows to what they take for one row's positions."""
    return output.squeeze(0) if output.ndim > _ROWS_TOKENS_DIM else output


def _takes_positions(module: torch.nn.Module) -> bool:
    return "position_ids" in inspect.signature(type(module).forward).parameters
