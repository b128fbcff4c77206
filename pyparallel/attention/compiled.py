"""The attention as torch.compile sees it: two custom ops, so that a graph does not break at it.

Eager calls go through an autograd function (sequence_parallel.py) that keeps what backward needs in
the form in which it needs it. A graph may keep tensors of known shapes only: here backward makes
the rest again, which under Ulysses costs the exchange of q, k and v once more.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyparallel.attention.positions import digest_of
from pyparallel.attention.request import Options, check_operands, options_of
from pyparallel.attention.run import Attention
from pyparallel.attention.state import accumulator_dtype
from pyparallel.attention.transport import transport_of
from pyparallel.ops.groups import group_name
from pyparallel.ops.library import define, library_op

__all__ = ["compiled_attention"]

_NAME = "sequence_parallel_attention"
_LENGTHS = (
    "Tensor? cu_seqlens, Tensor? cu_seqlens_k, int[]? cu_seqlens_list, int[]? cu_seqlens_k_list"
)
_OPTIONS = (
    "str strategy, str sharding, bool causal, int[] window_size, float softcap, "
    "float? softmax_scale, float dropout_p, bool per_document, bool padded, bool deterministic, "
    "int? ulysses_size, str? engine"
)
_NAMES = (
    "strategy", "sharding", "causal", "window_size", "softcap", "softmax_scale", "dropout_p",
    "per_document", "padded", "deterministic", "ulysses_size", "engine",
)  # fmt: skip
_FIXED = 2 + 4 + len(_NAMES)  # sinks and slopes, lengths, options


def _options(d: int, lengths: Sequence[Any], given: Sequence[Any]) -> Options:
    named = dict(zip(_NAMES, given, strict=True))
    named["window_size"] = tuple(named["window_size"])
    q, k, q_list, k_list = lengths
    return options_of(
        d,
        cu_seqlens=q_list if q is None else q,
        cu_seqlens_k=k_list if k is None else k,
        **named,
    )


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: str,
    rest: Sequence[Any],
    seed: int,
    positions: Any,
    named_seed: Any,
) -> Attention:
    from pyparallel.attention.sequence_parallel import agreed

    sinks, slopes, *others = rest
    transport = transport_of(group, q.device)
    try:
        documents = any(x is not None for x in others[:4])
        check_operands(q, k, v, sinks, slopes, "bshd", documents)
        options = _options(q.shape[-1], others[:4], others[4:])
        own = [seed, digest_of(positions, options.strategy)]
    except Exception as error:
        raise transport.refused(_NAME, error) from None
    return agreed(transport, q, k, v, sinks, slopes, options, own, named_seed)


def _run(
    q: Tensor, k: Tensor, v: Tensor, group: str, seed: int | None, positions: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    named_seed = "drawn" if seed is None else seed % 2**64
    if seed is None:
        drawn = rest[2 + 4 + _NAMES.index("dropout_p")] > 0
        seed = int(torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64)) if drawn else 0
    call = _call(q, k, v, group, rest, seed, positions, named_seed)
    out, lse, _ = call.forward(q, k, v, rest[0])
    taken = call.mask.seed
    signed = taken - 2**64 if taken >= 2**63 else taken
    # A graph knows its outputs' strides.
    return out.contiguous(), lse.contiguous(), torch.tensor(signed, dtype=torch.int64)


def _fake(
    q: Tensor, k: Tensor, v: Tensor, group: str, seed: int | None, positions: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    batch, rows, heads, _ = q.shape
    out = q.new_empty((batch, rows, heads, v.shape[3]))
    lse = q.new_empty((batch, heads, rows), dtype=accumulator_dtype(q.dtype))
    return out, lse, torch.empty((), dtype=torch.int64)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, ctx.group, _, _, sinks, slopes, cu, cu_k, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, sinks, slopes, cu, cu_k, *output)
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any) -> tuple[Any, ...]:
    q, k, v, sinks, slopes, cu, cu_k, out, lse, seed = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    dq, dk, dv, dsinks = library_op(f"{_NAME}_backward")(
        dout, dlse, out, lse, seed, q, k, v, ctx.group, sinks, slopes, cu, cu_k, *ctx.rest
    )
    return dq, dk, dv, None, None, None, None if sinks is None else dsinks, *[None] * (_FIXED - 1)


def _run_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, seed: Tensor, q: Tensor,
    k: Tensor, v: Tensor, group: str, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    call = _call(q, k, v, group, rest, int(seed), None, int(seed))
    sinks = rest[0]
    kept = call.keep(q, k, v, lse)
    dq, dk, dv, dsinks = call.backward(dout, dlse, out, lse, sinks, kept)
    none = q.new_empty(0) if dsinks is None else dsinks.contiguous()
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), none


def _fake_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, seed: Tensor, q: Tensor,
    k: Tensor, v: Tensor, group: str, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    sinks = rest[0]
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


define(
    f"{_NAME}(Tensor q, Tensor k, Tensor v, str group, int? dropout_seed, Tensor? position_ids, "
    f"Tensor? sinks, Tensor? alibi_slopes, {_LENGTHS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _run,
    _fake,
    _backward,
    _setup_context,
)
define(
    f"{_NAME}_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor seed, Tensor q, "
    "Tensor k, Tensor v, str group, Tensor? sinks, Tensor? alibi_slopes, "
    f"{_LENGTHS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)


def compiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Any,
    seed: int | None,
    position_ids: Tensor | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    cu_seqlens: Any,
    cu_seqlens_k: Any,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """(out, lse) of q, k and v in bshd, through the ops; for graphs."""
    tensors = [x if isinstance(x, Tensor) else None for x in (cu_seqlens, cu_seqlens_k)]
    lists = [None if x is None or isinstance(x, Tensor) else list(x)
             for x in (cu_seqlens, cu_seqlens_k)]  # fmt: skip
    if seed is not None and seed >= 2**63:
        seed -= 2**64
    out, lse, _ = library_op(_NAME)(
        q, k, v, group_name(group), seed, position_ids, sinks, alibi_slopes, *tensors, *lists,
        *(options[name] for name in _NAMES),
    )  # fmt: skip
    return out, lse
