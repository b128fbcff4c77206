"""dq of one step of attention, without an atomic; the algebra is in flash_attention_backward.py.

A program owns a tile of queries of one head and meets the keys that any of them sees.
"""

import triton
import triton.language as tl

from .flash_attention_gradients import (
    add_products,
    block_weights,
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
def dq_kernel(
    dq,  # fp32 [batch, seq_q, heads, SIZE]
    dout,  # [batch, seq_q, heads, SIZE_V]
    q,  # [batch, seq_q, heads, SIZE]
    k,  # [batch, seq_k, kv_heads, SIZE]
    v,  # [batch, seq_k, kv_heads, SIZE_V]
    k_blocks,  # descriptors of k as [batch, kv_heads, seq_k, SIZE], one for each part
    v_blocks,
    lse,  # fp32 [batch, heads, seq_q]
    delta,
    slopes,
    tiles,  # of queries
    segments,  # of keys
    dq_strides,  # (batch, row, head, column)
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
    heads,
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
    FAR: tl.constexpr,
    UPCAST: tl.constexpr,
):
    tile, head, batch = place(tiles, tile_count, heads)
    own = tile_rows(tile, BLOCK_Q)
    queries = own_parts(q, batch, head, own, q_strides, SIZE, MAIN, TAIL, FAR)
    douts = own_parts(dout, batch, head, own, dout_strides, SIZE_V, MAIN_V, TAIL_V, FAR)
    log_sum, its_delta = row_numbers(
        of_head(lse, batch, head, lse_strides), of_head(delta, batch, head, delta_strides),
        own[0] + own[1], own[2], lse_strides[2], delta_strides[2], True,
    )  # fmt: skip
    to_q = zeros(BLOCK_Q, MAIN, TAIL)
    for masked in tl.static_range(2):
        tile, head, batch = place(tiles, tile_count, heads)
        to_q = _walk_keys(
            to_q, queries, douts, log_sum, its_delta, k, v, k_blocks, v_blocks, slopes, tile,
            segments, k_strides, v_strides, slope_strides, scale, softcap, undrop, threshold,
            seed_low, seed_high, first_head, all_heads, before, after, batch, head, group,
            masked == 1, SIZE, MAIN, TAIL, SIZE_V, MAIN_V, TAIL_V, BLOCK_Q,
            EDGE if masked == 1 else BLOCK_K, DESCRIPTORS, FOLD, SOFTCAP, ALIBI, BEFORE, AFTER,
            DROPOUT, FAR, UPCAST,
        )  # fmt: skip
    tile, head, batch = place(tiles, tile_count, heads)
    begin, lanes, valid = tile_rows(tile, BLOCK_Q)
    dq = of_head(dq, batch, head, dq_strides)
    store_parts(dq, scaled(to_q, scale), begin, lanes, valid, dq_strides, SIZE, MAIN, True)


@triton.jit
def _walk_keys(
    to_q,
    queries,
    douts,
    log_sum,
    delta,
    k,
    v,
    k_blocks,
    v_blocks,
    slopes,
    tile,
    segments,
    k_strides,
    v_strides,
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
    head,
    group,
    MASKED: tl.constexpr,
    SIZE: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    SIZE_V: tl.constexpr,
    MAIN_V: tl.constexpr,
    TAIL_V: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK: tl.constexpr,  # of keys
    DESCRIPTORS: tl.constexpr,
    FOLD: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAR: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """to_q after all blocks of the tile that need no mask, or all that do."""
    kv_head = head // group
    k_base, v_base = of_head(k, batch, kv_head, k_strides), of_head(v, batch, kv_head, v_strides)
    lanes = tl.arange(0, BLOCK)
    _, lanes_q, valid = tile_rows(tile, BLOCK_Q)
    q_pos = tl.load(tile + 2) + lanes_q * tl.load(tile + 3)
    numbers = numbers_of(
        slopes, slope_strides, scale, softcap, tl.load(tile + 4), seed_low, seed_high, threshold,
        undrop, first_head, all_heads, batch, head, ALIBI,
    )  # fmt: skip
    for number in range(tl.load(tile + 5), tl.load(tile + 6)):
        where, seen, start, stop = met_segment(
            segments + number * 5, q_pos, valid, before, after, MASKED, BEFORE, AFTER
        )
        for row in tl.range(start, stop, BLOCK, num_stages=1 if MASKED else None):
            keys, values = met_block(
                k_base, v_base, k_blocks, v_blocks, batch, kv_head, row, lanes,
                row + lanes < where[1], k_strides, v_strides, SIZE, MAIN, TAIL, SIZE_V, MAIN_V,
                TAIL_V, MASKED, DESCRIPTORS, FAR,
            )  # fmt: skip
            k_pos = (where[2] + (row - where[0] + lanes) * where[3])[None, :]
            to_q = _meet_keys(
                to_q, queries, douts, keys, values, log_sum, delta, lanes, row, seen,
                q_pos[:, None], k_pos, numbers, MASKED, FOLD, SOFTCAP, ALIBI, BEFORE, DROPOUT,
                UPCAST,
            )  # fmt: skip
    return to_q


@triton.jit
def _meet_keys(
    to_q,  # tuple of parts, fp32 [BLOCK_Q, width]
    queries,
    douts,
    keys,
    values,
    log_sum,  # [BLOCK_Q]
    delta,
    lanes,  # int32 [BLOCK_K]: of the block
    row,  # its first row
    seen,  # (first, last) row that each query sees, int32 [BLOCK_Q]
    q_pos,  # [BLOCK_Q, 1]
    k_pos,  # [1, BLOCK_K]
    numbers,
    MASKED: tl.constexpr,
    FOLD: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    BEFORE: tl.constexpr,
    DROPOUT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """to_q after these keys too."""
    raw = products(queries, keys, UPCAST)
    mask = visible(lanes, row, seen, BEFORE)
    weights, capped = block_weights(
        raw, log_sum[:, None], mask, q_pos, k_pos, numbers, MASKED, FOLD, SOFTCAP, ALIBI
    )  # fmt: skip
    dp = products(douts, values, UPCAST)
    ds = score_gradients(
        weights, capped, dp, delta[:, None], q_pos, k_pos, numbers, SOFTCAP, DROPOUT
    )
    if not UPCAST:
        ds = ds.to(keys[0].dtype)
    return add_products(to_q, ds, keys, UPCAST)
