"""What becomes of a tile of sums: scales, bias, activation, residual, one rounding, the store.

Every kernel that multiplies ends in `write_tile`, or in `finish_tile` and `store_tile` where the
result goes somewhere of its own. They are plain functions of Triton: a hook is a line between two
calls, not an argument.
"""

import triton
import triton.language as tl

ACTIVATIONS = ("none", "relu", "silu", "gelu", "gelu_tanh")


@triton.jit
def finish_tile(
    acc,  # [BLOCK_M, BLOCK_N] fp32
    rows,  # int [BLOCK_M], of the output
    columns,  # int [BLOCK_N]
    row_end,
    column_end,
    row_scale,  # fp32 [M] or one value, or None: scale of a
    row_scale_stride,  # 1, or 0 for one value
    column_scale,  # fp32 [N] or one value, or None: scale of b
    column_scale_stride,
    bias,  # [N] or None
    residual,  # [M, N] or None
    stride_rm,
    stride_rn,
    ACTIVATION: tl.constexpr,
):
    """activation(acc * row_scale * column_scale + bias) + residual, in fp32."""
    row_mask = rows < row_end
    column_mask = columns < column_end
    if row_scale is not None:
        scale = tl.load(row_scale + rows.to(tl.int64) * row_scale_stride, mask=row_mask, other=0.0)
        acc = acc * scale[:, None]
    if column_scale is not None:
        offsets = columns.to(tl.int64) * column_scale_stride
        scale = tl.load(column_scale + offsets, mask=column_mask, other=0.0)
        acc = acc * scale[None, :]
    if bias is not None:
        acc = acc + tl.load(bias + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    acc = _activate(acc, ACTIVATION)
    if residual is not None:
        offsets = rows.to(tl.int64)[:, None] * stride_rm + columns.to(tl.int64)[None, :] * stride_rn
        mask = row_mask[:, None] & column_mask[None, :]
        acc = acc + tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    return acc


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    tl.static_assert(
        (ACTIVATION == "none")
        or (ACTIVATION == "relu")
        or (ACTIVATION == "silu")
        or (ACTIVATION == "gelu")
        or (ACTIVATION == "gelu_tanh"),
        "ACTIVATION is one of ACTIVATIONS",
    )
    if ACTIVATION == "relu":
        x = tl.maximum(x, 0.0)
    elif ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x * tl.sigmoid(2.0 * inner)  # 0.5 (1 + tanh(u)) = sigmoid(2 u)
    return x


@triton.jit
def store_tile(out, values, rows, columns, row_end, column_end, stride_om, stride_on):
    """Rounds once, to the dtype of `out`, and stores what lies inside the ends."""
    offsets = rows.to(tl.int64)[:, None] * stride_om + columns.to(tl.int64)[None, :] * stride_on
    mask = (rows < row_end)[:, None] & (columns < column_end)[None, :]
    tl.store(out + offsets, values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def halves(acc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(left, right) half of the columns."""
    return tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))


@triton.jit
def write_tile(
    out,  # [M, N]
    acc,  # [BLOCK_M, BLOCK_N] fp32: the tile at (row, column)
    row,
    column,
    row_end,
    column_end,
    stride_om,
    stride_on,
    row_scale,  # from here on as finish_tile
    row_scale_stride,
    column_scale,
    column_scale_stride,
    bias,
    residual,
    stride_rm,
    stride_rn,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """finish_tile and store_tile, of a large tile one quarter of the columns after the other: what
    all of them would need together does not fit into registers."""
    LARGE: tl.constexpr = BLOCK_M * BLOCK_N > 128 * 128
    PART: tl.constexpr = BLOCK_N // 4 if LARGE else BLOCK_N
    rows = row + tl.arange(0, BLOCK_M)
    if LARGE:
        left, right = halves(acc, BLOCK_M, BLOCK_N)
        parts = halves(left, BLOCK_M, BLOCK_N // 2) + halves(right, BLOCK_M, BLOCK_N // 2)
    else:
        parts = (acc,)
    for part in tl.static_range(len(parts)):
        columns = column + part * PART + tl.arange(0, PART)
        values = finish_tile(
            parts[part],
            rows,
            columns,
            row_end,
            column_end,
            row_scale,
            row_scale_stride,
            column_scale,
            column_scale_stride,
            bias,
            residual,
            stride_rm,
            stride_rn,
            ACTIVATION,
        )
        store_tile(out, values, rows, columns, row_end, column_end, stride_om, stride_on)
