"""What the launchers of attention make of their arguments: descriptors, numbers, constants."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from .flash_attention_configurations import AttentionConfig, AttentionProblem
from .flash_attention_plan import NO_LIMIT, reach
from .flash_attention_tiles import split_head
from .gemm import must_upcast

__all__ = ["MaskLike", "PiecesLike", "StateLike", "unfit"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PiecesLike = torch.Tensor | Iterable[Sequence[int]]  # as flash_attention_plan.py describes


class MaskLike(Protocol):
    """What a launcher reads of a mask."""

    @property
    def softmax_scale(self) -> float: ...

    @property
    def causal(self) -> bool: ...

    @property
    def window_left(self) -> int: ...  # -1: no limit

    @property
    def window_right(self) -> int: ...

    @property
    def softcap(self) -> float: ...  # 0: none

    @property
    def alibi_slopes(self) -> "torch.Tensor | None": ...  # fp32 [heads] or [batch, heads]

    @property
    def dropout_p(self) -> float: ...

    @property
    def seed(self) -> int: ...  # unsigned, 64 bits

    @property
    def first_head(self) -> int: ...  # for dropout: which of all_heads is the first of q's

    @property
    def all_heads(self) -> int: ...  # 0: as many as q has


class StateLike(Protocol):
    """The running state, fp32, any strides."""

    row_max: torch.Tensor  # [batch, heads, seq_q]; -inf: no key seen
    row_sum: torch.Tensor  # the same
    acc: torch.Tensor  # [batch, seq_q, heads, d_v]


def unfit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: MaskLike) -> str:
    """Why these kernels do not take such an attention; empty: they do."""
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        return f"dtypes {q.dtype}, {k.dtype}, {v.dtype}; one of float32, float16, bfloat16 for all"
    if q.device.type != "cuda" and not must_upcast(torch.bfloat16):
        return f"device {q.device}; the kernels run on CUDA, or in Triton's interpreter"
    if max(q.size(3), v.size(3)) > 256:
        return f"head sizes {q.size(3)}, {v.size(3)}; registers hold up to 256"
    if not 0 <= mask.dropout_p < 1:
        return f"dropout_p {mask.dropout_p}; from 0 up to but not including 1"
    return ""


def problem_of(
    op: str,
    mask: MaskLike,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *others: torch.Tensor,
) -> AttentionProblem:
    """What a choice sees of these operands."""
    name = str(q.dtype).removeprefix("torch.")
    fit = all(fits_descriptor(x) for x in (q, k, v, *others))
    positions = bool(mask.softcap or mask.dropout_p) or mask.alibi_slopes is not None
    return AttentionProblem(op, q.size(3), v.size(3), name, fit, positions)


def fits_descriptor(x: torch.Tensor) -> bool:
    """Whether x [batch, seq, heads, d] can be loaded by TMA descriptors."""
    item = x.element_size()
    strides = [s for size, s in zip(x.shape, x.stride(), strict=True) if size > 1]
    return (
        x.numel() > 0
        and (x.stride(3) == 1 or x.size(3) == 1)
        and x.data_ptr() % 16 == 0
        and all(s > 0 and (s == 1 or s * item % 16 == 0) for s in strides)
        and x.size(1) < 2**31
    )


def reaches_far(config: AttentionConfig, *operands: torch.Tensor) -> bool:
    """Whether offsets within one block of one of these [batch, seq, heads, d] need 64 bits."""
    rows = max(config.block_q, config.block_k)
    return any(
        rows * x.stride(1) + sum(split_head(x.size(3))) * x.stride(3) >= 2**31 for x in operands
    )


def descriptors(x: torch.Tensor, rows: int, config: AttentionConfig) -> "tuple[Any, ...] | None":
    """Of x as [batch, heads, seq, d], in blocks of `rows`, one for each part of the head."""
    if not config.descriptors:
        return None
    main, tail = split_head(x.size(3))
    whole = x.permute(0, 2, 1, 3)
    # A dimension of one element may have any stride: one that a descriptor takes.
    strides = [
        s if n > 1 else 16 for n, s in zip(whole.shape[:3], whole.stride()[:3], strict=True)
    ] + [1]
    return tuple(
        TensorDescriptor(x, list(whole.shape), strides, [1, 1, rows, width])
        for width in (main, tail)
        if width
    )


def mask_arguments(mask: MaskLike, heads: int, before: int, after: int) -> tuple[Any, ...]:
    """From slope_strides to after, as the kernels take them."""
    slopes = mask.alibi_slopes
    by_slope = (0, 0)
    if slopes is not None:
        by_slope = (slopes.stride(0) if slopes.dim() == 2 else 0, slopes.stride(-1))
    return (
        by_slope,
        float(mask.softmax_scale),
        float(mask.softcap),
        1.0 / (1.0 - mask.dropout_p),
        min(round(mask.dropout_p * 2**32), 2**32 - 1),
        mask.seed & 0xFFFFFFFF,
        mask.seed >> 32 & 0xFFFFFFFF,
        mask.first_head,
        mask.all_heads or heads,
        before,
        after,
    )


def mask_constants(mask: MaskLike) -> dict[str, bool]:
    """Which features a kernel is compiled with."""
    before, after = reach(mask.causal, mask.window_left, mask.window_right)
    alibi = mask.alibi_slopes is not None
    return {
        # A factor that is not positive would make the largest product not the largest score.
        "FOLD": not mask.softcap and not alibi and mask.softmax_scale > 0,
        "SOFTCAP": bool(mask.softcap),
        "ALIBI": alibi,
        "BEFORE": before < NO_LIMIT,
        "AFTER": after < NO_LIMIT,
        "DROPOUT": bool(mask.dropout_p),
    }


def head_constants(size: int, size_v: int) -> dict[str, int]:
    """How heads of q and k, and of v, are held."""
    (main, tail), (main_v, tail_v) = split_head(size), split_head(size_v)
    return {
        "SIZE": size,
        "MAIN": main,
        "TAIL": tail,
        "SIZE_V": size_v,
        "MAIN_V": main_v,
        "TAIL_V": tail_v,
    }
