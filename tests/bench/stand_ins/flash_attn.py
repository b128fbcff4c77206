"""Stands in for flash-attn: the two functions that the bench calls, by attention of one rank."""

from pyparallel.attention import sequence_parallel_attention, simulate

_ALONE = simulate(1, lambda group: group)[0]


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
    return sequence_parallel_attention(
        q, k, v, group=_ALONE, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size,
    )  # fmt: skip


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False,
):  # fmt: skip
    for most, lengths in ((max_seqlen_q, cu_seqlens_q), (max_seqlen_k, cu_seqlens_k)):
        assert most == int(lengths.diff().max())
    return sequence_parallel_attention(
        q, k, v, group=_ALONE, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal,
        cu_seqlens=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
    )  # fmt: skip
