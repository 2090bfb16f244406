"""Attention over a ring of columns, plugged into unmodified models.

The model builds its mask as for an end-aligned padded batch (`ring_mask` only rotates it when the window
wraps), and hands keys and values that are views on the ring to `ring_attention`. Scaling, sliding windows (in
the mask, and as a bound on what is read), soft caps, attention sinks and grouped heads are honoured as the
model passes them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from batond.daemon.engine.batch.card_window import CardView
from batond.daemon.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batond.daemon.engine.batch.ring_window import RingWindow, Run

RING_ATTENTION = "batond_ring"
_local = threading.local()


@contextlib.contextmanager
def active_window(window: RingWindow | CardView) -> Iterator[None]:
    """Tell mask and attention of this thread which window they work on."""
    _local.window = window
    try:
        yield
    finally:
        _local.window = None


def ring_mask(*args: Any, mask_function: Any = causal_mask_function, **kwargs: Any) -> torch.Tensor | None:
    """The model's mask where it says more than the rows' ranges do.

    Returns:
        None for plain causal attention: each row's own range says it all. Otherwise bool, shape
        [rows, 1, 1, size], rotated from order of age to order on the ring where the window wraps; on a card,
        what stands for it.
    """
    if mask_function is causal_mask_function:
        return None
    window: RingWindow | CardView = _local.window
    if isinstance(window, CardView):
        return window.mask_for(mask_function)
    kwargs["allow_is_causal_skip"] = False  # A mask now and none then would be two kernels, two roundings.
    return window.to_ring_order(sdpa_mask(*args, mask_function=mask_function, **kwargs))


@functools.cache
def ignored_arguments(attention: str) -> frozenset[str]:
    """Which of `softcap`, `s_aux` and `sinks` an attention function takes without using them.

    Transformers' sdpa did so with a soft cap before 5.24: a ring that heeds it would give other logits than
    `generate`. The function itself is asked; what it refuses, or what can't be asked here, counts as used.

    Args:
        attention: Name of a registered function; "eager" is the model's own, which uses what it is passed.
    """
    function = ALL_ATTENTION_FUNCTIONS.get(attention)
    if function is None:
        return frozenset()
    module = SimpleNamespace(is_causal=False, num_key_value_groups=1, training=False)
    states = torch.tensor([[[[3.0, 1.0], [1.0, -2.0]]]])

    def attend(**options: Any) -> torch.Tensor:
        found: torch.Tensor = function(module, states, states, states, None, scaling=1.0, **options)[0]
        return found

    ignored = set()
    for name, value in (("softcap", 0.5), ("s_aux", torch.ones(1)), ("sinks", torch.ones(1))):
        with contextlib.suppress(Exception):
            if torch.equal(attend(), attend(**{name: value})):
                ignored.add(name)
    return frozenset(ignored)


def ring_attention(  # noqa: PLR0917 - the interface's signature
    module: torch.nn.Module,  # noqa: ARG001 - the interface's signature
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001 - batond never trains
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one new token per row over the rows' own columns.

    Args:
        module: The attention module.
        query: Shape [rows, heads, 1, dim].
        key: Shape [rows, kv heads, columns, dim].
        value: Shape [rows, kv heads, columns, value dim].
        attention_mask: From `ring_mask`, or whatever the model made of it; None is causal.
        scaling: Factor of the scores; None is dim ** -0.5.
        dropout: Ignored.
        **kwargs: `softcap`, `s_aux`, `sinks`, `position_bias` as models pass them; a `sliding_window` is in
            the mask.

    Returns:
        Shape [rows, 1, heads, value dim], and no weights.
    """
    window: RingWindow | CardView = _local.window
    softcap, s_aux, sinks = (
        None if name in window.ignored else kwargs.get(name) for name in ("softcap", "s_aux", "sinks")
    )
    sinks = sinks if s_aux is None else s_aux
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(window, CardView):
        if kwargs.get("position_bias") is not None:
            raise UnsupportedModelError("attention adds a bias by position")
        found = window.attend(query, key, value, attention_mask, scale=scale, softcap=softcap, sinks=sinks)
        return found, None
    window.note_keys(key)
    rows, heads, _, dim = query.shape
    grouped = query.view(rows, key.shape[1], heads // key.shape[1], dim)
    call = _Call(
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        biases=[
            bias
            for bias in (attention_mask, window.to_ring_order(kwargs.get("position_bias")))
            if bias is not None
        ],
        masked=attention_mask is not None,
    )
    parts = []
    for run in window.runs:
        mine = slice(*run.rows)
        keys = [key[mine, :, first:last] for first, last in run.ranges]
        values = [value[mine, :, first:last] for first, last in run.ranges]
        if window.row_by_row and len(keys) > 1:
            keys, values = [torch.cat(keys, dim=2)], [torch.cat(values, dim=2)]
        parts.append(call.attend(run, grouped[mine], keys, values))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.reshape(rows, 1, heads, -1), None


@dataclass(frozen=True, slots=True)
class _Call:
    """What one attention call says beside its tensors.

    Attributes:
        scale: Factor of the scores.
        softcap: Scores are squashed to (-softcap, softcap).
        sinks: Extra score per head that takes weight and gives nothing; shape [heads].
        biases: Masks (bool, or added) and biases of the model, shape [rows or 1, heads or 1, 1, columns].
        masked: Whether one of them is a mask: it knows which columns a row owns.
    """

    scale: float
    softcap: float | None
    sinks: torch.Tensor | None
    biases: list[torch.Tensor]
    masked: bool

    def attend(
        self, run: Run, query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
    ) -> torch.Tensor:
        """Attention of a run's rows.

        Args:
            run: Which rows, over which columns.
            query: Shape [rows, kv heads, group, dim].
            keys: One or two parts, each of shape [rows, kv heads, n, dim].
            values: The same, each of shape [rows, kv heads, n, value dim].

        Returns:
            Shape [rows, kv heads, group, value dim].
        """
        biases = [_by_group(run.take(bias), query) for bias in self.biases]
        if run.seen is not None and not self.masked:
            biases.append(run.seen)
        if len(keys) == 1 and self.softcap is None and self.sinks is None and len(biases) < 2:  # noqa: PLR2004
            bias = biases[0] if biases else None
            return scaled_dot_product_attention(query, keys[0], values[0], attn_mask=bias, scale=self.scale)
        parts = [_by_row(query, part.transpose(-1, -2)) for part in keys]
        scores = torch.cat(parts, dim=-1) * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        for bias in biases:
            scores = scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias
        columns = scores.shape[-1]
        if self.sinks is not None:
            sinks = self.sinks.to(scores.dtype).view(1, query.shape[1], query.shape[2], 1)
            scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
        weights = scores.float().softmax(dim=-1).to(query.dtype)[..., :columns]
        sizes = [part.shape[2] for part in values]
        shares = torch.split(weights, sizes, dim=-1)
        parts = [_by_row(*pair) for pair in zip(shares, values, strict=True)]
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _by_row(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`left @ right` over [rows, heads, ...]; all rows at once would copy `right`, a view on the ring."""
    return torch.stack([torch.bmm(*pair) for pair in zip(left, right, strict=True)])


def _by_group(bias: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """A bias per head, [rows, heads, 1, n], as one per group of heads, [rows, kv heads, group, n]."""
    if bias.shape[1] == 1:
        return bias
    return bias.reshape(bias.shape[0], query.shape[1], query.shape[2], bias.shape[-1])


AttentionInterface.register(RING_ATTENTION, ring_attention)
AttentionMaskInterface.register(RING_ATTENTION, ring_mask)
