"""dk and dv of one step of attention, and dq too in its fused form; flash_attention_backward.py.

A program owns a tile of keys of one kv head and meets the queries of all heads that share it.
"""

import triton
import triton.language as tl

from .flash_attention_gradients import (
    add_atomically,
    add_products,
    block_weights,
    dropped,
    row_numbers,
    scaled,
    score_gradients,
    zeros,
)
from .flash_attention_tiles import (
    VARYING,
    met_block,
    met_segment,
    numbers_of,
    of_head,
    own_parts,
    place,
    products,
    store_parts,
    tile_rows,
    visible,
)


@triton.jit(do_not_specialize=VARYING)
def dkdv_kernel(
    dq,  # fp32 [batch, seq_q, heads, SIZE], if FUSED
    dk,  # fp32 [batch, seq_k, kv_heads, SIZE]
    dv,  # fp32 [batch, seq_k, kv_heads, SIZE_V]
    dout,  # [batch, seq_q, heads, SIZE_V]
    q,  # [batch, seq_q, heads, SIZE]
    k,  # [batch, seq_k, kv_heads, SIZE]
    v,  # [batch, seq_k, kv_heads, SIZE_V]
    q_blocks,  # descriptors of q as [batch, heads, seq_q, SIZE], one for each part
    dout_blocks,
    lse,  # fp32 [batch, heads, seq_q]
    delta,
    slopes,  # fp32 [batch or 1, heads], if ALIBI
    tiles,  # of keys
    segments,  # of queries
    dq_strides,  # (batch, row, head, column)
    dk_strides,
    dv_strides,
    dout_strides,
    q_strides,
    k_strides,
    v_strides,
    lse_strides,  # (batch, head, row)
    delta_strides,
    slope_strides,  # (batch, head)
    scale,
    softcap,
    undrop,
    threshold,
    seed_low,
    seed_high,
    first_head,
    all_heads,
    before,
    after,
    tile_count,
    kv_heads,
    group,
    SIZE: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    SIZE_V: tl.constexpr,
    MAIN_V: tl.constexpr,
    TAIL_V: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EDGE: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    FOLD: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    DROPOUT: tl.constexpr,
    FUSED: tl.constexpr,
    FAR: tl.constexpr,
    UPCAST: tl.constexpr,
):
    tile, kv_head, batch = place(tiles, tile_count, kv_heads)
    own = tile_rows(tile, BLOCK_K)
    keys = own_parts(k, batch, kv_head, own, k_strides, SIZE, MAIN, TAIL, FAR)
    values = own_parts(v, batch, kv_head, own, v_strides, SIZE_V, MAIN_V, TAIL_V, FAR)
    to_k = zeros(BLOCK_K, MAIN, TAIL)
    to_v = zeros(BLOCK_K, MAIN_V, TAIL_V)

    for masked in tl.static_range(2):
        tile, kv_head, batch = place(tiles, tile_count, kv_heads)
        to_k, to_v = _walk_queries(
            to_k, to_v, keys, values, dq, dout, q, q_blocks, dout_blocks, lse, delta, slopes, tile,
            segments, dq_strides, dout_strides, q_strides, lse_strides, delta_strides,
            slope_strides, scale, softcap, undrop, threshold, seed_low, seed_high, first_head,
            all_heads, before, after, batch, kv_head, group, masked == 1, SIZE, MAIN, TAIL, SIZE_V,
            MAIN_V, TAIL_V, EDGE if masked == 1 else BLOCK_Q, BLOCK_K, DESCRIPTORS, FOLD, SOFTCAP,
            ALIBI, BEFORE, AFTER, DROPOUT, FUSED, FAR, UPCAST,
        )  # fmt: skip

    tile, kv_head, batch = place(tiles, tile_count, kv_heads)
    begin, lanes, valid = tile_rows(tile, BLOCK_K)
    dk, dv = of_head(dk, batch, kv_head, dk_strides), of_head(dv, batch, kv_head, dv_strides)
    store_parts(dv, to_v, begin, lanes, valid, dv_strides, SIZE_V, MAIN_V, True)
    to_k = scaled(to_k, scale)
    store_parts(dk, to_k, begin, lanes, valid, dk_strides, SIZE, MAIN, True)


@triton.jit
def _walk_queries(
    to_k,
    to_v,
    keys,
    values,
    dq,
    dout,
    q,
    q_blocks,
    dout_blocks,
    lse,
    delta,
    slopes,
    tile,
    segments,
    dq_strides,
    dout_strides,
    q_strides,
    lse_strides,
    delta_strides,
    slope_strides,
    scale,
    softcap,
    undrop,
    threshold,
    seed_low,
    seed_high,
    first_head,
    all_heads,
    before,
    after,
    batch,
    kv_head,
    group,
    MASKED: tl.constexpr,
    SIZE: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    SIZE_V: tl.constexpr,
    MAIN_V: tl.constexpr,
    TAIL_V: tl.constexpr,
    BLOCK: tl.constexpr,  # of queries
    BLOCK_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    FOLD: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    DROPOUT: tl.constexpr,
    FUSED: tl.constexpr,
    FAR: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """(to_k, to_v) after the queries of all heads that share the kv head: of all segments the
    blocks that need no mask, or those that do."""
    lanes = tl.arange(0, BLOCK)
    _, own, valid = tile_rows(tile, BLOCK_K)
    k_pos = tl.load(tile + 2) + own * tl.load(tile + 3)
    document = tl.load(tile + 4)
    begin_segments = tl.load(tile + 5)
    count = tl.load(tile + 6) - begin_segments
    for step in range(group * count):  # one loop for heads and segments: two take more registers
        head = kv_head * group + step // count
        q_base = of_head(q, batch, head, q_strides)
        dout_base = of_head(dout, batch, head, dout_strides)
        lse_base = of_head(lse, batch, head, lse_strides)
        delta_base = of_head(delta, batch, head, delta_strides)
        dq_base = dq
        if FUSED:
            dq_base = of_head(dq, batch, head, dq_strides)
        numbers = numbers_of(
            slopes, slope_strides, scale, softcap, document, seed_low, seed_high, threshold, undrop,
            first_head, all_heads, batch, head, ALIBI,
        )  # fmt: skip
        where, seen, start, stop = met_segment(  # of queries, by each key
            segments + (begin_segments + step % count) * 5, k_pos, valid, after, before, MASKED,
            AFTER, BEFORE,
        )  # fmt: skip
        for row in tl.range(start, stop, BLOCK, num_stages=1 if MASKED else None):
            rows = row + lanes
            inside = rows < where[1]
            queries, douts = met_block(
                q_base, dout_base, q_blocks, dout_blocks, batch, head, row, lanes, inside,
                q_strides, dout_strides, SIZE, MAIN, TAIL, SIZE_V, MAIN_V, TAIL_V, MASKED,
                DESCRIPTORS, FAR,
            )  # fmt: skip
            to_k, to_v = _meet_queries(
                to_k, to_v, keys, values, queries, douts, dq_base, lse_base, delta_base, row,
                lanes, inside, seen, (where[2] + (rows - where[0]) * where[3])[None, :],
                k_pos[:, None], dq_strides, lse_strides[2], delta_strides[2], numbers, MASKED,
                FOLD, SOFTCAP, ALIBI, AFTER, DROPOUT, FUSED, FAR, UPCAST, SIZE, MAIN, TAIL,
            )  # fmt: skip
    return to_k, to_v


@triton.jit
def _meet_queries(
    to_k,  # tuples of parts, fp32 [BLOCK_K, width]
    to_v,
    keys,  # tuples of parts
    values,
    queries,
    douts,
    dq,  # of this head
    lse,
    delta,
    row,
    lanes,
    inside,  # bool [BLOCK_Q]
    seen,  # (first, last) row that each key is seen by, int32 [BLOCK_K]
    q_pos,  # [1, BLOCK_Q]
    k_pos,  # [BLOCK_K, 1]
    dq_strides,
    lse_stride,
    delta_stride,
    numbers,
    MASKED: tl.constexpr,
    FOLD: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    AFTER: tl.constexpr,
    DROPOUT: tl.constexpr,
    FUSED: tl.constexpr,
    FAR: tl.constexpr,
    UPCAST: tl.constexpr,
    SIZE: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
):
    """(to_k, to_v) after these queries too; scores are transposed, [BLOCK_K, BLOCK_Q]."""
    log_sum, its_delta = row_numbers(
        lse, delta, row + lanes, inside, lse_stride, delta_stride, MASKED
    )
    both = visible(lanes, row, seen, AFTER)
    raw = products(keys, queries, UPCAST)
    weights, capped = block_weights(
        raw, log_sum[None, :], both, q_pos, k_pos, numbers, MASKED, FOLD, SOFTCAP, ALIBI
    )  # fmt: skip
    if DROPOUT:
        to_v = add_products(to_v, dropped(weights, q_pos, k_pos, numbers), douts, UPCAST)
    else:
        to_v = add_products(to_v, weights, douts, UPCAST)
    dp = products(values, douts, UPCAST)
    ds = score_gradients(
        weights, capped, dp, its_delta[None, :], q_pos, k_pos, numbers, SOFTCAP, DROPOUT
    )
    if not UPCAST:
        ds = ds.to(keys[0].dtype)
    to_k = add_products(to_k, ds, queries, UPCAST)
    if FUSED:
        to_q = add_products(zeros(lanes.shape[0], MAIN, TAIL), ds.T, keys, UPCAST)
        to_q = scaled(to_q, numbers[0])
        add_atomically(dq, to_q, row, lanes, inside, dq_strides, SIZE, MAIN)
    return to_k, to_v
