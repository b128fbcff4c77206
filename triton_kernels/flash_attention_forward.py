"""The kernels of the attention forward; what they compute and their launchers: flash_attention.py.

A program owns a tile of queries of one head and meets the keys that any of them sees, first blocks
that need no mask, then those that do.
"""

import triton
import triton.language as tl

from .flash_attention_tiles import (
    LN2,
    LOG2E,
    VARYING,
    append,
    kept,
    load_parts,
    log2_scores,
    met_block,
    met_segment,
    numbers_of,
    of_head,
    own_parts,
    place,
    product,
    products,
    row_offsets,
    store_parts,
    tile_rows,
    visible,
)

__all__ = ["finish_kernel", "forward_kernel"]


# --- 2 device helpers


@triton.jit
def _meet(
    m,  # [BLOCK_Q] fp32: row maximum, in units of log 2
    total,  # [BLOCK_Q] fp32
    acc,  # tuple of [BLOCK_Q, width] fp32
    q,  # tuple of parts
    k,
    v,
    lanes,  # int32 [BLOCK_K]: of the block
    row,  # its first row
    seen,  # (first, last) row that each query sees, int32 [BLOCK_Q]
    q_pos,  # int32 [BLOCK_Q, 1]
    k_pos,  # int32 [1, BLOCK_K]
    numbers,  # scale, softcap, slope, document, plane, seeds, threshold, 1 / (1 - dropout_p)
    MASKED: tl.constexpr,
    FOLD: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    BEFORE: tl.constexpr,
    DROPOUT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """The state after these keys too."""
    scale, softcap, slope, document, plane, low, high, threshold, undrop = numbers
    scores = products(q, k, UPCAST)
    if not FOLD:
        scores, _ = log2_scores(scores, scale, softcap, slope, q_pos, k_pos, SOFTCAP, ALIBI)
    if MASKED:
        mask = visible(lanes, row, seen, BEFORE)
        scores = tl.where(mask, scores, float("-inf"))
    highest = tl.max(scores, 1)
    if FOLD:  # one multiply-add for each weight: the scale goes in with the maximum
        highest = tl.maximum(m, highest * (scale * LOG2E))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.math.exp2(scores * (scale * LOG2E) - base[:, None])
    else:
        highest = tl.maximum(m, highest)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.math.exp2(scores - base[:, None])
    shrink = tl.math.exp2(m - base)
    total = total * shrink + tl.sum(weights, 1)
    if DROPOUT:
        keep = kept(q_pos, k_pos, document, plane, low, high, threshold)
        weights = tl.where(keep, weights * undrop, 0.0)
    sums = ()
    if not UPCAST:
        weights = weights.to(v[0].dtype)
    for part in tl.static_range(len(acc)):
        sums = append(sums, product(weights, v[part], acc[part] * shrink[:, None], UPCAST))
    return highest, total, sums


@triton.jit
def _walk_keys(
    m,
    total,
    sums,
    own,
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
    """The state after all blocks of the tile that need no mask, or all that do."""
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
            m, total, sums = _meet(
                m, total, sums, own, keys, values, lanes, row, seen, q_pos[:, None], k_pos,
                numbers, MASKED, FOLD, SOFTCAP, ALIBI, BEFORE, DROPOUT, UPCAST,
            )  # fmt: skip
    return m, total, sums


@triton.jit
def _normalised(m, total, sink, SINKS: tl.constexpr):
    """(factor of acc, natural log-sum-exp); an empty row has 0 and -inf."""
    shrink = tl.full(m.shape, 1.0, tl.float32)
    if SINKS:
        highest = tl.maximum(m, sink * LOG2E)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        shrink = tl.math.exp2(m - base)
        total = total * shrink + tl.math.exp2(sink * LOG2E - base)
        m = highest
    empty = total == 0.0
    some = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), (m + tl.math.log2(some)) * LN2)
    return tl.where(empty, 0.0, shrink / some), lse


# --- 3 kernels


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    q,  # [batch, seq_q, heads, SIZE]
    k,  # [batch, seq_k, kv_heads, SIZE]
    v,  # [batch, seq_k, kv_heads, SIZE_V]
    k_blocks,  # tuple of descriptors of k as [batch, kv_heads, seq_k, SIZE], one for each part
    v_blocks,
    row_max,  # fp32 [batch, heads, seq_q]: state, read if LOAD, written unless FINISH
    row_sum,
    acc,  # fp32 [batch, seq_q, heads, SIZE_V]
    out,  # [batch, seq_q, heads, SIZE_V]: written if FINISH
    lse,  # fp32 [batch, heads, seq_q]
    sinks,  # [heads], if SINKS
    slopes,  # fp32 [batch or 1, heads], if ALIBI
    tiles,  # int32 [tile_count, 8]: Plan.tiles
    segments,  # int32 [*, 5]: Plan.segments
    q_strides,  # (batch, row, head, column)
    k_strides,
    v_strides,
    acc_strides,
    out_strides,
    row_max_strides,  # (batch, head, row)
    row_sum_strides,
    lse_strides,
    slope_strides,  # (batch, head)
    scale,
    softcap,
    undrop,  # 1 / (1 - dropout_p)
    threshold,
    seed_low,
    seed_high,
    first_head,
    all_heads,
    before,
    after,
    tile_count,
    heads,
    group,  # heads / kv_heads
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
    SINKS: tl.constexpr,
    LOAD: tl.constexpr,
    FINISH: tl.constexpr,
    FAR: tl.constexpr,
    UPCAST: tl.constexpr,
):
    tile, head, batch = place(tiles, tile_count, heads)
    own = tile_rows(tile, BLOCK_Q)
    queries = own_parts(q, batch, head, own, q_strides, SIZE, MAIN, TAIL, FAR)
    if LOAD:
        rows, valid = own[0] + own[1], own[2]
        max_base = of_head(row_max, batch, head, row_max_strides)
        sum_base = of_head(row_sum, batch, head, row_sum_strides)
        m = tl.load(max_base + row_offsets(rows, row_max_strides[2]), valid, other=float("-inf"))
        m = m * LOG2E
        total = tl.load(sum_base + row_offsets(rows, row_sum_strides[2]), valid, other=0.0)
        sums = own_parts(acc, batch, head, own, acc_strides, SIZE_V, MAIN_V, TAIL_V, FAR)
    else:
        m = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_Q,), tl.float32)
        sums = (tl.zeros((BLOCK_Q, MAIN_V), tl.float32),)
        if TAIL_V > 0:
            sums = append(sums, tl.zeros((BLOCK_Q, TAIL_V), tl.float32))

    for masked in tl.static_range(2):
        tile, head, batch = place(tiles, tile_count, heads)
        m, total, sums = _walk_keys(
            m, total, sums, queries, k, v, k_blocks, v_blocks, slopes, tile, segments, k_strides,
            v_strides, slope_strides, scale, softcap, undrop, threshold, seed_low, seed_high,
            first_head, all_heads, before, after, batch, head, group, masked == 1, SIZE, MAIN, TAIL,
            SIZE_V, MAIN_V, TAIL_V, BLOCK_Q, EDGE if masked == 1 else BLOCK_K, DESCRIPTORS, FOLD,
            SOFTCAP, ALIBI, BEFORE, AFTER, DROPOUT, FAR, UPCAST,
        )  # fmt: skip

    tile, head, batch = place(tiles, tile_count, heads)
    begin, lanes, valid = tile_rows(tile, BLOCK_Q)
    rows = begin + lanes
    if FINISH:
        sink = 0.0
        if SINKS:
            sink = tl.load(sinks + head).to(tl.float32)
        factor, log_sum = _normalised(m, total, sink, SINKS)
        lse_base = of_head(lse, batch, head, lse_strides)
        tl.store(lse_base + row_offsets(rows, lse_strides[2]), log_sum, valid)
        out_base = of_head(out, batch, head, out_strides)
        results = ()
        for part in tl.static_range(len(sums)):
            results = append(results, sums[part] * factor[:, None])
        store_parts(out_base, results, begin, lanes, valid, out_strides, SIZE_V, MAIN_V, False)
    else:
        row_max = of_head(row_max, batch, head, row_max_strides)
        row_sum = of_head(row_sum, batch, head, row_sum_strides)
        acc = of_head(acc, batch, head, acc_strides)
        tl.store(row_max + row_offsets(rows, row_max_strides[2]), m * LN2, valid)
        tl.store(row_sum + row_offsets(rows, row_sum_strides[2]), total, valid)
        store_parts(acc, sums, begin, lanes, valid, acc_strides, SIZE_V, MAIN_V, False)


@triton.jit(do_not_specialize=["seq"])
def finish_kernel(
    out,  # [batch, seq, heads, SIZE_V]
    lse,  # fp32 [batch, heads, seq]
    row_max,
    row_sum,
    acc,
    sinks,  # [heads], if SINKS
    out_strides,
    lse_strides,
    row_max_strides,
    row_sum_strides,
    acc_strides,
    seq,
    heads,
    SIZE_V: tl.constexpr,
    MAIN_V: tl.constexpr,
    TAIL_V: tl.constexpr,
    ROWS: tl.constexpr,
    SINKS: tl.constexpr,
):
    blocks = tl.cdiv(seq, ROWS)
    rows = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(0) // blocks % heads
    batch = tl.program_id(0) // (blocks * heads)
    valid = rows < seq
    row_max = of_head(row_max, batch, head, row_max_strides)
    row_sum = of_head(row_sum, batch, head, row_sum_strides)
    acc = of_head(acc, batch, head, acc_strides)
    m = tl.load(row_max + row_offsets(rows, row_max_strides[2]), valid, other=float("-inf")) * LOG2E
    total = tl.load(row_sum + row_offsets(rows, row_sum_strides[2]), valid, other=0.0)
    sums = load_parts(acc, 0, rows, valid, acc_strides, SIZE_V, MAIN_V, TAIL_V, True, True)
    sink = 0.0
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
    factor, log_sum = _normalised(m, total, sink, SINKS)
    lse = of_head(lse, batch, head, lse_strides)
    tl.store(lse + row_offsets(rows, lse_strides[2]), log_sum, valid)
    out = of_head(out, batch, head, out_strides)
    results = ()
    for part in tl.static_range(len(sums)):
        results = append(results, sums[part] * factor[:, None])
    store_parts(out, results, 0, rows, valid, out_strides, SIZE_V, MAIN_V, False)
