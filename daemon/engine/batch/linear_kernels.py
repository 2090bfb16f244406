"""The card's kernels of linears at few rows, called through `linears.py`.

A product of at most 64 rows with a weight is bound by reading the weight. Each program streams rows of it in
their order through shared memory and multiplies them with all rows of the input; long sums are split among
programs, and the one that ends last adds the parts, in their order: no figure depends on which one that is.
"""

# pyright: reportMissingImports=false
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# Triton compiles these functions from their text; their arguments are pointers and numbers of its own types.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])  # They change from one captured step to the next.
def linear_kernel(
    inputs,
    weight,
    bias,
    out,
    parts,
    arrived,
    rows,
    n_in,
    n_first,
    n_second,
    n_third,
    second_weight,
    third_weight,
    second_bias,
    third_bias,
    TILE: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    SPLIT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Products of all rows of `inputs` with BLOCK_OUT rows of a weight, over one split of the sum.

    Grid: (blocks of outputs of up to three weights, splits). Where the second and third weight and bias lie
    is given as the distance from the first, in numbers; outputs lie one behind the other, each [rows, n].
    `n_in` is a multiple of BLOCK_IN. TRANSPOSED computes the transpose, which gives tensor cores their wide
    side in the weight.
    """
    place_in_all, split = tl.program_id(0), tl.program_id(1)
    splits = tl.num_programs(1)
    first_blocks, second_blocks = tl.cdiv(n_first, BLOCK_OUT), tl.cdiv(n_second, BLOCK_OUT)
    is_second, is_third = place_in_all >= first_blocks, place_in_all >= first_blocks + second_blocks
    block = place_in_all - tl.where(
        is_third, first_blocks + second_blocks, tl.where(is_second, first_blocks, 0)
    )
    n_out = tl.where(is_third, n_third, tl.where(is_second, n_second, n_first))
    to_weight = tl.where(is_third, third_weight, tl.where(is_second, second_weight, 0))
    to_out = rows * tl.where(is_third, n_first + n_second, tl.where(is_second, n_first, 0))
    output = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = tl.arange(0, TILE)
    at = tl.arange(0, BLOCK_IN)
    steps = n_in // BLOCK_IN
    per_split = tl.cdiv(steps, splits)
    first = split * per_split
    last = tl.minimum(steps, first + per_split)
    known = output < n_out
    w_at = weight + to_weight + output[:, None].to(tl.int64) * n_in + at[None, :]
    x_at = inputs + row[:, None] * n_in + at[None, :]
    there = row < rows
    if TRANSPOSED:
        total = tl.zeros([BLOCK_OUT, TILE], tl.float32)
    else:
        total = tl.zeros([TILE, BLOCK_OUT], tl.float32)
    for step in tl.range(first, last):
        begin = step * BLOCK_IN
        x = tl.load(x_at + begin, mask=there[:, None], other=0.0)
        w = tl.load(w_at + begin, mask=known[:, None], other=0.0, eviction_policy="evict_first")
        if TRANSPOSED:
            total = tl.dot(w, tl.trans(x), total)
        else:
            total = tl.dot(x, tl.trans(w), total)
    if TRANSPOSED:
        place = row[None, :] * n_out + output[:, None]
        mask = there[None, :] & known[:, None]
    else:
        place = row[:, None] * n_out + output[None, :]
        mask = there[:, None] & known[None, :]
    is_last = True
    if SPLIT:
        size = rows * (n_first + n_second + n_third)
        tl.store(parts + to_out + split * size + place, total, mask=mask)
        tl.debug_barrier()  # All threads have stored before one says so.
        is_last = tl.atomic_add(arrived + place_in_all, 1, sem="acq_rel") == splits - 1
        if is_last:
            tl.store(arrived + place_in_all, 0)  # For the next call.
            total = tl.load(parts + to_out + place, mask=mask, other=0.0)
            for other in tl.range(1, splits):
                total += tl.load(parts + to_out + other * size + place, mask=mask, other=0.0)
    if is_last:
        if BIAS:
            to_bias = tl.where(is_third, third_bias, tl.where(is_second, second_bias, 0))
            added = tl.load(bias + to_bias + output, mask=known, other=0.0).to(tl.float32)
            if TRANSPOSED:
                total += added[:, None]
            else:
                total += added[None, :]
        tl.store(out + to_out + place, total.to(out.dtype.element_ty), mask=mask)
