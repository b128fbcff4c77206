"""delta = rowsum(dout * out): what every step of an attention's backward takes from its forward."""

import torch
import triton
import triton.language as tl

from .flash_attention_tiles import load_parts, of_head, row_offsets, split_head

__all__ = ["row_delta"]

ROWS = 32


@triton.jit(do_not_specialize=["seq"])
def delta_kernel(
    delta,  # fp32 [batch, heads, seq]
    dout,  # [batch, seq, heads, SIZE_V]
    out,
    delta_strides,
    dout_strides,
    out_strides,
    seq,
    heads,
    SIZE_V: tl.constexpr,
    MAIN_V: tl.constexpr,
    TAIL_V: tl.constexpr,
    ROWS: tl.constexpr,
):
    blocks = tl.cdiv(seq, ROWS)
    rows = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(0) // blocks % heads
    batch = tl.program_id(0) // (blocks * heads)
    valid = rows < seq
    dout, out = of_head(dout, batch, head, dout_strides), of_head(out, batch, head, out_strides)
    delta = of_head(delta, batch, head, delta_strides)
    a = load_parts(dout, 0, rows, valid, dout_strides, SIZE_V, MAIN_V, TAIL_V, True, True)
    b = load_parts(out, 0, rows, valid, out_strides, SIZE_V, MAIN_V, TAIL_V, True, True)
    total = tl.zeros((ROWS,), tl.float32)
    for part in tl.static_range(len(a)):
        total += tl.sum(a[part].to(tl.float32) * b[part].to(tl.float32), 1)
    tl.store(delta + row_offsets(rows, delta_strides[2]), total, valid)


def row_delta(dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """rowsum(dout * out) of [batch, seq, heads, d_v], in fp32: [batch, heads, seq]."""
    batch, seq, heads, size = out.shape
    delta = torch.empty((batch, heads, seq), dtype=torch.float32, device=out.device)
    if delta.numel():
        main, tail = split_head(size)
        delta_kernel[(-(-seq // ROWS) * heads * batch,)](
            delta,
            dout,
            out,
            delta.stride(),
            dout.stride(),
            out.stride(),
            seq,
            heads,
            SIZE_V=size,
            MAIN_V=main,
            TAIL_V=tail,
            ROWS=ROWS,
            enable_fp_fusion=True,
        )
    return delta
