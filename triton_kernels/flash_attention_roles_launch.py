"""Which attentions the kernel with warp roles takes, and its launch: flash_attention_roles.py.

It is asked for: by `roles=True` of the launchers in flash_attention.py, which then raise where it
does not fit, or by PYPARALLEL_ATTENTION_ROLES=1, which then leaves the rest to the plain kernel. No
GPU has compared the two yet, so nothing chooses it by itself.
"""

import importlib
import os
from typing import Any

import torch

from .flash_attention_arguments import MaskLike, StateLike, fits_descriptor, mask_constants
from .flash_attention_configurations import family_of
from .flash_attention_plan import NO_LIMIT, device_plan, reach

__all__ = ["launch_roles", "unfit_for_roles", "wished"]

BLOCK_K = 128
SIZES = (64, 128)
BITS = {torch.float16: 16, torch.bfloat16: 16}


def wished() -> bool:
    """What PYPARALLEL_ATTENTION_ROLES says: 1, or 0 and unset.

    Raises:
        ValueError: it says something else.
    """
    said = os.environ.get("PYPARALLEL_ATTENTION_ROLES", "0")
    if said not in ("0", "1"):
        raise ValueError(f"PYPARALLEL_ATTENTION_ROLES is {said!r}; 0 or 1")
    return said == "1"


def unfit_for_roles(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: MaskLike,
    arch: "int | None" = None,
) -> str:
    """Why the kernel with warp roles does not take such an attention; empty: it does.

    arch: of the chip, as in 90; None: that of q's device.
    """
    if arch is None:
        arch = _arch(q)
    if family_of(arch) != 90:
        return f"sm_{arch}; its products are those of sm_90"
    if _roles() is None:
        return "this Triton has no Gluon with warpgroup_mma and worker_num_regs; 3.8 has"
    if q.dtype not in BITS or not q.dtype == k.dtype == v.dtype:
        return f"dtypes {q.dtype}, {k.dtype}, {v.dtype}; float16 or bfloat16 for all"
    if q.size(3) not in SIZES or v.size(3) not in SIZES:
        return f"head sizes {q.size(3)}, {v.size(3)}; it takes {SIZES[0]} and {SIZES[1]}"
    constants = mask_constants(mask)
    if not constants["FOLD"] or constants["DROPOUT"]:
        return "softcap, ALiBi, dropout or a scale that is not positive"
    if not all(fits_descriptor(x) for x in (q, k, v)):
        return "an operand that TMA does not take: 16-byte strides and a contiguous head are needed"
    return ""


def launch_roles(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    own: tuple[Any, ...],
    other: tuple[Any, ...],
    mask: MaskLike,
    state: "StateLike | None",
    out: "torch.Tensor | None",
    lse: "torch.Tensor | None",
    sinks: "torch.Tensor | None",
) -> None:
    """As the plain launch of flash_attention.py, of an attention that `unfit_for_roles` takes."""
    roles = _roles()
    assert roles is not None
    batch, _, heads, size = q.shape
    before, after = reach(mask.causal, mask.window_left, mask.window_right)
    rows = roles.READERS * roles.READER_ROWS
    found, tiles, segments = device_plan(
        own, other, before, after, rows, BLOCK_K, BLOCK_K, False, q.device
    )
    count = len(found.tiles)
    if out is None:  # tiles that meet nothing come last, and leave the state as it is
        count = sum(tile[5] < tile[6] for tile in found.tiles)
    if not count * heads * batch:
        return
    stated = state is not None
    roles.roles_kernel[(count * heads * batch,)](
        _blocks(q, roles.READER_ROWS),
        _blocks(k, BLOCK_K),
        _blocks(v, BLOCK_K),
        state.row_max if state is not None else None,
        state.row_sum if state is not None else None,
        state.acc if state is not None else None,
        out,
        lse,
        None if sinks is None else sinks.contiguous(),
        tiles,
        segments,
        state.acc.stride() if state is not None else (0, 0, 0, 0),
        out.stride() if out is not None else (0, 0, 0, 0),
        state.row_max.stride() if state is not None else (0, 0, 0),
        state.row_sum.stride() if state is not None else (0, 0, 0),
        lse.stride() if lse is not None else (0, 0, 0),
        float(mask.softmax_scale),
        before,
        after,
        count,
        heads,
        heads // k.size(2),
        SIZE=size,
        SIZE_V=v.size(3),
        BLOCK_K=BLOCK_K,
        BUFFERS=roles.BUFFERS,
        READERS=roles.READERS,
        READER_ROWS=roles.READER_ROWS,
        BEFORE=before < NO_LIMIT,
        AFTER=after < NO_LIMIT,
        SINKS=sinks is not None,
        LOAD=stated,
        FINISH=out is not None,
        num_warps=4,
        enable_fp_fusion=True,
    )


def _blocks(x: torch.Tensor, rows: int) -> Any:
    """The descriptor of x as [batch, heads, seq, size], in blocks of rows."""
    hopper = importlib.import_module("triton.experimental.gluon.nvidia.hopper")
    layouts = importlib.import_module("triton.experimental.gluon.language")
    whole = x.permute(0, 2, 1, 3)
    # A dimension of one element may have any stride: one that a descriptor takes.
    strides = [
        s if n > 1 else 16 for n, s in zip(whole.shape[:3], whole.stride()[:3], strict=True)
    ] + [1]
    layout = layouts.NVMMASharedLayout(128, BITS[x.dtype], rank=4)
    return hopper.TensorDescriptor(x, list(whole.shape), strides, [1, 1, rows, x.size(3)], layout)


def _roles() -> Any:
    """The kernel's module; None where this Triton lacks what it is written in."""
    try:
        found = importlib.import_module(f"{__package__}.flash_attention_roles")
    except ImportError:
        return None
    return found if hasattr(found.mbarrier, "allocate_mbarrier") else None  # 3.5 has the rest


def _arch(q: torch.Tensor) -> int:
    """Of q's device; 0: no GPU."""
    if q.device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(q.device)
    return 10 * major + minor
