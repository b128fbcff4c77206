"""The attention steps on the CPU, in C++ (csrc/torch/attention.h): float32, bfloat16 and float16.

The contract is plain.py's. bfloat16 is multiplied as it is where the CPU can, with weights rounded
to bfloat16 before they meet v, as torch's own kernel does; else operands become float32 first. Sums
are float32.
"""

import torch
from torch import Tensor

from pyparallel import _torch
from pyparallel.attention.mask import Mask
from pyparallel.attention.pieces import Pieces
from pyparallel.attention.state import State

__all__ = ["backward_step", "forward_step", "unfit"]

_MOST_WIDTH = 256
_EVERYTHING = 1 << 40  # farther than any two positions are apart


def unfit(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> str:
    """Why these operands need another engine; empty: they do not."""
    del k, mask
    if q.device.type != "cpu":
        return f"operands are on {q.device}, not on the CPU"
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype is {q.dtype}, not float32, bfloat16 or float16"
    widest = max(q.shape[-1], v.shape[-1])
    if widest > _MOST_WIDTH:
        return f"head_dim is {widest}, more than {_MOST_WIDTH}"
    return ""


def forward_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_pieces: Pieces,
    k_pieces: Pieces,
    mask: Mask,
    state: State,
) -> None:
    """Takes these keys into `state`, in place; see plain.forward_step."""
    _torch.attention_forward(
        q,
        k,
        v,
        q_pieces.table(),
        k_pieces.table(),
        _native(mask),
        state.row_max,
        state.row_sum,
        state.acc,
    )


def backward_step(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    q_pieces: Pieces,
    k_pieces: Pieces,
    mask: Mask,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    deterministic: bool = False,
) -> None:
    """Adds the gradients that pass through these keys to dq, dk and dv; see plain.backward_step.

    Always deterministic: the same bits on each call with as many threads.
    """
    del deterministic
    _torch.attention_backward(
        dout,
        q,
        k,
        v,
        lse,
        delta,
        q_pieces.table(),
        k_pieces.table(),
        _native(mask),
        dq,
        dk,
        dv,
    )


def _native(mask: Mask) -> _torch.AttentionMask:
    slopes = mask.alibi_slopes
    return _torch.AttentionMask(
        softmax_scale=mask.softmax_scale,
        before=int(min(mask.before, _EVERYTHING)),
        after=int(min(mask.after, _EVERYTHING)),
        softcap=mask.softcap,
        alibi_slopes=None if slopes is None else slopes.float(),
        dropout_p=mask.dropout_p,
        seed=mask.seed,
        first_head=mask.first_head,
        all_heads=mask.all_heads,
    )
