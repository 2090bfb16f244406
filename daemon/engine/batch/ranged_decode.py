"""Decode attention on a card: each row's own range of the ring is read once, and nothing else.

One new token per row attends to the newest columns of its row; column = position mod capacity, so a range may
wrap. Keys and values lie in token-major records: the views on them have any stride between columns.

How a range is split among programs depends on the row's own length and on the batch's shape, never on the
lengths of its mates: the bits of a row are the same whatever the load is. Lengths and cursor are read on the
card, so that a captured graph stays valid while they change. Idle rows touch no memory and give zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from batond.daemon.engine.batch.card_facts import Card, arrived, card_of
from batond.daemon.engine.batch.ring_kernels import attend_kernel, write_kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batond.daemon.engine.batch.ring_rule import Ring, Rule

#: Triton wraps what its types say are functions.
_ATTEND: Final[Any] = attend_kernel
_WRITE: Final[Any] = write_kernel

_LOG2_E: Final = 1.4426950408889634
#: Rows of a tensor core's tile: the query heads that share a key are padded to so many.
_LEAST_TILE: Final = 16
#: A row is split among at most so many programs: 5 halvings, as the kernel is written.
_MOST_SPLITS: Final = 32


@dataclass(frozen=True, slots=True)
class _Cut:
    """How work is cut from so many ranges a multiprocessor on; see docs/performance.md for the sweep.

    Attributes:
        ranges_per_core: Rows times key heads, over multiprocessors, from which on it holds.
        block_bytes: Of keys, loaded at once.
        warps: Warps of a program.
        stages: Loads in flight of a program, and one.
        enough_bytes: Of keys, which one program reads before a range is split: a long row among short ones
            would be waited for.
    """

    ranges_per_core: float
    block_bytes: int
    warps: int
    stages: int
    enough_bytes: int


_KIB: Final = 1024
#: About one multiprocessor in ten may stay without.
_PROGRAMS_PER_CORE: Final = 0.9
_FEW: Final = _Cut(0.0, block_bytes=16 * _KIB, warps=4, stages=4, enough_bytes=32 * _KIB)
_PAIRS: Final = _Cut(1.9, block_bytes=16 * _KIB, warps=4, stages=4, enough_bytes=512 * _KIB)
#: The densest first. Many ranges: many small programs hide each other's start. One or two a multiprocessor:
#: each has to have more in flight. Fewer: ranges are split, until there is one.
_CUTS: Final = (
    _Cut(3.0, block_bytes=16 * _KIB, warps=4, stages=2, enough_bytes=512 * _KIB),
    _PAIRS,
    _Cut(_PROGRAMS_PER_CORE, block_bytes=16 * _KIB, warps=4, stages=4, enough_bytes=1024 * _KIB),
    _FEW,
)
#: Instead of `_PAIRS` where no range is ever split. Four of them fit a multiprocessor: beside programs that
#: find no work, the card gives some multiprocessors four and others none. Of `_PAIRS`, two fit.
_SHORT_PAIRS: Final = _Cut(1.9, block_bytes=8 * _KIB, warps=2, stages=4, enough_bytes=512 * _KIB)
#: Beside the loads in flight: a query head, weights and sums on their way between threads; rounded up.
_SHARED_BYTES_OF_A_HEAD: Final = _KIB
#: float32 is multiplied without tensor cores: that takes more threads.
_WARPS_FOR_FLOAT32: Final = 4


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the kernel is cut.

    Attributes:
        block: Columns loaded at once.
        warps: Warps of a program.
        stages: Loads in flight of a program.
        splits: Programs that share the range of a row and key head, at most; a power of two.
        enough: A range is halved until its parts have no more columns than this, or there are `splits`.
    """

    block: int
    warps: int
    stages: int
    splits: int
    enough: int = 0


def choose_tiling(ring: Ring, rule: Rule, card: Card, group: int = 1) -> Tiling:
    """Cut the work of a batch: by shapes alone, not by who is there.

    Args:
        ring: What is attended to.
        rule: How.
        card: Where.
        group: Query heads that share a key.
    """
    rows, _, kv_heads, dim = ring.key.shape
    ranges, number_bytes = rows * kv_heads, ring.key.element_size()
    column_bytes = tile_side(max(dim, ring.value.shape[3])) * number_bytes
    longest = min(rule.window or ring.most_tokens, ring.most_tokens)
    cut = next(cut for cut in _CUTS if ranges >= cut.ranges_per_core * card.cores)
    if cut is _PAIRS and longest * column_bytes <= cut.enough_bytes:
        cut = _SHORT_PAIRS
    block = max(_LEAST_TILE, min(128, cut.block_bytes // column_bytes))
    enough = max(2 * block, cut.enough_bytes // column_bytes)
    splits = 1
    while splits < _MOST_SPLITS and splits * enough < longest:
        if cut is _FEW and splits * ranges >= _PROGRAMS_PER_CORE * card.cores:
            break
        splits *= 2
    warps = max(cut.warps, min(8, tile_side(group) // 8))  # For registers: more heads in a group, more sums.
    if number_bytes == torch.float32.itemsize:
        warps = max(warps, _WARPS_FOR_FLOAT32)
    others = _SHARED_BYTES_OF_A_HEAD * tile_side(group)
    room = (card.shared_bytes - others) // (2 * block * column_bytes)  # Keys and values.
    stages = max(2, min(cut.stages, room + 1))
    return Tiling(block=block, warps=warps, stages=stages, splits=splits, enough=enough)


def write_column(new_key: torch.Tensor, new_value: torch.Tensor, ring: Ring) -> None:
    """Write the newest column of the rows that have one.

    Args:
        new_key: Shape [rows, kv heads, dim].
        new_value: Shape [rows, kv heads, value dim].
        ring: Where to.
    """
    rows, kv_heads, dim = new_key.shape
    value_dim = new_value.shape[2]
    _WRITE[kv_heads, rows](
        new_key.contiguous(),
        new_value.contiguous(),
        ring.key,
        ring.value,
        ring.lengths,
        ring.cursor,
        *ring.strides,
        DIM=dim,
        DIM_PAD=tile_side(dim),
        VDIM=value_dim,
        VDIM_PAD=tile_side(value_dim),
        num_warps=1,
    )


def decode_attention(
    query: torch.Tensor,
    ring: Ring,
    rule: Rule,
    tiling: Tiling | None = None,
    *,
    new: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Attention of one new token per row over the row's newest columns.

    Args:
        query: Shape [rows, heads, dim]; heads is a multiple of kv heads, neighbours share a key.
        ring: What is attended to.
        rule: How.
        tiling: How to cut the work; None chooses by shape.
        new: Keys and values of the newest column, as for `write_column`, which this call then does too. None
            if they were written before.

    Returns:
        Shape [rows, heads, value dim], in the dtype of `query`; zeros where a row is idle. Sums are float32.
    """
    rows, heads, dim = query.shape
    capacity, kv_heads, value_dim = *ring.key.shape[1:3], ring.value.shape[3]
    group = heads // kv_heads
    if tiling is None:
        tiling = choose_tiling(ring, rule, card_of(query.device), group)
    out = query.new_empty(rows, heads, value_dim)
    query = _packed(query)
    new_key, new_value = (_packed(one) for one in new or (query, query))
    _ATTEND[kv_heads, rows, tiling.splits](
        query,
        new_key,
        new_value,
        ring.key,
        ring.value,
        ring.lengths,
        ring.cursor,
        out if rule.sinks is None else rule.sinks,
        out,
        *_parts(out, tiling.splits),
        arrived(query.device, rows * kv_heads),
        rule.scale * _LOG2_E,
        (rule.softcap or 0.0) * _LOG2_E,
        rule.window or 0,
        capacity,
        tiling.splits.bit_length() - 1,
        tiling.enough,
        *query.stride()[:2],
        *new_key.stride()[:2],
        *new_value.stride()[:2],
        *ring.strides,
        GROUP=group,
        TILE=tile_side(group),
        DIM=dim,
        DIM_PAD=tile_side(dim),
        VDIM=value_dim,
        VDIM_PAD=tile_side(value_dim),
        BLOCK=tiling.block,
        SPLIT=tiling.splits > 1,
        MOST_SPLITS=_MOST_SPLITS,
        NEW=new is not None,
        SOFTCAP=rule.softcap is not None,
        SINKS=rule.sinks is not None,
        # Tensor cores cut float32 to tf32 unless told not to.
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return out


def _packed(states: torch.Tensor) -> torch.Tensor:
    """The same numbers, those of a head side by side."""
    return states if states.stride(2) == 1 else states.contiguous()


def tile_side(size: int) -> int:
    """The tile's side that holds so many: a power of two."""
    return max(_LEAST_TILE, 1 << (size - 1).bit_length())


def _parts(out: torch.Tensor, splits: int) -> Sequence[torch.Tensor]:
    """Room for sum, total weight and biggest score of each split."""
    if splits == 1:
        return out, out, out
    sums = torch.empty(*out.shape[:2], splits, out.shape[2], dtype=torch.float32, device=out.device)
    return sums, *torch.empty(2, *out.shape[:2], splits, dtype=torch.float32, device=out.device)
