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


@triton.jit
def _part_of(
    length, newest, window, capacity, split, doublings, enough, BLOCK: tl.constexpr, SPLIT: tl.constexpr
):
    """A split's part of what a row sees.

    Returns:
        Its first column and the one after its last, counted from the oldest; the columns that a row sees; how
        many of them are a split's; the place of the oldest.
    """
    seen = tl.where(window > 0, tl.minimum(length, window), length)
    oldest = newest - seen + 1
    oldest = tl.where(oldest < 0, oldest + capacity, oldest)
    per_split = seen
    if SPLIT:
        # Halved, not divided: a division would take longer than a load.
        halvings = (seen > enough).to(tl.int32)
        halvings += (seen > enough * 2).to(tl.int32) + (seen > enough * 4).to(tl.int32)
        halvings += (seen > enough * 8).to(tl.int32) + (seen > enough * 16).to(tl.int32)
        halvings = tl.minimum(halvings, doublings)
        per_split = ((tl.cdiv(seen, BLOCK) + (1 << halvings) - 1) >> halvings) * BLOCK
    first = split * per_split
    return first, tl.minimum(seen, first + per_split), seen, per_split, oldest


@triton.jit
def _capped(scores, softcap, SOFTCAP: tl.constexpr):
    if SOFTCAP:
        scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
    return scores


@triton.jit
def _sum_of(part, one, mask, VDIM: tl.constexpr, VDIM_PAD: tl.constexpr):
    v_at = tl.arange(0, VDIM_PAD)[None, :]
    return tl.load(part + one[:, None] * VDIM + v_at, mask=mask[:, None] & (v_at < VDIM), other=0.0)


@triton.jit
def _put_together(
    part,
    part_total,
    part_biggest,
    parts,
    used,
    in_group,
    TILE: tl.constexpr,
    VDIM: tl.constexpr,
    VDIM_PAD: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
):
    """Biggest score, total weight and sum over the first `used` splits; `parts` is where a head's begin."""
    every = tl.arange(0, MOST_SPLITS)[None, :]
    there = in_group[:, None] & (every < used)
    all_biggest = tl.load(part_biggest + parts[:, None] + every, mask=there, other=-1e30)
    all_total = tl.load(part_total + parts[:, None] + every, mask=there, other=0.0)
    biggest = tl.max(all_biggest, 1)
    total = tl.sum(all_total * tl.exp2(all_biggest - biggest[:, None]), 1)
    sum_v = tl.zeros([TILE, VDIM_PAD], tl.float32)
    for begin in tl.range(0, used, 4):
        # Four at once: each load takes longer than all that is done with it.
        one, two, three, four = parts + begin, parts + begin + 1, parts + begin + 2, parts + begin + 3
        end = parts + used
        biggest_1 = tl.load(part_biggest + one, mask=in_group & (one < end), other=-1e30)
        biggest_2 = tl.load(part_biggest + two, mask=in_group & (two < end), other=-1e30)
        biggest_3 = tl.load(part_biggest + three, mask=in_group & (three < end), other=-1e30)
        biggest_4 = tl.load(part_biggest + four, mask=in_group & (four < end), other=-1e30)
        sum_1 = _sum_of(part, one, in_group & (one < end), VDIM, VDIM_PAD)
        sum_2 = _sum_of(part, two, in_group & (two < end), VDIM, VDIM_PAD)
        sum_3 = _sum_of(part, three, in_group & (three < end), VDIM, VDIM_PAD)
        sum_4 = _sum_of(part, four, in_group & (four < end), VDIM, VDIM_PAD)
        sum_v += sum_1 * tl.exp2(biggest_1 - biggest)[:, None]
        sum_v += sum_2 * tl.exp2(biggest_2 - biggest)[:, None]
        sum_v += sum_3 * tl.exp2(biggest_3 - biggest)[:, None]
        sum_v += sum_4 * tl.exp2(biggest_4 - biggest)[:, None]
    return biggest, total, sum_v


@triton.jit(do_not_specialize=["window", "capacity", "doublings", "enough"])
def attend_kernel(
    query,
    new_key,
    new_value,
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
    doublings,
    enough,
    query_row,
    query_head,
    new_key_row,
    new_key_head,
    new_value_row,
    new_value_head,
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
    SPLIT: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    NEW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of the query heads that share a key head, over one split of a row's range.

    Grid: (kv heads, rows, 2 ** doublings); a row is halved until its parts have no more than `enough`
    columns, so its own length says how many programs have work. Neighbouring programs read neighbouring
    heads: these lie side by side in a record. What is not owned is never loaded: it may be another query's,
    or not committed.

    With NEW, the newest column comes from `new_key` and `new_value`: the program whose split it ends takes it
    from there and writes it to the ring, where no other program reads it.
    """
    kv_head, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    kv_heads = tl.num_programs(0)
    keys = key + row * key_row + kv_head.to(tl.int64) * key_head
    values = value + row * value_row + kv_head.to(tl.int64) * value_head
    # All loads that wait for no other, together.
    member = tl.arange(0, TILE)
    at = tl.arange(0, DIM_PAD)
    v_at = tl.arange(0, VDIM_PAD)
    in_group = member < GROUP
    head = kv_head * GROUP + member
    q_mask = in_group[:, None] & (at[None, :] < DIM)
    q_at = query + row * query_row + head[:, None] * query_head + at[None, :]
    q = tl.load(q_at, mask=q_mask, other=0.0)
    length = tl.load(lengths + row)
    newest = tl.load(cursor)
    first, last, seen, per_split, oldest = _part_of(
        length, newest, window, capacity, split, doublings, enough, BLOCK, SPLIT
    )

    out_row = row * kv_heads * GROUP + head
    out_at = out + out_row[:, None] * VDIM + v_at[None, :]
    out_mask = in_group[:, None] & (v_at[None, :] < VDIM)
    if (first < last) & (newest >= 0):  # That is always so; loaded in the branch, it would come later.
        slot = tl.arange(0, BLOCK)
        biggest = tl.full([TILE], float("-inf"), tl.float32)
        totals = tl.zeros([TILE, BLOCK], tl.float32)  # Summed up over columns once, at the end.
        sum_v = tl.zeros([TILE, VDIM_PAD], tl.float32)
        if NEW:
            has_new = tl.full([1], 0, tl.int32) + last == seen
            k_mask, v_mask = has_new & (at < DIM), has_new & (v_at < VDIM)
            new_k = tl.load(new_key + row * new_key_row + kv_head * new_key_head + at, mask=k_mask, other=0.0)
            new_v = tl.load(
                new_value + row * new_value_row + kv_head * new_value_head + v_at, mask=v_mask, other=0.0
            )
            tl.store(keys + newest.to(tl.int64) * key_column + at, new_k, mask=k_mask)
            tl.store(values + newest.to(tl.int64) * value_column + v_at, new_v, mask=v_mask)
            score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * scale
            biggest = tl.where(has_new, _capped(score, softcap, SOFTCAP), biggest)
            totals = tl.where((has_new & (slot == 0))[None, :], totals + 1.0, totals)
            sum_v += new_v.to(tl.float32)[None, :]
            last = tl.where(last == seen, last - 1, last)
        for begin in tl.range(first, last, BLOCK):
            place = begin + slot
            mine = place < last
            column = oldest + place
            column = tl.where(column >= capacity, column - capacity, column).to(tl.int64)
            k_at = keys + column[:, None] * key_column + at[None, :]
            k = tl.load(k_at, mask=mine[:, None] & (at[None, :] < DIM), other=0.0)
            v_of = values + column[:, None] * value_column + v_at[None, :]
            v = tl.load(v_of, mask=mine[:, None] & (v_at[None, :] < VDIM), other=0.0)
            scores = _capped(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, softcap, SOFTCAP)
            scores = tl.where(mine[None, :], scores, float("-inf"))
            new_biggest = tl.maximum(biggest, tl.max(scores, 1))
            weights = tl.exp2(scores - new_biggest[:, None])
            shrink = tl.exp2(biggest - new_biggest)[:, None]
            totals = totals * shrink + weights
            sum_v = tl.dot(weights.to(v.dtype), v, sum_v * shrink, input_precision=PRECISION)
            biggest = new_biggest
        total = tl.sum(totals, 1)
        is_last = seen > 0  # It is.
        if SPLIT:  # noqa: SIM102 - decided when compiled, the next when run
            if per_split < seen:
                parts = out_row << doublings
                tl.store(part + (parts + split)[:, None] * VDIM + v_at[None, :], sum_v, mask=out_mask)
                tl.store(part_total + parts + split, total, mask=in_group)
                tl.store(part_biggest + parts + split, biggest, mask=in_group)
                tl.debug_barrier()  # All threads have stored before one says so.
                used = tl.cdiv(seen, per_split)
                counter = arrived + row * kv_heads + kv_head
                is_last = tl.atomic_add(counter, 1, sem="acq_rel") == used - 1
                if is_last:
                    tl.store(counter, 0)  # For the next call.
                    biggest, total, sum_v = _put_together(
                        part,
                        part_total,
                        part_biggest,
                        parts,
                        used,
                        in_group,
                        TILE,
                        VDIM,
                        VDIM_PAD,
                        MOST_SPLITS,
                    )
        if is_last:
            if SINKS:
                sink = tl.load(sinks + head, mask=in_group, other=0.0).to(tl.float32)
                sink = sink * 1.4426950408889634
                new_biggest = tl.maximum(biggest, sink)
                shrink = tl.exp2(biggest - new_biggest)
                total = total * shrink + tl.exp2(sink - new_biggest)
                sum_v = sum_v * shrink[:, None]
            total = tl.where(in_group, total, 1.0)
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
