"""Column-parallel GEMM: y_i = all_gather(x) @ w_i^T + b_i, several weights on one gather.

Kernel: triton_kernels/all_gather_gemm.py.

With x = all ranks' x_shard joined along gather_dim, [..., K], and this rank's w_i [N_i, K]:

    forward   y_i  = x @ w_i^T + b_i                                     [..., N_i]
    dgrad     dx_shard = reduce_scatter(sum_i dy_i @ w_i + dx_gathered)  the other op
    wgrad     dw_i = dy_i^T @ x          x as it was gathered (save_gathered) or gathered again
    dbias     db_i = sum of the rows of dy_i

Saved: the weights; and either x, which is world_size times as large as x_shard, or x_shard, which
costs one more gather in backward.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from pyparallel.comm.products import times_weight
from pyparallel.errors import InvalidArgument
from pyparallel.ops.autocast import casts
from pyparallel.ops.checks import Misfits, by, check_floats, check_linear, dim_of, own_sizes
from pyparallel.ops.device_path import KERNELS
from pyparallel.ops.groups import Seat, group_name, seat_of
from pyparallel.ops.host_path import chunk_rows_of
from pyparallel.ops.library import define, is_direct, library_op, rows_of
from pyparallel.ops.main_grad import into_main_grad
from pyparallel.ops.outputs import define_out, into_out
from pyparallel.ops.scaled import is_scaled, refuse_with_scales, scaled

__all__ = ["all_gather_matmul"]

_NAME = "all_gather_matmul"


def _check(
    seat: Seat,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    gather_dim: int,
    shard_sizes: Sequence[int] | None,
) -> tuple[int, list[int]]:
    """The dim as an index, and every rank's size of it."""
    misfits = Misfits()
    if not weights:
        misfits.add("weight is an empty list; expected a tensor [N, K], or a list of them")
    if len(biases) != len(weights):
        misfits.add(f"bias has {len(biases)} entries for {len(weights)} weights; pass one for each")
    misfits.raise_any()
    w_names = ["weight"] if len(weights) == 1 else [f"weight[{i}]" for i in range(len(weights))]
    b_names = ["bias"] if len(weights) == 1 else [f"bias[{i}]" for i in range(len(weights))]
    named = dict(zip([*w_names, *b_names], [*weights, *biases], strict=True))
    check_floats({"x": x, **named}, misfits)
    misfits.raise_any()
    dim = dim_of(gather_dim, x.shape, "gather_dim", "x", misfits)
    misfits.raise_any()
    sizes = own_sizes(x.shape[dim], dim, shard_sizes, seat.rank, seat.world_size, misfits)
    k = sum(sizes) if dim == x.dim() - 1 else x.shape[-1]
    for w, b, w_name, b_name in zip(weights, biases, w_names, b_names, strict=True):
        text = f"the gathered x has K = {k} (x has shape {list(x.shape)})"
        check_linear(k, w, b, misfits, weight_name=w_name, bias_name=b_name, x_text=text)
    misfits.raise_any()
    return dim, sizes


def _run(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: Any,
    gather_dim: int,
    shard_sizes: Sequence[int] | None,
    return_gathered: bool,
    algorithm: str | None,
) -> list[Tensor]:
    seat = seat_of(group)
    try:
        dim, sizes = _check(seat, x, weights, biases, gather_dim, shard_sizes)
    except Exception as error:
        raise seat.refused(_NAME, error) from None
    whole = [*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :]]
    rows, k = prod(whole[:-1]), whole[-1]
    note = (
        f"{_NAME} of x {whole} {x.dtype} gathered from shards {sizes} of dim {dim}{by(algorithm)}"
    )
    not_first = f"gather_dim is {dim}, not the first" if dim or x.dim() == 1 else ""
    chosen = seat.choose(_NAME, rows, k, x, algorithm, note, not_first)
    if chosen == "plain":
        engine = seat.engine_of(x)
        engine.note(note)
        gathered = engine.all_gather(x, dim, sizes)
        results = [
            times_weight(gathered, w) if b is None else linear(gathered, w, b)
            for w, b in zip(weights, biases, strict=True)
        ]
        return [*results, gathered] if return_gathered else results
    inner = prod(whole[1:-1])
    x_rows = x.reshape(sizes[seat.rank] * inner, k)
    row_sizes = [n * inner for n in sizes]
    if chosen in KERNELS[_NAME]:
        kernels = seat.device_path(x.device)
        products, gathered = kernels.all_gather_matmul(
            x_rows, weights, biases, row_sizes, note, chosen
        )
    else:
        path = seat.engine.host_path
        assert path is not None, chosen
        chunk = chunk_rows_of(k, x.dtype) if chosen == "chunked" else rows
        products, gathered = path.all_gather_matmul(x_rows, weights, row_sizes, note, chunk)
        for product, bias in zip(products, biases, strict=True):
            if bias is not None:
                product += bias
    results = [y.view(*whole[:-1], y.shape[1]) for y in products]
    if return_gathered:
        gathered = gathered.clone().view(whole)  # the workspace is the next calls'
    return [*results, gathered] if return_gathered else results


def _spread(weights: Sequence[Tensor], biases: Sequence[Tensor], biased: Sequence[int]) -> Any:
    """One bias or None for each weight: schemas have no lists of optional tensors in autograd."""
    spread: list[Tensor | None] = [None] * len(weights)
    for i, bias in zip(biased, biases, strict=True):
        spread[i] = bias
    return spread


def _run_op(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    biased: list[int],
    group: str,
    gather_dim: int,
    shard_sizes: list[int] | None,
    return_gathered: bool,
    save_gathered: bool,
    algorithm: str | None,
) -> list[Tensor]:
    spread = _spread(weights, biases, biased)
    return _run(x, weights, spread, group, gather_dim, shard_sizes, return_gathered, algorithm)


def _fake(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    biased: list[int],
    group: str,
    gather_dim: int,
    shard_sizes: list[int] | None,
    return_gathered: bool,
    save_gathered: bool,
    algorithm: str | None,
) -> list[Tensor]:
    spread = _spread(weights, biases, biased)
    dim, sizes = _check(seat_of(group), x, weights, spread, gather_dim, shard_sizes)
    gathered = x.new_empty((*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :]))
    results = [x.new_empty((*gathered.shape[:-1], w.shape[0])) for w in weights]
    return [*results, gathered] if return_gathered else results


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, biases, ctx.biased, ctx.group, ctx.dim, ctx.sizes, ctx.gathered, save, _ = inputs
    ctx.count = len(weights)
    ctx.saved_whole = save and ctx.gathered
    ctx.n_biases = len(biases)
    ctx.save_for_backward(output[-1] if ctx.saved_whole else x, *weights)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    dys = list(grads[: ctx.count])
    d_gathered = grads[ctx.count] if ctx.gathered else None
    needs_x, needs_w, needs_b = ctx.needs_input_grad[:3]
    some = [(dy, w) for dy, w in zip(dys, weights, strict=True) if dy is not None]

    dx = None
    if needs_x and (some or d_gathered is not None):
        if some:
            dx = library_op("matmul_reduce_scatter")(
                [dy for dy, _ in some],
                [w.t() for _, w in some],
                None,
                d_gathered,
                ctx.group,
                ctx.dim,
                ctx.sizes,
                None,
            )
        else:
            dx = library_op("reduce_scatter")(d_gathered, ctx.group, ctx.dim, ctx.sizes)

    dws: list[Tensor | None] = [None] * ctx.count
    if any(needs_w):
        whole = x
        if not ctx.saved_whole:
            whole = library_op("all_gather")(x, ctx.group, ctx.dim, ctx.sizes)
        rows = rows_of(whole)
        for i, dy in enumerate(dys):
            if needs_w[i] and dy is not None:
                dws[i] = rows_of(dy).t() @ rows
    dbs: list[Tensor | None] = [None] * ctx.n_biases
    for j, i in enumerate(ctx.biased):
        dy = dys[i]
        if needs_b[j] and dy is not None:
            dbs[j] = rows_of(dy).sum(0)
    # torch takes an empty list of ints for one of tensors, and wants as many gradients.
    no_biased: list[None] | None = None if ctx.biased else []
    return dx, dws, dbs, no_biased, None, None, None, None, None, None


define(
    f"{_NAME}(Tensor x, Tensor[] weights, Tensor[] biases, int[] biased, str group, "
    "int gather_dim, SymInt[]? shard_sizes, bool return_gathered, bool save_gathered, "
    "str? algorithm) -> Tensor[]",
    _run_op,
    _fake,
    _backward,
    _setup_context,
)
define_out(
    _NAME,
    "Tensor x, Tensor[] weights, Tensor[] biases, int[] biased, str group, int gather_dim, "
    "SymInt[]? shard_sizes, str? algorithm",
    lambda x, weights, biases, biased, group, dim, sizes, algorithm: _run(
        x, weights, _spread(weights, biases, biased), group, dim, sizes, False, algorithm
    ),
)


def _product_shapes(
    seat: Seat, x: Tensor, weights: Sequence[Tensor], dim: int, sizes: Sequence[int] | None
) -> list[list[int]]:
    shape = list(x.shape)
    shape[dim] = shape[dim] * seat.world_size if sizes is None else sum(sizes)
    return [[*shape[:-1], w.shape[0]] for w in weights]


def all_gather_matmul(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    group: Any,
    gather_dim: int = 0,
    bias: "Tensor | Sequence[Tensor | None] | None" = None,
    shard_sizes: Sequence[int] | None = None,
    return_gathered: bool = False,
    *,
    out: "Tensor | Sequence[Tensor] | None" = None,
    save_gathered: bool = True,
    algorithm: str | None = None,
    main_grad: "Tensor | Sequence[Tensor | None] | None" = None,
    x_scale: Tensor | None = None,
    weight_scale: "Tensor | Sequence[Tensor] | None" = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """`all_gather(x) @ weight.T + bias`: the first half of a tensor-parallel block. Collective.

    Args:
        x: this rank's shard [..., M_local, K], any strides; float64, float32, float16 or bfloat16.
        weight: [N, K], this rank's rows of the whole weight; or a list of them (q, k, v; gate, up)
            with any N each, which share the one gather.
        group: see `pyparallel.ops`.
        gather_dim: along which the shards of x are joined; any of x, and may be negative.
        bias: [N], this rank's part, or None; with a list of weights a list of as many.
        shard_sizes: every rank's size of gather_dim, where they differ.
        return_gathered: give the gathered x too.
        out: takes the products (a list, with a list of weights), of their shapes and dtype, and
            shares no memory with an input. Without derivative, and not with return_gathered.
        save_gathered: keep the gathered x for the weight gradients. False keeps only the shard, and
            gathers again in backward.
        algorithm: one of docs/ops.md; by default the one that explain() tells. Alike on all ranks.
        main_grad: float32 [N, K] buffer(s) that weight gradients are added to; the weight's own
            `.grad` then stays None.
        x_scale, weight_scale: of float8_e4m3fn operands, on CUDA; float32, one value or one for
            each row (see ops/scaled.py); a list of weight_scale for a list of weights. Without
            derivative.
        out_dtype: of the result of such operands; bfloat16 by default.

    Returns:
        [..., M, N], or a list of one for each weight; with return_gathered a pair of that and the
        gathered x [..., M, K].

    Raises:
        ValueError: on every rank, where one rank's arguments cannot work or ranks disagree.
    """
    listed = not isinstance(weight, Tensor)
    weights: list[Tensor] = [weight] if isinstance(weight, Tensor) else list(weight)
    if bias is None:
        biases: list[Tensor | None] = [None] * len(weights)
    else:
        biases = list(bias) if not isinstance(bias, Tensor) else [bias]
    biased = [i for i, b in enumerate(biases) if b is not None]
    given = [b for b in biases if b is not None]
    sizes = None if shard_sizes is None else list(shard_sizes)
    if is_scaled(x_scale, weight_scale, out_dtype):
        without = {"out": out, "main_grad": main_grad, "gather_dim": gather_dim or None}
        refuse_with_scales(_NAME, group, {**without, "return_gathered": return_gathered or None})
        scales = list(weight_scale) if listed and weight_scale is not None else [weight_scale]
        products = scaled(
            _NAME,
            group,
            [x, *weights, x_scale, *scales],
            *(x, weights, given, biased, x_scale, scales, group_name(group)),
            *(sizes, out_dtype or torch.bfloat16, algorithm),
        )
        return products if listed else products[0]
    if main_grad is not None:
        weights = into_main_grad(_NAME, group, weights, main_grad)
    x, *operands = casts(x, *weights, *biases)
    weights, biases = operands[: len(weights)], operands[len(weights) :]
    given = [b for b in biases if b is not None]
    if out is not None:
        if return_gathered:
            error = InvalidArgument("out= does not take the gathered x; leave return_gathered out")
            raise seat_of(group).refused(_NAME, error)
        return into_out(
            _NAME,
            group,
            (x, weights, given, biased, group_name(group), gather_dim, sizes, algorithm),
            lambda: _run(x, weights, biases, group, gather_dim, sizes, False, algorithm),
            {"x": x, **{f"weight[{i}]": w for i, w in enumerate(weights)},
             **{f"bias[{i}]": b for i, b in enumerate(biases)}},
            lambda: _product_shapes(seat_of(group), x, weights, gather_dim, sizes),
            out,
        )  # fmt: skip
    if is_direct(x, *weights, *biases):
        results = _run(
            x, weights, biases, group, gather_dim, shard_sizes, return_gathered, algorithm
        )
    else:
        keep = save_gathered and any(w.requires_grad for w in weights)
        results = library_op(_NAME)(
            x,
            weights,
            given,
            biased,
            group_name(group),
            gather_dim,
            sizes,
            return_gathered or keep,
            save_gathered,
            algorithm,
        )
    ys = results[: len(weights)]
    y = ys if listed else ys[0]
    return (y, results[-1]) if return_gathered else y
