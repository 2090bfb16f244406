"""The card's kernels of the ring, called through `ranged_decode.py`.

After flash decoding (Dao et al. 2023): the range of a row is split among programs, each keeps a running
maximum and sum (online softmax, in float32), and the program that ends last puts the parts together, in their
order. No figure depends on which one that is.
Scores are in units of log2(e), since the card's exponential has base 2.
"""

# pyright: reportMissingImports=false
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# Triton compiles these functions from their text; their arguments are pointers and numbers of its own types.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["window", "capacity"])  # They change from step to step.
def attend_kernel(
    query,
    key,
    value,
    lengths,
    cursor,
    sinks,
    out,
    part,
    part_total,
    part_biggest,
    arrived,
    scale,
    softcap,
    window,
    capacity,
    key_row,
    key_column,
    key_head,
    value_row,
    value_column,
    value_head,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    VDIM: tl.constexpr,
    VDIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of the query heads that share a key head, over one split of a row's range.

    Grid: (kv heads, rows, SPLITS). Neighbouring programs read neighbouring heads: these lie side by side in a
    record. What is not owned is never loaded: it may be another query's, or not committed.
    """
    kv_head, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    kv_heads = tl.num_programs(0)
    length = tl.load(lengths + row)
    if window > 0:
        length = tl.minimum(length, window)
    per_split = tl.cdiv(tl.cdiv(length, BLOCK), SPLITS) * BLOCK
    first = split * per_split
    last = tl.minimum(length, first + per_split)

    member = tl.arange(0, TILE)
    at = tl.arange(0, DIM_PAD)
    v_at = tl.arange(0, VDIM_PAD)
    head = kv_head * GROUP + member
    out_row = row * kv_heads * GROUP + head
    in_group = member < GROUP
    out_at = out + out_row[:, None] * VDIM + v_at[None, :]
    out_mask = in_group[:, None] & (v_at[None, :] < VDIM)
    if first < last:
        oldest = tl.load(cursor) - length + 1
        oldest = tl.where(oldest < 0, oldest + capacity, oldest)
        q_mask = in_group[:, None] & (at[None, :] < DIM)
        q = tl.load(query + out_row[:, None] * DIM + at[None, :], mask=q_mask, other=0.0)
        keys = key + row * key_row + kv_head.to(tl.int64) * key_head
        values = value + row * value_row + kv_head.to(tl.int64) * value_head
        biggest = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        sum_v = tl.zeros([TILE, VDIM_PAD], tl.float32)
        for begin in tl.range(first, last, BLOCK):
            place = begin + tl.arange(0, BLOCK)
            mine = place < last
            column = oldest + place
            column = tl.where(column >= capacity, column - capacity, column).to(tl.int64)
            k_mask = mine[:, None] & (at[None, :] < DIM)
            k = tl.load(keys + column[:, None] * key_column + at[None, :], mask=k_mask, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            if SOFTCAP:
                scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
            scores = tl.where(mine[None, :], scores, float("-inf"))
            new_biggest = tl.maximum(biggest, tl.max(scores, 1))
            weights = tl.exp2(scores - new_biggest[:, None])
            shrink = tl.exp2(biggest - new_biggest)
            v_mask = mine[:, None] & (v_at[None, :] < VDIM)
            v = tl.load(values + column[:, None] * value_column + v_at[None, :], mask=v_mask, other=0.0)
            total = total * shrink + tl.sum(weights, 1)
            sum_v = sum_v * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
            biggest = new_biggest
        is_last = True
        if SPLITS > 1:
            parts = out_row * SPLITS
            tl.store(part + (parts + split)[:, None] * VDIM + v_at[None, :], sum_v, mask=out_mask)
            tl.store(part_total + parts + split, total, mask=in_group)
            tl.store(part_biggest + parts + split, biggest, mask=in_group)
            tl.debug_barrier()  # All threads have stored before one says so.
            used = tl.cdiv(length, per_split)
            counter = arrived + row * kv_heads + kv_head
            is_last = tl.atomic_add(counter, 1, sem="acq_rel") == used - 1
            if is_last:
                tl.store(counter, 0)  # For the next call.
                biggest = tl.full([TILE], float("-inf"), tl.float32)
                total = tl.zeros([TILE], tl.float32)
                sum_v = tl.zeros([TILE, VDIM_PAD], tl.float32)
                for other in tl.range(0, used):
                    its_biggest = tl.load(part_biggest + parts + other, mask=in_group, other=0.0)
                    its_total = tl.load(part_total + parts + other, mask=in_group, other=1.0)
                    its_at = part + (parts + other)[:, None] * VDIM + v_at[None, :]
                    its_sum_v = tl.load(its_at, mask=out_mask, other=0.0)
                    new_biggest = tl.maximum(biggest, its_biggest)
                    shrink, its_shrink = tl.exp2(biggest - new_biggest), tl.exp2(its_biggest - new_biggest)
                    total = total * shrink + its_total * its_shrink
                    sum_v = sum_v * shrink[:, None] + its_sum_v * its_shrink[:, None]
                    biggest = new_biggest
        if is_last:
            if SINKS:
                sink = tl.load(sinks + head, mask=in_group, other=0.0).to(tl.float32)
                sink = sink * 1.4426950408889634
                new_biggest = tl.maximum(biggest, sink)
                shrink = tl.exp2(biggest - new_biggest)
                total = total * shrink + tl.exp2(sink - new_biggest)
                sum_v = sum_v * shrink[:, None]
            tl.store(out_at, (sum_v / total[:, None]).to(out.dtype.element_ty), mask=out_mask)
    elif split == 0:  # An idle row.
        tl.store(out_at, tl.zeros([TILE, VDIM_PAD], out.dtype.element_ty), mask=out_mask)


@triton.jit
def write_kernel(
    new_key,
    new_value,
    key,
    value,
    lengths,
    cursor,
    key_row,
    key_column,
    key_head,
    value_row,
    value_column,
    value_head,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    VDIM: tl.constexpr,
    VDIM_PAD: tl.constexpr,
):
    """Write a key and a value of every row that is not idle at the cursor. Grid: (kv heads, rows)."""
    head, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if tl.load(lengths + row) > 0:
        column = tl.load(cursor).to(tl.int64)
        at = tl.arange(0, DIM_PAD)
        v_at = tl.arange(0, VDIM_PAD)
        source = row * tl.num_programs(0) + head
        k = tl.load(new_key + source * DIM + at, mask=at < DIM)
        tl.store(key + row * key_row + column * key_column + head * key_head + at, k, mask=at < DIM)
        v = tl.load(new_value + source * VDIM + v_at, mask=v_at < VDIM)
        place = value + row * value_row + column * value_column + head * value_head
        tl.store(place + v_at, v, mask=v_at < VDIM)
