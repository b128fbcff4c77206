"""Attention of a shard of queries and a shard of keys, wherever both lie in their sequence.

    s = scale q k^T, capped, less ALiBi, -inf where not visible;  p = exp(s - lse);  out = drop(p) v

q [batch, seq_q, heads, d], k [batch, seq_k, kv_heads, d], v [batch, seq_k, kv_heads, d_v], any
strides; query head h meets kv head h // (heads / kv_heads). Which rows see which is in the plan
(flash_attention_plan.py): one kernel covers contiguous, zigzag, striped and packed shards.

One program owns a tile of queries of one head and meets the keys block by block, in an online
softmax (Milakov and Gimelshein, 2018; Dao et al., FlashAttention, 2022). Its running state, row_max
m, row_sum and the un-normalised acc, may come from memory and go back there in fp32, so that a
ring's next step goes on where this one stopped: no merge, no rounding to 16 bits in between.
Exponents are of 2 inside; maxima and lse are natural in memory.

Launchers take operands that were checked: `unfit` (flash_attention_arguments.py) says what these
kernels do not take. No program waits for another. Backward: flash_attention_backward.py.
"""

import torch

from .flash_attention_arguments import (
    MaskLike,
    PiecesLike,
    StateLike,
    descriptors,
    head_constants,
    mask_arguments,
    mask_constants,
    problem_of,
    reaches_far,
)
from .flash_attention_configurations import AttentionConfig, choose_attention
from .flash_attention_forward import finish_kernel, forward_kernel
from .flash_attention_plan import device_plan, pieces_of, reach, rows_outside
from .flash_attention_roles_launch import launch_roles, unfit_for_roles, wished
from .flash_attention_tiles import split_head
from .gemm import must_upcast

__all__ = ["finish", "forward", "forward_step"]

FINISH_ROWS = 32


def forward_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_pieces: PiecesLike,
    k_pieces: PiecesLike,
    mask: MaskLike,
    state: StateLike,
    *,
    config: "AttentionConfig | None" = None,
    roles: "bool | None" = None,
) -> None:
    """Takes these keys into `state`, in place. Rows that see none of them are not touched.

    roles: True: by the kernel with warp roles (flash_attention_roles.py), False: by the plain one,
        None: as PYPARALLEL_ATTENTION_ROLES says, where that kernel takes such an attention.

    Raises:
        ValueError: roles is True, and the text says why that kernel does not take it.
    """
    _launch(q, k, v, q_pieces, k_pieces, mask, state, config, roles)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_pieces: PiecesLike,
    k_pieces: PiecesLike,
    mask: MaskLike,
    *,
    state: "StateLike | None" = None,
    sinks: "torch.Tensor | None" = None,
    config: "AttentionConfig | None" = None,
    roles: "bool | None" = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """forward_step (the last one, if there is a state, which is left as it was) and finish in one
    launch: (out [batch, seq_q, heads, d_v], lse [batch, heads, seq_q]). roles: as there."""
    batch, seq, heads, _ = q.shape
    out = torch.empty((batch, seq, heads, v.size(3)), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, seq), dtype=torch.float32, device=q.device)
    _launch(q, k, v, q_pieces, k_pieces, mask, state, config, roles, out, lse, sinks)
    return out, lse


def finish(
    state: StateLike, sinks: "torch.Tensor | None", dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out in `dtype`, lse fp32) of a state; sinks [heads] enter the denominators here, once."""
    batch, seq, heads, size = state.acc.shape
    out = torch.empty(state.acc.shape, dtype=dtype, device=state.acc.device)
    lse = torch.empty((batch, heads, seq), dtype=torch.float32, device=state.acc.device)
    if lse.numel():
        main, tail = split_head(size)
        finish_kernel[(-(-seq // FINISH_ROWS) * heads * batch,)](
            out,
            lse,
            state.row_max,
            state.row_sum,
            state.acc,
            None if sinks is None else sinks.contiguous(),
            out.stride(),
            lse.stride(),
            state.row_max.stride(),
            state.row_sum.stride(),
            state.acc.stride(),
            seq,
            heads,
            SIZE_V=size,
            MAIN_V=main,
            TAIL_V=tail,
            ROWS=FINISH_ROWS,
            SINKS=sinks is not None,
            enable_fp_fusion=True,
        )
    return out, lse


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_pieces: PiecesLike,
    k_pieces: PiecesLike,
    mask: MaskLike,
    state: "StateLike | None",
    config: "AttentionConfig | None",
    roles: "bool | None",
    out: "torch.Tensor | None" = None,
    lse: "torch.Tensor | None" = None,
    sinks: "torch.Tensor | None" = None,
) -> None:
    own, other = pieces_of(q_pieces), pieces_of(k_pieces)
    batch, seq, heads, size = q.shape
    if roles or (roles is None and config is None and wished()):
        why = unfit_for_roles(q, k, v, mask)
        if config is not None:
            why = f"{config} is of the plain one, the blocks of this one are fixed"
        if roles and why:
            raise ValueError(f"attention forward: the kernel with warp roles does not take {why}")
        if not why:
            if out is not None:
                own = (*own, *rows_outside(own, seq))
            return launch_roles(q, k, v, own, other, mask, state, out, lse, sinks)
    config = config or choose_attention(problem_of("forward", mask, q, k, v), q.device).config
    if out is not None:  # padding too has a result: 0 and -inf, or what its state says
        own = (*own, *rows_outside(own, seq))
    before, after = reach(mask.causal, mask.window_left, mask.window_right)
    found, tiles, segments = device_plan(
        own, other, before, after, config.block_q, config.block_k, config.edge, False, q.device
    )
    count = len(found.tiles)
    if out is None:  # tiles that meet nothing come last, and leave the state as it is
        count = sum(tile[5] < tile[6] for tile in found.tiles)
    if not count * heads * batch:
        return
    stated = state is not None
    forward_kernel[(count * heads * batch,)](
        q,
        k,
        v,
        *(descriptors(x, config.block_k, config) for x in (k, v)),
        state.row_max if stated else None,
        state.row_sum if stated else None,
        state.acc if stated else None,
        out,
        lse,
        None if sinks is None else sinks.contiguous(),
        mask.alibi_slopes,
        tiles,
        segments,
        q.stride(),
        k.stride(),
        v.stride(),
        state.acc.stride() if stated else (0, 0, 0, 0),
        out.stride() if out is not None else (0, 0, 0, 0),
        state.row_max.stride() if stated else (0, 0, 0),
        state.row_sum.stride() if stated else (0, 0, 0),
        lse.stride() if lse is not None else (0, 0, 0),
        *mask_arguments(mask, heads, before, after),
        count,
        heads,
        heads // k.size(2),
        **head_constants(size, v.size(3)),
        **config.constants(),
        **mask_constants(mask),
        SINKS=sinks is not None,
        LOAD=stated,
        FINISH=out is not None,
        FAR=reaches_far(
            config, q, k, v, *((state.acc,) if stated else ()), *((out,) if out is not None else ())
        ),
        UPCAST=must_upcast(q.dtype),
        **config.options(),
    )
