"""What the backward kernels of attention do with one block beyond flash_attention_tiles.py."""

import triton
import triton.language as tl

from .flash_attention_tiles import (
    LOG2E,
    append,
    block_offsets,
    kept,
    log2_scores,
    product,
    row_offsets,
)
from .signals import add_unordered


@triton.jit
def row_numbers(lse, delta, rows, valid, lse_stride, delta_stride, CHECK: tl.constexpr):
    """(lse in units of log 2, delta) of these rows. A row that saw nothing has lse -inf and
    infinite weights, none of which is seen."""
    lse += row_offsets(rows, lse_stride)
    delta += row_offsets(rows, delta_stride)
    if CHECK:
        return tl.load(lse, valid, other=0.0) * LOG2E, tl.load(delta, valid, other=0.0)
    return tl.load(lse) * LOG2E, tl.load(delta)


@triton.jit
def block_weights(
    raw,  # q . k of a block, or its transpose
    log_sum,  # of a shape that broadcasts, as all below
    seen,  # where not seen, the weight is 0; if MASKED
    q_pos,
    k_pos,
    numbers,
    MASKED: tl.constexpr,
    FOLD: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
):
    """(weights, tanh of the softcap or raw)."""
    scale, softcap, slope = numbers[:3]
    capped = raw
    if FOLD:
        weights = tl.math.exp2(raw * (scale * LOG2E) - log_sum)
    else:
        scores, capped = log2_scores(raw, scale, softcap, slope, q_pos, k_pos, SOFTCAP, ALIBI)
        weights = tl.math.exp2(scores - log_sum)
    if MASKED:  # after the exponential, which may be infinite where nothing is seen
        weights = tl.where(seen, weights, 0.0)
    return weights, capped


@triton.jit
def score_gradients(
    weights,
    capped,
    dp,  # dout . v
    delta,
    q_pos,
    k_pos,
    numbers,
    SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """ds, without the scale of the softmax."""
    if DROPOUT:
        dp = dropped(dp, q_pos, k_pos, numbers)
    gradients = weights * (dp - delta)
    if SOFTCAP:
        gradients = gradients * (1.0 - capped * capped)
    return gradients


@triton.jit
def dropped(x, q_pos, k_pos, numbers):
    document, plane, low, high, threshold, undrop = numbers[3:]
    return tl.where(kept(q_pos, k_pos, document, plane, low, high, threshold), x * undrop, 0.0)


@triton.jit
def add_products(acc, a, b, UPCAST: tl.constexpr):
    """acc[part] + a @ b[part]."""
    sums = ()
    for part in tl.static_range(len(acc)):
        sums = append(sums, product(a, b[part], acc[part], UPCAST))
    return sums


@triton.jit
def zeros(ROWS: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr):
    parts = (tl.zeros((ROWS, MAIN), tl.float32),)
    if TAIL > 0:
        parts = append(parts, tl.zeros((ROWS, TAIL), tl.float32))
    return parts


@triton.jit
def scaled(parts, factor):
    out = ()
    for part in tl.static_range(len(parts)):
        out = append(out, parts[part] * factor)
    return out


@triton.jit
def add_atomically(
    base,
    parts,
    row,
    lanes,
    valid,
    strides,
    SIZE: tl.constexpr,
    MAIN: tl.constexpr,
):
    base += row_offsets(row, strides[1])
    for part in tl.static_range(len(parts)):
        columns = part * MAIN + tl.arange(0, parts[part].shape[1])
        pointers = base + block_offsets(lanes, columns, strides, True)
        mask = valid[:, None] & (columns < SIZE)[None, :]
        add_unordered(pointers, parts[part], mask)
