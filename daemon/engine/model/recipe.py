"""How a forward is asked of a model: what differs between families and can only be told by trying."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch


class MaskForm(enum.Enum):
    """What a model is told about padding."""

    COLUMNS = "2-D"  # One number per column; the model builds its own masks of it.
    WINDOW = "2-D, newest window only"  # For models that rely on their cache to forget what left the window.
    FLOAT = "4-D float"  # The finished mask, added to the scores.
    NONE = "none"  # Nothing: each row's state carries all there is.


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way to run a model.

    Attributes:
        mask: What it is told about padding.
        own_cache: It makes its cache itself in the first forward.
    """

    mask: MaskForm = MaskForm.COLUMNS
    own_cache: bool = False


def make_mask(
    form: MaskForm, seen: torch.Tensor, width: int, window_tokens: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """The attention mask in a model's form.

    Args:
        form: Which.
        seen: int64, shape [rows, cached + new columns]; 1 where a token is.
        width: New columns.
        window_tokens: The model's sliding window; 0 is none.
        dtype: Of the model.

    Returns:
        int64 of the same shape, a float mask of shape [rows, 1, new columns, all columns], or None.
    """
    if form is MaskForm.NONE:
        return None
    if form is MaskForm.COLUMNS:
        return seen
    if form is MaskForm.WINDOW:
        # A prompt sees all of itself, as it does where the cache is cut after the forward.
        if width > 1 or not window_tokens:
            return seen
        limited = seen.clone()
        limited[:, : max(0, seen.shape[1] - window_tokens)] = 0
        return limited
    columns = seen.shape[1]
    newest = torch.arange(columns - width, columns, device=seen.device)
    causal = torch.arange(columns, device=seen.device)[None, :] <= newest[:, None]
    visible = causal[None] & seen[:, None, :].bool()
    # Padding columns see themselves: attention over nothing at all is not defined.
    visible |= torch.arange(columns, device=seen.device)[None, :] == newest[:, None]
    mask = torch.zeros(visible.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill(~visible, torch.finfo(dtype).min)[:, None]
