"""Gradients of attention: dq, dk and dv of one step, added to what earlier steps left in fp32.

    p = exp(s - lse);  dp = undrop(dout v^T);  ds = p (dp - delta) (1 - (s / softcap)^2)
    dv += drop(p)^T dout;  dq += scale ds k;  dk += scale ds^T q;  delta = rowsum(dout * out)

lse and delta are of the whole attention, so steps need no merge (Dao et al., FlashAttention, 2022).
Operands and plans are those of flash_attention.py. Two forms:

    split    one kernel owns tiles of keys and makes dk, dv; another owns tiles of queries and makes
             dq: seven products a block, no atomic, the same bits in every run
    fused    the first makes dq too, by atomic adds: five products a block, bits that depend on the
             order of programs

A program that owns keys meets the queries of all heads that share them, so that dk and dv of
grouped heads are summed in its registers.
"""

from collections.abc import Mapping

import torch

from .flash_attention_arguments import (
    MaskLike,
    PiecesLike,
    descriptors,
    head_constants,
    mask_arguments,
    mask_constants,
    problem_of,
    reaches_far,
)
from .flash_attention_configurations import AttentionConfig, backward_form, choose_attention
from .flash_attention_dkdv import dkdv_kernel
from .flash_attention_dq import dq_kernel
from .flash_attention_plan import device_plan, pieces_of, reach
from .gemm import must_upcast

__all__ = ["backward_step"]


def backward_step(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    q_pieces: PiecesLike,
    k_pieces: PiecesLike,
    mask: MaskLike,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    deterministic: bool = False,
    *,
    form: str = "",
    configs: "Mapping[str, AttentionConfig] | None" = None,
) -> None:
    """Adds the gradients that pass through these keys to dq, dk, dv, in place.

    Args:
        dout: [batch, seq_q, heads, d_v], of the dtype of q; any strides, as all of these.
        lse, delta: fp32 [batch, heads, seq_q], of the whole attention; `row_delta` makes delta.
        dq, dk, dv: fp32, of the shapes of q, k, v. What lies in no piece is not touched.
        deterministic: the split form: the same bits in every run, for two products a block more.
        form: "split" or "fused"; empty: the one that the static table says is faster on the chip.
        configs: op -> configuration, for those that are not to be chosen here.

    Raises:
        ValueError: form is none of these, or fused where deterministic is asked for.
    """
    if form not in ("", "split", "fused") or (deterministic and form == "fused"):
        raise ValueError(
            f"attention backward: form {form!r}, deterministic {deterministic}; form is split, "
            "fused or empty, and fused adds in the order of arrival"
        )
    if not form:
        problem = problem_of("fused backward", mask, q, k, v, dout)
        form = "split" if deterministic else backward_form(problem, q.device)
    arguments = (dout, q, k, v, lse, delta, pieces_of(q_pieces), pieces_of(k_pieces), mask)
    if form == "split":
        _launch_keys("dkdv", *arguments, None, dk, dv, configs)
        _launch_queries(*arguments, dq, configs)
    else:
        _launch_keys("fused backward", *arguments, dq, dk, dv, configs)


def _config(
    op: str,
    mask: MaskLike,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    configs: "Mapping[str, AttentionConfig] | None",
) -> AttentionConfig:
    if configs and op in configs:
        return configs[op]
    return choose_attention(problem_of(op, mask, q, k, v, dout), q.device).config


def _launch_keys(op, dout, q, k, v, lse, delta, q_pieces, k_pieces, mask, dq, dk, dv, configs):
    """dk and dv, and dq if there is one."""
    config = _config(op, mask, dout, q, k, v, configs)
    before, after = reach(mask.causal, mask.window_left, mask.window_right)
    batch, _, heads, size = q.shape
    kv_heads = k.size(2)
    found, tiles, segments = device_plan(
        k_pieces,
        q_pieces,
        after,
        before,
        config.block_k,
        config.block_q,
        config.edge,
        True,
        q.device,
    )
    count = sum(tile[5] < tile[6] for tile in found.tiles)  # those that meet nothing come last
    if not count * kv_heads * batch:
        return
    fused = dq is not None
    dkdv_kernel[(count * kv_heads * batch,)](
        dq,
        dk,
        dv,
        dout,
        q,
        k,
        v,
        *(descriptors(x, config.block_q, config) for x in (q, dout)),
        lse,
        delta,
        mask.alibi_slopes,
        tiles,
        segments,
        dq.stride() if fused else (0, 0, 0, 0),
        *(x.stride() for x in (dk, dv, dout, q, k, v, lse, delta)),
        *mask_arguments(mask, heads, before, after),
        count,
        kv_heads,
        heads // kv_heads,
        **head_constants(size, v.size(3)),
        **config.constants(),
        **mask_constants(mask),
        FUSED=fused,
        FAR=reaches_far(config, dout, q, k, v, dk, dv, *((dq,) if fused else ())),
        UPCAST=must_upcast(q.dtype),
        **config.options(),
    )


def _launch_queries(dout, q, k, v, lse, delta, q_pieces, k_pieces, mask, dq, configs):
    config = _config("dq", mask, dout, q, k, v, configs)
    before, after = reach(mask.causal, mask.window_left, mask.window_right)
    batch, _, heads, size = q.shape
    found, tiles, segments = device_plan(
        q_pieces,
        k_pieces,
        before,
        after,
        config.block_q,
        config.block_k,
        config.edge,
        False,
        q.device,
    )
    count = sum(tile[5] < tile[6] for tile in found.tiles)
    if not count * heads * batch:
        return
    dq_kernel[(count * heads * batch,)](
        dq,
        dout,
        q,
        k,
        v,
        *(descriptors(x, config.block_k, config) for x in (k, v)),
        lse,
        delta,
        mask.alibi_slopes,
        tiles,
        segments,
        *(x.stride() for x in (dq, dout, q, k, v, lse, delta)),
        *mask_arguments(mask, heads, before, after),
        count,
        heads,
        heads // k.size(2),
        **head_constants(size, v.size(3)),
        **config.constants(),
        **mask_constants(mask),
        FAR=reaches_far(config, dout, q, k, v, dq),
        UPCAST=must_upcast(q.dtype),
        **config.options(),
    )
