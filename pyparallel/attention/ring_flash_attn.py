"""The functions of ring-flash-attention under their own names, argument order and results.

    from pyparallel.attention.ring_flash_attn import zigzag_ring_flash_attn_func

Positional calls work. With return_attn_probs the result is (out, softmax_lse, None), softmax_lse in
float32, [batch, heads, rows] or [heads, tokens]. `group` is by default the world, as there. What is
more general here: rows need not divide evenly, and zigzag and stripe need no causal mask.

    ring, zigzag_ring, stripe   rows cut contiguous, zigzag, striped
    *_varlen                    cu_seqlens counts the rank's own tokens: every document is cut over
                                all ranks, evenly, by itself
    llama3_*_varlen             the whole packed sequence is cut contiguously and evenly;
                                llama3_flash_attn_prepare_cu_seqlens makes the arguments
"""

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature, signature
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyparallel.attention.cu_seqlens import host_lengths
from pyparallel.attention.request import check_operands
from pyparallel.attention.sequence_parallel import sequence_parallel_attention
from pyparallel.attention.transport import Transport, transport_of
from pyparallel.errors import InvalidArgument

__all__ = [
    "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func",
    "llama3_flash_attn_varlen_kvpacked_func",
    "llama3_flash_attn_varlen_qkvpacked_func",
    "ring_flash_attn_func",
    "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_qkvpacked_func",
    "ring_flash_attn_varlen_func",
    "ring_flash_attn_varlen_kvpacked_func",
    "ring_flash_attn_varlen_qkvpacked_func",
    "stripe_flash_attn_func",
    "stripe_flash_attn_kvpacked_func",
    "stripe_flash_attn_qkvpacked_func",
    "stripe_flash_attn_varlen_func",
    "stripe_flash_attn_varlen_kvpacked_func",
    "stripe_flash_attn_varlen_qkvpacked_func",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_kvpacked_func",
    "zigzag_ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_varlen_func",
    "zigzag_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func",
]

Result = Any  # out, or (out, softmax_lse, None)


def _group(group: Any) -> Any:
    if group is not None:
        return group
    if not dist.is_initialized():
        raise InvalidArgument("group is None, which is the world, and there is none; pass a group")
    return dist.group.WORLD


def _transport(x: Any, group: Any) -> Transport:
    return transport_of(group, x.device if isinstance(x, Tensor) else torch.device("cpu"))


def _unpacked(name: str, packed: Any, parts: int, group: Any) -> tuple[Tensor, ...]:
    """The `parts` tensors of `name`, which lie in the dim before its last two."""
    if not isinstance(packed, Tensor) or packed.dim() < 4 or packed.shape[-3] != parts:
        found = list(packed.shape) if isinstance(packed, Tensor) else type(packed).__name__
        error = InvalidArgument(f"{name} is {found}; expected [..., {parts}, heads, head_dim]")
        raise _transport(packed, group).refused("sequence_parallel_attention", error)
    return packed.unbind(-3)


def _result(found: Any, return_attn_probs: bool) -> Result:
    return (*found, None) if return_attn_probs else found


def _dense(sharding: str, name: str) -> tuple[Callable[..., Result], ...]:
    """The three forms for sequences of one length."""

    def func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: Any = None,
    ) -> Result:
        found = sequence_parallel_attention(
            q, k, v, group=_group(group), strategy="ring", sharding=sharding, causal=causal,
            layout="bshd", window_size=window_size, alibi_slopes=alibi_slopes,
            dropout_p=dropout_p, softmax_scale=softmax_scale, deterministic=deterministic,
            return_lse=return_attn_probs,
        )  # fmt: skip
        return _result(found, return_attn_probs)

    return _named(name, f"{sharding} shards, [batch, rows, heads, head_dim].", func)


def _packed_forms(func: Callable[..., Result]) -> tuple[Callable[..., Result], ...]:
    """`func` with k and v in one tensor, and with all three."""
    q, _, _, *others = signature(func).parameters.values()

    def packed(name: str, alone: list[Parameter]) -> Callable[..., Result]:
        takes = Signature([*alone, q.replace(name=name), *others])

        def call(*args: Any, **more: Any) -> Result:
            given = takes.bind(*args, **more).arguments
            given["group"] = _group(given.get("group"))
            parts = _unpacked(name, given.pop(name), 3 - len(alone), given["group"])
            return func(*(given.pop(one.name) for one in alone), *parts, **given)

        call.__signature__ = takes  # type: ignore[attr-defined]
        return call

    return packed("kv", [q]), packed("qkv", [])


def _named(name: str, what: str, func: Callable[..., Result]) -> tuple[Callable[..., Result], ...]:
    """All three forms, with their names."""
    functions = func, *_packed_forms(func)
    for function, form in zip(functions, ("", "kvpacked_", "qkvpacked_"), strict=True):
        function.__name__ = function.__qualname__ = f"{name}_{form}func"
        function.__doc__ = function.__doc__ or f"Attention of {what} See the head of this file."
    return functions


def _varlen(sharding: str, name: str) -> tuple[Callable[..., Result], ...]:
    """The three forms for packed documents, each of which is cut over all ranks."""

    def func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: Any = None,
    ) -> Result:
        group = _group(group)
        transport = _transport(q, group)
        try:
            own = _own_lengths(cu_seqlens, max_seqlen, "cu_seqlens", "max_seqlen")
        except Exception as error:
            raise transport.refused("sequence_parallel_attention", error) from None
        found = sequence_parallel_attention(
            q, k, v, group=group, strategy="ring", sharding=sharding, causal=causal, layout="thd",
            window_size=window_size, alibi_slopes=alibi_slopes, dropout_p=dropout_p,
            softmax_scale=softmax_scale, deterministic=deterministic,
            return_lse=return_attn_probs,
            cu_seqlens=[n * transport.world_size for n in own], per_document=True,
        )  # fmt: skip
        return _result(found, return_attn_probs)

    return _named(name, f"packed documents, each in {sharding} shards.", func)


def _own_lengths(values: Any, longest: Any, name: str, longest_name: str) -> tuple[int, ...]:
    lengths = host_lengths(values, name)
    if not lengths:
        raise InvalidArgument(f"{name} is {values!r}; expected [0, ..., tokens]")
    most = max((b - a for a, b in pairwise(lengths)), default=0)
    if isinstance(longest, Tensor) and longest.numel() == 1:
        longest = longest.item()
    if isinstance(longest, bool) or not isinstance(longest, int) or longest < most:
        raise InvalidArgument(
            f"{longest_name} is {longest!r}; the longest document of {name} has {most} tokens"
        )
    return lengths


(
    ring_flash_attn_func,
    ring_flash_attn_kvpacked_func,
    ring_flash_attn_qkvpacked_func,
) = _dense("contiguous", "ring_flash_attn")
(
    zigzag_ring_flash_attn_func,
    zigzag_ring_flash_attn_kvpacked_func,
    zigzag_ring_flash_attn_qkvpacked_func,
) = _dense("zigzag", "zigzag_ring_flash_attn")
(
    stripe_flash_attn_func,
    stripe_flash_attn_kvpacked_func,
    stripe_flash_attn_qkvpacked_func,
) = _dense("striped", "stripe_flash_attn")
(
    ring_flash_attn_varlen_func,
    ring_flash_attn_varlen_kvpacked_func,
    ring_flash_attn_varlen_qkvpacked_func,
) = _varlen("contiguous", "ring_flash_attn_varlen")
(
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
) = _varlen("zigzag", "zigzag_ring_flash_attn_varlen")
(
    stripe_flash_attn_varlen_func,
    stripe_flash_attn_varlen_kvpacked_func,
    stripe_flash_attn_varlen_qkvpacked_func,
) = _varlen("striped", "stripe_flash_attn_varlen")


# --- llama3: the whole packed sequence in contiguous parts, all needed keys gathered


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """What llama3_flash_attn_varlen_func takes: of this rank's even, contiguous part of the whole.

    Args:
        cu_seqlens: int32 or int64, where the documents of the whole begin, and the last ends.
        causal: whether keys behind this rank's part are of no use.
        rank, world_size: the place; the tokens divide by world_size.

    Returns:
        cu_seqlens_q, cu_seqlens_k (int32, on cu_seqlens' device), max_seqlen_q, max_seqlen_k, and
        the slice of the whole that holds the keys.
    """
    borders = host_lengths(cu_seqlens, "cu_seqlens")
    if not borders or borders[0] != 0 or borders[-1] % world_size or not 0 <= rank < world_size:
        raise InvalidArgument(
            f"cu_seqlens is {borders}, rank {rank} of {world_size}; expected [0, ..., tokens], and "
            "tokens that divide by the ranks"
        )
    part = borders[-1] // world_size
    begin, end = rank * part, (rank + 1) * part
    documents = [
        (first, last)
        for first, last in pairwise(borders)
        if first < end and last > begin and first < last
    ]
    q_lengths = [min(last, end) - max(first, begin) for first, last in documents]
    k_lengths = [(min(last, end) if causal else last) - first for first, last in documents]
    start = documents[0][0] if documents else begin
    cu_q, cu_k = (_summed(lengths, cu_seqlens) for lengths in (q_lengths, k_lengths))
    return (
        cu_q, cu_k, max(q_lengths, default=0), max(k_lengths, default=0),
        slice(start, start + sum(k_lengths)),
    )  # fmt: skip


def _summed(lengths: Sequence[int], like: Any) -> Tensor:
    device = like.device if isinstance(like, Tensor) else "cpu"
    sums = [*accumulate(lengths, initial=0)]
    return torch.tensor(sums, dtype=torch.int32, device=device)


def llama3_flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Any = None,
) -> Result:
    """Attention of packed documents in contiguous even parts, [tokens, heads, head_dim].

    Keys of `heads_k_stride` key heads are gathered at a time. Collective; see the head of this
    file.
    """
    group = _group(group)
    transport = _transport(q, group)
    try:
        check_operands(q, k, v, None, alibi_slopes, "thd", True)
        own_q = _own_lengths(cu_seqlens_q, max_seqlen_q, "cu_seqlens_q", "max_seqlen_q")
        own_k = _own_lengths(cu_seqlens_k, max_seqlen_k, "cu_seqlens_k", "max_seqlen_k")
        tokens, kv_heads = q.shape[0], k.shape[1]
        if not isinstance(heads_k_stride, int) or heads_k_stride < 1 or kv_heads % heads_k_stride:
            raise InvalidArgument(
                f"heads_k_stride is {heads_k_stride!r}; expected a divisor of the {kv_heads} key "
                "heads"
            )
        if not isinstance(return_attn_probs, bool):
            raise InvalidArgument(
                f"return_attn_probs is {return_attn_probs!r}; expected True or False"
            )
        begin = _check_slice(own_q, own_k, local_k_slice, tokens, causal, transport.rank)
    except Exception as error:
        raise transport.refused("sequence_parallel_attention", error) from None
    # Every rank knows the borders within its part; together they are those of the whole.
    starts = [*([begin] if own_q[-1] and local_k_slice.start == begin else []),
              *(begin + n for n in own_q[1:-1])]  # fmt: skip
    op = "sequence_parallel_attention: llama3"
    counts = transport.agree(op, [len(starts), tokens])
    if len({tokens for _, tokens in counts}) > 1:
        raise InvalidArgument(f"{op}: the ranks hold {[n for _, n in counts]} tokens, not as many")
    most = max(count for count, _ in counts)
    every = transport.agree(op, [*starts, *([-1] * (most - len(starts)))])
    total = sum(tokens for _, tokens in counts)
    cu = sorted({0, total, *(n for row in every for n in row if n >= 0)})
    ratio = q.shape[1] // kv_heads
    outs, lses = [], []
    for first in range(0, kv_heads, heads_k_stride):
        heads = slice(first * ratio, (first + heads_k_stride) * ratio)
        keys = slice(first, first + heads_k_stride)
        slopes = None if alibi_slopes is None else alibi_slopes[..., heads]
        out, lse = sequence_parallel_attention(
            q[:, heads], k[:, keys], v[:, keys], group=group, strategy="all_gather",
            sharding="contiguous", causal=causal, layout="thd", window_size=window_size,
            alibi_slopes=slopes, dropout_p=dropout_p, softmax_scale=softmax_scale,
            deterministic=deterministic, return_lse=True, cu_seqlens=cu,
        )  # fmt: skip
        outs.append(out)
        lses.append(lse)
    out = outs[0] if len(outs) == 1 else torch.cat(outs, 1)
    lse = lses[0] if len(lses) == 1 else torch.cat(lses, 0)
    return _result((out, lse) if return_attn_probs else out, return_attn_probs)


def _check_slice(
    own_q: tuple[int, ...],
    own_k: tuple[int, ...],
    keys: Any,
    tokens: int,
    causal: bool,
    rank: int,
) -> int:
    """The first token of this rank's part."""
    begin = rank * tokens
    good = (
        isinstance(keys, slice)
        and keys.step in (None, 1)
        and own_q[-1] == tokens
        and len(own_q) == len(own_k)
        and keys.start is not None
        and keys.stop is not None
        and keys.start <= begin
        and keys.stop - keys.start == own_k[-1]
        and (not causal or not tokens or keys.stop == begin + tokens)
    )
    if not good:
        raise InvalidArgument(
            f"cu_seqlens_q {list(own_q)}, cu_seqlens_k {list(own_k)}, local_k_slice {keys} are not "
            f"those of {tokens} tokens on rank {rank}{', causal' if causal else ''}: "
            "llama3_flash_attn_prepare_cu_seqlens makes them"
        )
    return begin


(
    _,
    llama3_flash_attn_varlen_kvpacked_func,
    llama3_flash_attn_varlen_qkvpacked_func,
) = _named(
    "llama3_flash_attn_varlen",
    "packed documents in contiguous even parts.",
    llama3_flash_attn_varlen_func,
)
