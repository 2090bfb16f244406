"""The card's kernels of prompts, called through `prompt_attention.py`.

After FlashAttention (Dao 2023): a program keeps a block of queries and a running maximum and sum (online
softmax, in float32) while it reads the columns that they see. Where the columns before the chunk lie is read
on the card: an address, as the distance from a record that stays where it is.
Scores are in units of log2(e), since the card's exponential has base 2.
"""

# pyright: reportMissingImports=false
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# Triton compiles these functions from their text; their arguments are pointers and numbers of its own types.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["window"])
def attend_prompt_kernel(
    query,
    new_key,
    new_value,
    key_anchor,
    value_anchor,
    blocks,
    sinks,
    out,
    scale,
    softcap,
    window,
    query_token,
    query_head,
    key_token,
    key_head,
    value_token,
    value_head,
    old_key_head,
    old_value_head,
    record,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    VDIM: tl.constexpr,
    VDIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    ITEM: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of a block of one prompt's queries, of one head. Grid: (heads, blocks).

    Columns before the chunk are read in the prompt's records, the chunk's own from the states that the model
    has just computed: these lie closer together.
    """
    head, number, blocks_n = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    token = tl.load(blocks + number)
    count = tl.load(blocks + blocks_n + number).to(tl.int32)
    if count > 0:
        position = tl.load(blocks + 2 * blocks_n + number).to(tl.int32)
        past = tl.load(blocks + 3 * blocks_n + number).to(tl.int32)
        # Records are aligned to 16 bytes; the compiler can't know.
        place = tl.multiple_of(tl.load(blocks + 4 * blocks_n + number) // ITEM, 16 // ITEM)
        kv_head = (head // GROUP).to(tl.int64)
        member = tl.arange(0, TILE)
        at = tl.arange(0, DIM_PAD)
        v_at = tl.arange(0, VDIM_PAD)
        theirs = member < count
        q_at = query + (token + member)[:, None] * query_token + head * query_head + at[None, :]
        q = tl.load(q_at, mask=theirs[:, None] & (at[None, :] < DIM), other=0.0)
        seen_from = position + member
        oldest = 0
        if WINDOWED:
            oldest = tl.maximum(position - window + 1, 0)
        biggest = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        sum_v = tl.zeros([TILE, VDIM_PAD], tl.float32)
        biggest, total, sum_v = attend_range(
            q,
            key_anchor + place + kv_head * old_key_head,
            value_anchor + place + kv_head * old_value_head,
            oldest,
            past,
            record,
            record,
            seen_from,
            window,
            scale,
            softcap,
            biggest,
            total,
            sum_v,
            DIM,
            DIM_PAD,
            VDIM,
            VDIM_PAD,
            BLOCK,
            SOFTCAP,
            WINDOWED,
            PRECISION,
        )
        biggest, total, sum_v = attend_range(
            q,
            new_key + (token - position) * key_token + kv_head * key_head,
            new_value + (token - position) * value_token + kv_head * value_head,
            tl.maximum(oldest, past),
            position + count,
            key_token,
            value_token,
            seen_from,
            window,
            scale,
            softcap,
            biggest,
            total,
            sum_v,
            DIM,
            DIM_PAD,
            VDIM,
            VDIM_PAD,
            BLOCK,
            SOFTCAP,
            WINDOWED,
            PRECISION,
        )
        if SINKS:
            sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
            new_biggest = tl.maximum(biggest, sink)
            shrink = tl.exp2(biggest - new_biggest)
            total = total * shrink + tl.exp2(sink - new_biggest)
            sum_v = sum_v * shrink[:, None]
        out_row = (token + member)[:, None] * tl.num_programs(0) + head
        tl.store(
            out + out_row * VDIM + v_at[None, :],
            (sum_v / total[:, None]).to(out.dtype.element_ty),
            mask=theirs[:, None] & (v_at[None, :] < VDIM),
        )


@triton.jit
def attend_range(
    q,
    keys,
    values,
    first,
    last,
    key_column,
    value_column,
    seen_from,
    window,
    scale,
    softcap,
    biggest,
    total,
    sum_v,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    VDIM: tl.constexpr,
    VDIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Go over columns first .. last - 1, as far as each query sees them."""
    at = tl.arange(0, DIM_PAD)
    v_at = tl.arange(0, VDIM_PAD)
    for begin in tl.range(first, last, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        there = column < last
        wide = column.to(tl.int64)[:, None]
        k_mask = there[:, None] & (at[None, :] < DIM)
        k = tl.load(keys + wide * key_column + at[None, :], mask=k_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SOFTCAP:
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
        seen = there[None, :] & (column[None, :] <= seen_from[:, None])
        if WINDOWED:
            seen = seen & (column[None, :] > seen_from[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        new_biggest = tl.maximum(biggest, tl.max(scores, 1))
        # A query that sees none of the columns so far must not make -inf - -inf.
        base = tl.where(new_biggest == float("-inf"), 0.0, new_biggest)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(biggest - base)
        v_mask = there[:, None] & (v_at[None, :] < VDIM)
        v = tl.load(values + wide * value_column + v_at[None, :], mask=v_mask, other=0.0)
        total = total * shrink + tl.sum(weights, 1)
        sum_v = sum_v * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        biggest = new_biggest
    return biggest, total, sum_v


@triton.jit
def write_tokens_kernel(
    new_key,
    new_value,
    key_anchor,
    value_anchor,
    places,
    key_token,
    key_head,
    value_token,
    value_head,
    old_key_head,
    old_value_head,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    VDIM: tl.constexpr,
    VDIM_PAD: tl.constexpr,
    ITEM: tl.constexpr,
):
    """Write a token's keys and values of one layer into its record, if it has one. Grid: (tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(places + token)
    if place != 0:
        place = tl.multiple_of(place // ITEM, 16 // ITEM)
        head = tl.arange(0, HEADS_PAD)
        at = tl.arange(0, DIM_PAD)
        v_at = tl.arange(0, VDIM_PAD)
        k_mask = (head[:, None] < HEADS) & (at[None, :] < DIM)
        v_mask = (head[:, None] < HEADS) & (v_at[None, :] < VDIM)
        k = tl.load(new_key + token * key_token + head[:, None] * key_head + at[None, :], mask=k_mask)
        tl.store(key_anchor + place + head[:, None] * old_key_head + at[None, :], k, mask=k_mask)
        v = tl.load(new_value + token * value_token + head[:, None] * value_head + v_at[None, :], mask=v_mask)
        tl.store(value_anchor + place + head[:, None] * old_value_head + v_at[None, :], v, mask=v_mask)
