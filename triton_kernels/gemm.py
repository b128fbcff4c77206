"""The one GEMM main loop: out = epilogue(a @ b^T), a [M, K], b [N, K].

Every kernel of this folder that multiplies calls `multiply_tile`, then what epilogue.py has, and
differs only in which tile comes next and what it waits for. b lies as torch's Linear weight.

Any M, N, K and strides. Sums are in fp32 and rounded once, by the store. Two ways of loading:

    descriptors    TMA on sm_90 and later: unit stride along K, rows a multiple of 16 bytes apart
                   and the base aligned to 16 (`fits_descriptor`)
    pointers       everything else: 64-bit offsets, any stride; the way for sm_80, where a
                   descriptor kernel does not pipeline
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .epilogue import write_tile
from .signals import INTERPRETED
from .tile_order import grouped_tile, tile_count

# --- 1 problem and choice


@dataclass(frozen=True)
class TileConfig:
    """How a GEMM kernel is cut and launched. Chosen elsewhere (configurations.py), obeyed here."""

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    group_m: int = 8
    num_stages: int = 3
    num_warps: int = 8
    programs: int = 132  # programs of the persistent grid, at most
    descriptors: bool = False  # loads by TMA; needs fits_descriptor() of both operands
    halves: bool = False  # fp32 tiles leave the registers in two halves, where one does not fit

    def constants(self) -> dict[str, object]:
        """The constexpr arguments that all kernels on this loop share."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "GROUP_M": self.group_m,
            "DESCRIPTORS": self.descriptors,
        }


def fits_descriptor(operand: torch.Tensor) -> bool:
    """Whether `operand` [rows, K] can be loaded by TMA descriptors."""
    itemsize = operand.element_size()
    return (
        operand.numel() > 0
        and operand.stride(1) == 1
        and operand.stride(0) * itemsize % 16 == 0
        and operand.data_ptr() % 16 == 0
        and operand.size(0) < 2**31
    )


def must_upcast(dtype: torch.dtype) -> bool:
    """Whether dots of this dtype need fp32 operands here: in the interpreter, where bf16 and fp8
    dots are wrong (triton 3.8: a 32x32 bf16 dot came out at 5e10)."""
    return bool(INTERPRETED.value) and dtype not in (torch.float32, torch.float16)


def operand(tensor: torch.Tensor, rows: int, config: TileConfig) -> "torch.Tensor | object":
    """What a kernel takes for `tensor` [*, K]: itself, or its descriptor with blocks of `rows`."""
    if not config.descriptors:
        return tensor
    return TensorDescriptor.from_tensor(tensor, [rows, config.block_k])


# --- 2 device helpers: the main loop


@triton.jit
def multiply_tile(
    a,  # [*, K]: pointer, or descriptor with blocks [BLOCK_M, BLOCK_K]
    b,  # [*, K]: pointer, or descriptor with blocks [BLOCK_N, BLOCK_K]
    row,  # first row of a
    column,  # first row of b
    row_end,  # rows from here on are no part of the tile (what they hold does not matter)
    column_end,
    depth,  # K
    stride_am,
    stride_ak,
    stride_bn,
    stride_bk,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """acc [BLOCK_M, BLOCK_N] fp32 = a[row:] @ b[column:]^T; what lies past the ends is garbage."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if DESCRIPTORS:
        row = row.to(tl.int32)
        column = column.to(tl.int32)
        for k in range(0, depth, BLOCK_K):  # what lies past K is loaded as zero
            a_block = a.load([row, k])
            b_block = b.load([column, k])
            acc = _accumulate(a_block, b_block.T, acc, BLOCK_K, UPCAST)
    else:
        # Rows past the end repeat the last one: always an address of the operand, never masked.
        rows = tl.minimum(row + tl.arange(0, BLOCK_M), row_end - 1).to(tl.int64)
        columns = tl.minimum(column + tl.arange(0, BLOCK_N), column_end - 1).to(tl.int64)
        inner = tl.arange(0, BLOCK_K)
        inner_a = inner.to(tl.int64) * stride_ak
        inner_b = inner.to(tl.int64) * stride_bk
        a_pointers = a + rows[:, None] * stride_am + inner_a[None, :]
        b_pointers = b + columns[None, :] * stride_bn + inner_b[:, None]
        step_a = tl.cast(BLOCK_K, tl.int64) * stride_ak
        step_b = tl.cast(BLOCK_K, tl.int64) * stride_bk
        whole = depth // BLOCK_K * BLOCK_K
        for _ in range(0, whole, BLOCK_K):
            acc = _accumulate(tl.load(a_pointers), tl.load(b_pointers), acc, BLOCK_K, UPCAST)
            a_pointers += step_a
            b_pointers += step_b
        if whole < depth:
            left = inner < depth - whole
            a_block = tl.load(a_pointers, mask=left[None, :], other=0.0)
            b_block = tl.load(b_pointers, mask=left[:, None], other=0.0)
            acc = _accumulate(a_block, b_block, acc, BLOCK_K, UPCAST)
    return acc


@triton.jit
def _accumulate(a, b, acc, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr):
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    if a.dtype.is_fp8():
        # sm_90 adds fp8 products with fewer bits than fp32: into acc once per BLOCK_K of them.
        return tl.dot(a, b, acc, max_num_imprecise_acc=BLOCK_K)
    return tl.dot(a, b, acc, input_precision="ieee")


# --- 3 kernel


@triton.jit(do_not_specialize=["M"])
def gemm_kernel(
    out,  # [M, N], any strides
    a,  # [M, K]
    b,  # [N, K]
    row_scale,
    column_scale,
    bias,
    residual,
    M,
    N,
    K,
    stride_om,
    stride_on,
    stride_am,
    stride_ak,
    stride_bn,
    stride_bk,
    row_scale_stride,
    column_scale_stride,
    stride_rm,
    stride_rn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    UPCAST: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    tiles_m = tile_count(M, BLOCK_M)
    tiles_n = tile_count(N, BLOCK_N)
    for index in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        tile_m, tile_n = grouped_tile(index, tiles_m, tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        column = tile_n * BLOCK_N
        acc = multiply_tile(
            a,
            b,
            row,
            column,
            M,
            N,
            K,
            stride_am,
            stride_ak,
            stride_bn,
            stride_bk,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            UPCAST,
            DESCRIPTORS,
        )
        write_tile(
            out,
            acc,
            row,
            column,
            M,
            N,
            stride_om,
            stride_on,
            row_scale,
            row_scale_stride,
            column_scale,
            column_scale_stride,
            bias,
            residual,
            stride_rm,
            stride_rn,
            ACTIVATION,
            BLOCK_M,
            BLOCK_N,
        )


# --- 4 launcher


def gemm(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    config: TileConfig,
    *,
    row_scale: "torch.Tensor | None" = None,
    column_scale: "torch.Tensor | None" = None,
    bias: "torch.Tensor | None" = None,
    residual: "torch.Tensor | None" = None,
    activation: str = "none",
) -> None:
    """out [M, N] = activation(a [M, K] @ b [N, K]^T * scales + bias) + residual, on one device.

    Args:
        out: fp32, fp16 or bf16; any strides; may be `residual` itself, no other argument.
        a, b: fp32 (exact products), fp16, bf16 or float8_e4m3fn; any strides.
        row_scale, column_scale: fp32, of one element or of M (N): scales of a and of b.
        bias: [N], contiguous.
        residual: [M, N], any strides.
        activation: one of ACTIVATIONS.

    Arguments are taken as they are: shapes, dtypes and devices were checked by the caller.
    """
    rows, depth = a.shape
    columns = b.size(0)
    if out.numel() == 0:
        return
    tiles = -(-rows // config.block_m) * -(-columns // config.block_n)
    gemm_kernel[(min(config.programs, tiles),)](
        out,
        operand(a, config.block_m, config),
        operand(b, config.block_n, config),
        row_scale,
        column_scale,
        bias,
        residual,
        rows,
        columns,
        depth,
        *out.stride(),
        *a.stride(),
        *b.stride(),
        scale_stride(row_scale),
        scale_stride(column_scale),
        *(residual.stride() if residual is not None else (0, 0)),
        **config.constants(),
        UPCAST=must_upcast(a.dtype),
        ACTIVATION=activation,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def scale_stride(scale: "torch.Tensor | None") -> int:
    """What the kernels take: 0 for no scale or one value, 1 for one per row or column."""
    return 0 if scale is None or scale.numel() == 1 else 1
