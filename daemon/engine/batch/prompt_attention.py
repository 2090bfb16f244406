"""Attention of prompts on a card: chunks of several prompts, each over its own columns, wherever they lie.

    block     (head, up to TILE queries of one prompt)
    columns   [ 0 ............ past )[ past ....... position + count )
                the prompt's records   the chunk's own, as computed

Which tokens are whose, and where their records lie, is read on the card: a captured graph stays valid while
all of it changes. How the work of a prompt is cut follows from its own lengths and from the chunk's room,
never from its mates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from batond.daemon.engine.batch.prompt_kernels import attend_prompt_kernel, write_tokens_kernel
from batond.daemon.engine.batch.ranged_decode import tile_side

if TYPE_CHECKING:
    from batond.daemon.engine.batch.ring_rule import Fresh, Rule

#: Triton wraps what its types say are functions.
_ATTEND: Final[Any] = attend_prompt_kernel
_WRITE: Final[Any] = write_tokens_kernel

_LOG2_E: Final = 1.4426950408889634
#: Up to here, two loads of 64 columns in flight fit beside a large block of queries.
_WIDE_HEAD_BYTES: Final = 256
_MOST_TILE_OF_A_GROUP: Final = 64  # Of four warps.


@dataclass(frozen=True, slots=True)
class Cut:
    """How the kernel goes over columns.

    Attributes:
        block: Columns loaded at once.
        warps: Warps of a program.
        stages: Loads in flight of a program.
    """

    block: int
    warps: int
    stages: int


def choose_cut(tile: int, head_bytes: int) -> Cut:
    """The cut for blocks of so many queries, and heads of so many bytes."""
    wide = head_bytes > _WIDE_HEAD_BYTES
    warps = 8 if tile > _MOST_TILE_OF_A_GROUP else 4
    return Cut(32, warps, 2) if wide else Cut(64, warps, 3)


def write_tokens(fresh: Fresh, places: torch.Tensor) -> None:
    """Write a chunk's keys and values into records.

    Args:
        fresh: What to write.
        places: Bytes from the anchor to each token's record, 0 for none; int64, shape [tokens].
    """
    heads, tokens, dim = fresh.key.shape
    value_dim = fresh.value.shape[2]
    _WRITE[tokens,](
        fresh.key,
        fresh.value,
        fresh.key_anchor,
        fresh.value_anchor,
        places,
        fresh.key.stride(1),
        fresh.key.stride(0),
        fresh.value.stride(1),
        fresh.value.stride(0),
        fresh.key_anchor.stride(0),
        fresh.value_anchor.stride(0),
        HEADS=heads,
        HEADS_PAD=1 << (heads - 1).bit_length(),
        DIM=dim,
        DIM_PAD=tile_side(dim),
        VDIM=value_dim,
        VDIM_PAD=tile_side(value_dim),
        ITEM=fresh.key.element_size(),
        num_warps=4,
    )


def prompt_attention(
    query: torch.Tensor, fresh: Fresh, blocks: torch.Tensor, tile: int, rule: Rule, *, cut: Cut | None = None
) -> torch.Tensor:
    """Attention of a chunk's tokens over their own prompts' columns up to themselves.

    Args:
        query: Shape [heads, tokens, dim]; heads is a multiple of kv heads, neighbours share a key. Any
            strides, but the last is 1.
        fresh: The chunk's keys and values.
        blocks: Of each block of queries the first token, how many (0: no block), the first one's position,
            columns before the chunk, and bytes from the anchor to the record of the prompt's first column;
            int64, shape [5, blocks].
        tile: Most queries of a block.
        rule: How scores are made.
        cut: How to go over columns; None chooses by shape.

    Returns:
        Shape [tokens, heads, value dim], in the dtype of `query`; undefined for tokens of no block. Sums are
        float32.
    """
    heads, tokens, dim = query.shape
    value_dim, item = fresh.value.shape[2], query.element_size()
    cut = cut or choose_cut(tile, max(tile_side(dim), tile_side(value_dim)) * item)
    out = query.new_empty(tokens, heads, value_dim)
    _ATTEND[heads, blocks.shape[1]](
        query,
        fresh.key,
        fresh.value,
        fresh.key_anchor,
        fresh.value_anchor,
        blocks,
        out if rule.sinks is None else rule.sinks,
        out,
        rule.scale * _LOG2_E,
        (rule.softcap or 0.0) * _LOG2_E,
        rule.window or 0,
        query.stride(1),
        query.stride(0),
        fresh.key.stride(1),
        fresh.key.stride(0),
        fresh.value.stride(1),
        fresh.value.stride(0),
        fresh.key_anchor.stride(0),
        fresh.value_anchor.stride(0),
        fresh.record_bytes // item,
        GROUP=heads // fresh.key.shape[0],
        TILE=tile,
        DIM=dim,
        DIM_PAD=tile_side(dim),
        VDIM=value_dim,
        VDIM_PAD=tile_side(value_dim),
        BLOCK=cut.block,
        ITEM=item,
        SOFTCAP=rule.softcap is not None,
        WINDOWED=rule.window is not None,
        SINKS=rule.sinks is not None,
        # Tensor cores cut float32 to tf32 unless told not to.
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    return out
