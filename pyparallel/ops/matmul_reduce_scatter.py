"""Row-parallel GEMM under sequence parallelism: y_shard = reduce_scatter(x @ w^T) + b.

Kernel: triton_kernels/gemm_reduce_scatter.py.

With this rank's columns x [..., K_r] and w [N, K_r], and y summed over the ranks, [..., N]:

    forward   y_shard = own shard, along scatter_dim, of sum_r x_r @ w_r^T, plus b, once
    dgrad     dx = dy @ w          dy = all_gather(dy_shard): the other op
    wgrad     dw = dy^T @ x
    dbias     db = sum of the rows of dy: all of them, so alike on every rank without another sum

Saved: x and w. The op itself sums several products x_i @ w_i^T and one addend before it scatters:
that is the derivative of an all_gather_matmul with several weights.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from pyparallel.comm.products import part_times_weight
from pyparallel.ops.autocast import casts
from pyparallel.ops.checks import (
    Misfits,
    by,
    check_algorithm,
    check_floats,
    check_linear,
    dim_of,
    listed_sizes,
    sizes_of_whole,
)
from pyparallel.ops.device_path import KERNELS
from pyparallel.ops.dispatch import Operation, announced, invoke, told
from pyparallel.ops.groups import group_name, seat_of
from pyparallel.ops.host_path import chunk_rows_of
from pyparallel.ops.library import define, library_op, matmul, rows_of
from pyparallel.ops.main_grad import MainGrad, main_grads_of
from pyparallel.ops.outputs import define_out
from pyparallel.ops.scaled import is_scaled, scaled

__all__ = ["matmul_reduce_scatter"]

_NAME = "matmul_reduce_scatter"


def _check(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    bias: Tensor | None,
    addend: Tensor | None,
    group: Any,
    scatter_dim: int,
    shard_sizes: Sequence[int] | None,
    algorithm: Any,
) -> tuple[int, list[int]]:
    """The dim of y as an index, and every rank's size of it."""
    misfits = Misfits()
    check_algorithm(algorithm, misfits)
    one = len(xs) == 1
    x_names = ["x"] if one else [f"x[{i}]" for i in range(len(xs))]
    w_names = ["weight"] if one else [f"weight[{i}]" for i in range(len(xs))]
    named = dict(zip([*x_names, *w_names], [*xs, *weights], strict=True))
    check_floats({**named, "bias": bias, "addend": addend}, misfits)
    misfits.raise_any()
    if xs[0].dim() == 0:
        misfits.add("x is 0-dimensional; expected [..., K]")
    misfits.raise_any()
    for x, w, x_name, w_name in zip(xs, weights, x_names, w_names, strict=True):
        k = x.shape[-1]
        text = f"{x_name} has K = {k} (shape {list(x.shape)})"
        check_linear(k, w, bias, misfits, weight_name=w_name, x_text=text)
    misfits.raise_any()
    shape = (*xs[0].shape[:-1], weights[0].shape[0])
    what = f"the result (shape {list(shape)})"
    dim = dim_of(scatter_dim, shape, "scatter_dim", "the result", misfits)
    misfits.raise_any()
    ranks = seat_of(group).world_size
    sizes = sizes_of_whole(shape[dim], dim, shard_sizes, ranks, misfits, what)
    misfits.raise_any()
    return dim, sizes


def _run(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    bias: Tensor | None,
    addend: Tensor | None,
    group: Any,
    scatter_dim: int,
    shard_sizes: Sequence[int] | None,
    algorithm: str | None,
    out: Tensor | None = None,
) -> Tensor:
    seat = seat_of(group)
    try:
        dim, sizes = _check(xs, weights, bias, addend, seat, scatter_dim, shard_sizes, algorithm)
    except Exception as error:
        raise seat.refused(_NAME, error) from None
    lead, n = xs[0].shape[:-1], weights[0].shape[0]
    note = (
        f"{_NAME} with {'no ' if bias is None else ''}bias, result {[*lead, n]} {xs[0].dtype} "
        f"scattered to shards {sizes} of dim {dim}{by(algorithm)}"
    )
    rows = prod(lead)
    not_first = f"scatter_dim is {dim}, not the first" if dim or not lead else ""
    several = "it adds several products" if len(xs) > 1 or addend is not None else ""
    chosen = seat.choose(_NAME, rows, n, xs[0], algorithm, note, not_first, several)
    inner = prod(lead[1:])
    own_shape = (sizes[seat.rank], *lead[1:], n)
    if chosen == "signal":
        row_sizes = [size * inner for size in sizes]
        flat = xs[0].reshape(rows, xs[0].shape[-1])
        path = seat.grouped_path(flat)
        return path.matmul_reduce_scatter(flat, weights[0], bias, row_sizes, note).view(own_shape)
    if chosen in KERNELS[_NAME]:
        return (
            seat.device_path(xs[0].device)
            .matmul_reduce_scatter(
                xs[0].reshape(rows, xs[0].shape[-1]),
                weights[0],
                bias,
                [size * inner for size in sizes],
                note,
            )
            .view(own_shape)
        )
    if chosen == "plain":
        partial = part_times_weight(xs[0], weights[0])
        for x, w in zip(xs[1:], weights[1:], strict=True):
            partial += part_times_weight(x, w)
        if addend is not None:
            partial += addend
        engine = seat.engine_of(partial)
        engine.note(note)
        shard = engine.reduce_scatter(partial, dim, sizes, out)
    else:
        host = seat.engine.host_path
        assert host is not None, chosen
        chunk = chunk_rows_of(n, xs[0].dtype) if chosen == "chunked" else rows
        shard = host.matmul_reduce_scatter(
            [x.reshape(rows, x.shape[-1]) for x in xs],
            weights,
            None if addend is None else addend.reshape(rows, n),
            [size * inner for size in sizes],
            note,
            chunk,
        ).view(own_shape)
    if bias is not None:
        if dim == len(lead):
            bias = bias[sum(sizes[: seat.rank]) :][: sizes[seat.rank]]
        shard += bias
    return shard


def _fake(
    xs: list[Tensor],
    weights: list[Tensor],
    bias: Tensor | None,
    addend: Tensor | None,
    group: str,
    scatter_dim: int,
    shard_sizes: list[int] | None,
    algorithm: str | None,
) -> Tensor:
    seat = seat_of(group)
    dim, sizes = _check(xs, weights, bias, addend, seat, scatter_dim, shard_sizes, algorithm)
    shape = [*xs[0].shape[:-1], weights[0].shape[0]]
    shape[dim] = sizes[seat.rank]
    return xs[0].new_empty(shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    xs, weights, _, _, ctx.group, ctx.dim, ctx.sizes, _ = inputs
    ctx.count = len(xs)
    ctx.last = len(xs[0].shape) - 1
    ctx.save_for_backward(*xs, *weights)


def _input_gradients(
    ctx: Any, dy_shard: Tensor, weights: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor]:
    """dy @ w for each weight, and dy itself, gathered once for all."""
    if not weights:
        return [], library_op("all_gather")(dy_shard, ctx.group, ctx.dim, ctx.sizes)
    *dxs, dy = library_op("all_gather_matmul")(
        dy_shard,
        [w.t() for w in weights],
        [],
        [],
        ctx.group,
        ctx.dim,
        ctx.sizes,
        True,
        False,
        None,
    )
    return dxs, dy


def _backward(ctx: Any, dy_shard: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # once: where layers are recomputed, a second look is refused
    xs, weights = saved[: ctx.count], saved[ctx.count :]
    needs_xs, needs_ws, needs_bias, needs_addend = ctx.needs_input_grad[:4]
    wanted = [i for i in range(ctx.count) if needs_xs[i]]
    found, dy = _input_gradients(ctx, dy_shard, [weights[i] for i in wanted])
    dxs: list[Tensor | None] = [None] * ctx.count
    for i, dx in zip(wanted, found, strict=True):
        dxs[i] = dx
    rows = rows_of(dy)
    dws = [
        matmul(rows.t(), rows_of(x)) if needed else None
        for x, needed in zip(xs, needs_ws, strict=True)
    ]
    db = rows.sum(0) if needs_bias else None
    return dxs, dws, db, dy if needs_addend else None, None, None, None, None


define(
    f"{_NAME}(Tensor[] xs, Tensor[] weights, Tensor? bias, Tensor? addend, str group, "
    "int scatter_dim, SymInt[]? shard_sizes, str? algorithm) -> Tensor",
    _run,
    _fake,
    _backward,
    _setup_context,
)
define_out(
    _NAME,
    "Tensor[] xs, Tensor[] weights, Tensor? bias, Tensor? addend, str group, int scatter_dim, "
    "SymInt[]? shard_sizes, str? algorithm",
    _run,
)


def _shapes(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    bias: Any,
    addend: Any,
    group: Any,
    dim: int,
    sizes: Sequence[int] | None,
    algorithm: Any,
) -> list[list[int]]:
    seat = seat_of(group)
    shape = [*xs[0].shape[:-1], weights[0].shape[0]]
    shape[dim] = shape[dim] // seat.world_size if sizes is None else sizes[seat.rank]
    return [shape]


_OP = Operation(_NAME, _run, _check, _shapes, _run)


class _Accumulating(torch.autograd.Function):
    """The op of one product, whose weight gradient goes `into` a buffer: dy is gathered once."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, into: MainGrad, *rest: Any
    ) -> Tensor:
        ctx.into = into
        ctx.group, ctx.dim, ctx.sizes, _ = rest
        ctx.save_for_backward(x, weight)
        shard: Tensor = library_op(_NAME)([x], [weight], bias, None, *rest)
        return shard

    @staticmethod
    def backward(ctx: Any, dy_shard: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dx, dy = _input_gradients(ctx, dy_shard, [weight] if needs_x else [])
        rows = rows_of(dy)
        if needs_weight:
            ctx.into.add(rows, rows_of(x))
        db = rows.sum(0) if needs_bias else None
        return dx[0] if dx else None, None, db, None, None, None, None, None


@announced
def matmul_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    group: Any,
    scatter_dim: int = 0,
    bias: Tensor | None = None,
    shard_sizes: Sequence[int] | None = None,
    *,
    out: Tensor | None = None,
    algorithm: str | None = None,
    main_grad: "Tensor | MainGrad | None" = None,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """This rank's shard of the sum over ranks of `x @ weight.T`, plus `bias`. Collective.

    Args:
        x: [..., K], this rank's columns, any strides, K may differ between ranks; float64, float32,
            float16 or bfloat16.
        weight: [N, K], this rank's columns of the whole weight.
        group: see `pyparallel.ops`.
        scatter_dim: dim of the result [..., N] that is split between ranks; may be negative.
        bias: [N], the whole bias, alike on all ranks; it is added once. Its gradient is whole too,
            and alike on all ranks.
        shard_sizes: every rank's size of scatter_dim; needed where it does not divide.
        out: takes the result, of its shape and dtype, and shares no memory with an input. Without
            derivative.
        algorithm: one of docs/ops.md; by default the one that explain() tells. Alike on all ranks.
        main_grad: float32 [N, K] buffer that the weight gradient is added to; the weight's own
            `.grad` then stays None.
        x_scale, weight_scale: of float8_e4m3fn operands, on CUDA; float32, one value or one for
            each row (see ops/scaled.py). Without derivative.
        out_dtype: of the result of such operands; bfloat16 by default.

    Returns:
        [..., N] with scatter_dim of this rank's size. Partial products are rounded to the dtype
        and then added in rank order (16-bit floats in float32, rounded once).

    Raises:
        ValueError: on every rank, where one rank's arguments cannot work or ranks disagree.
    """
    sizes = None if shard_sizes is None else told(_NAME, group, listed_sizes, shard_sizes)
    if is_scaled(x_scale, weight_scale, out_dtype):
        rows: Tensor = scaled(
            _NAME,
            group,
            {"out": out, "main_grad": main_grad},
            lambda at: (x, weight, bias, x_scale, weight_scale, at, sizes),
            out_dtype,
            algorithm,
            scatter_dim,
        )
        return rows
    x, weight, bias = casts(x, weight, bias)
    into = None
    if main_grad is not None:
        into = told(_NAME, group, main_grads_of, [weight], main_grad, out)
    if into is not None and into[0] and torch.is_grad_enabled() and weight.requires_grad:
        rest = (group_name(group), scatter_dim, sizes, algorithm)
        if not torch.compiler.is_compiling():
            told(_NAME, group, _check, [x], [weight], bias, None, *rest)
        kept: Tensor = _Accumulating.apply(  # type: ignore[no-untyped-call]
            x, weight, bias, into[0], *rest
        )
        return kept
    shard: Tensor = invoke(
        _OP, group, lambda at: ([x], [weight], bias, None, at, scatter_dim, sizes, algorithm), out
    )
    return shard
