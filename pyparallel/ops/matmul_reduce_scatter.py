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
from pyparallel.ops.checks import Misfits, by, check_floats, check_linear, dim_of, sizes_of_whole
from pyparallel.ops.device_path import KERNELS
from pyparallel.ops.groups import Seat, group_name, seat_of
from pyparallel.ops.host_path import chunk_rows_of
from pyparallel.ops.library import define, is_direct, library_op, rows_of
from pyparallel.ops.main_grad import into_main_grad
from pyparallel.ops.outputs import define_out, into_out
from pyparallel.ops.scaled import is_scaled, refuse_with_scales, scaled

__all__ = ["matmul_reduce_scatter"]

_NAME = "matmul_reduce_scatter"


def _check(
    seat: Seat,
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    bias: Tensor | None,
    addend: Tensor | None,
    scatter_dim: int,
    shard_sizes: Sequence[int] | None,
) -> tuple[int, list[int]]:
    """The dim of y as an index, and every rank's size of it."""
    misfits = Misfits()
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
    sizes = sizes_of_whole(shape[dim], dim, shard_sizes, seat.world_size, misfits, what)
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
) -> Tensor:
    seat = seat_of(group)
    try:
        dim, sizes = _check(seat, xs, weights, bias, addend, scatter_dim, shard_sizes)
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
        shard = engine.reduce_scatter(partial, dim, sizes)
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
    dim, sizes = _check(seat, xs, weights, bias, addend, scatter_dim, shard_sizes)
    shape = [*xs[0].shape[:-1], weights[0].shape[0]]
    shape[dim] = sizes[seat.rank]
    return xs[0].new_empty(shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    xs, weights, _, _, ctx.group, ctx.dim, ctx.sizes, _ = inputs
    ctx.count = len(xs)
    ctx.last = len(xs[0].shape) - 1
    ctx.save_for_backward(*xs, *weights)


def _backward(ctx: Any, dy_shard: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # once: where layers are recomputed, a second look is refused
    xs, weights = saved[: ctx.count], saved[ctx.count :]
    needs_xs, needs_ws, needs_bias, needs_addend = ctx.needs_input_grad[:4]
    dxs: list[Tensor | None] = [None] * ctx.count
    wanted = [i for i in range(ctx.count) if needs_xs[i]]
    if wanted:
        *found, dy = library_op("all_gather_matmul")(
            dy_shard,
            [weights[i].t() for i in wanted],
            [],
            [],
            ctx.group,
            ctx.dim,
            ctx.sizes,
            True,
            False,
            None,
        )
        for i, dx in zip(wanted, found, strict=True):
            dxs[i] = dx
    else:
        dy = library_op("all_gather")(dy_shard, ctx.group, ctx.dim, ctx.sizes)
    rows = rows_of(dy)
    dws = [
        rows.t() @ rows_of(x) if needed else None for x, needed in zip(xs, needs_ws, strict=True)
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


def _shard_shape(
    seat: Seat, x: Tensor, weight: Tensor, dim: int, sizes: Sequence[int] | None
) -> list[int]:
    shape = [*x.shape[:-1], weight.shape[0]]
    shape[dim] = shape[dim] // seat.world_size if sizes is None else sizes[seat.rank]
    return shape


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
    main_grad: Tensor | None = None,
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
    sizes = None if shard_sizes is None else list(shard_sizes)
    if is_scaled(x_scale, weight_scale, out_dtype):
        refuse_with_scales(
            _NAME, group, {"out": out, "main_grad": main_grad, "scatter_dim": scatter_dim or None}
        )
        rows: Tensor = scaled(
            _NAME,
            group,
            [x, weight, x_scale, weight_scale],
            *(x, weight, bias, x_scale, weight_scale, group_name(group)),
            *(sizes, out_dtype or torch.bfloat16, algorithm),
        )
        return rows
    if main_grad is not None:
        (weight,) = into_main_grad(_NAME, group, [weight], main_grad)
    x, weight, bias = casts(x, weight, bias)
    if out is not None:
        written: Tensor = into_out(
            _NAME,
            group,
            ([x], [weight], bias, None, group_name(group), scatter_dim, sizes, algorithm),
            lambda: _run([x], [weight], bias, None, group, scatter_dim, sizes, algorithm),
            {"x": x, "weight": weight, "bias": bias},
            lambda: [_shard_shape(seat_of(group), x, weight, scatter_dim, sizes)],
            out,
        )
        return written
    if is_direct(x, weight, bias):
        return _run([x], [weight], bias, None, group, scatter_dim, shard_sizes, algorithm)
    shard: Tensor = library_op(_NAME)(
        [x], [weight], bias, None, group_name(group), scatter_dim, sizes, algorithm
    )
    return shard
