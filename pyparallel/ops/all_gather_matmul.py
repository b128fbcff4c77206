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

from pyparallel.comm.products import biased_product
from pyparallel.errors import InvalidArgument
from pyparallel.ops.autocast import casts
from pyparallel.ops.checks import (
    Misfits,
    by,
    check_algorithm,
    check_floats,
    check_linear,
    dim_of,
    listed_sizes,
    own_sizes,
)
from pyparallel.ops.device_path import KERNELS
from pyparallel.ops.dispatch import Operation, announced, invoke, told
from pyparallel.ops.groups import Seat, group_name, seat_of
from pyparallel.ops.host_path import chunk_rows_of
from pyparallel.ops.library import define, library_op, matmul, rows_of
from pyparallel.ops.main_grad import MainGrad, behind, main_grads_of, without_gradient
from pyparallel.ops.outputs import define_out
from pyparallel.ops.scaled import is_scaled, scaled

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
        results = [biased_product(gathered, w, b) for w, b in zip(weights, biases, strict=True)]
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
                dws[i] = matmul(rows_of(dy).t(), rows)
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


def _run_into(*args: Any) -> list[Tensor]:
    x, weights, biases, biased, group, dim, sizes, algorithm = args
    spread = _spread(weights, biases, biased)
    return _run(x, weights, spread, group, dim, sizes, False, algorithm)


define_out(
    _NAME,
    "Tensor x, Tensor[] weights, Tensor[] biases, int[] biased, str group, int gather_dim, "
    "SymInt[]? shard_sizes, str? algorithm",
    _run_into,
)


def _check_into(*args: Any) -> tuple[int, list[int]]:
    x, weights, biases, biased, group, dim, sizes, algorithm = args
    misfits = Misfits()
    check_algorithm(algorithm, misfits)
    misfits.raise_any()
    return _check(seat_of(group), x, weights, _spread(weights, biases, biased), dim, sizes)


def _check_op(*args: Any) -> None:
    *first, _, _, algorithm = args
    _check_into(*first, algorithm)


def _shapes(*args: Any) -> list[list[int]]:
    x, weights = args[:2]
    dim, sizes = _check_into(*args)
    shape = [*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :]]
    return [[*shape[:-1], w.shape[0]] for w in weights]


_OP = Operation(_NAME, _run_op, _check_op)
_INTO = Operation(_NAME, _run_into, _check_into, _shapes)


def _refuse_bools(return_gathered: Any, save_gathered: Any) -> None:
    raise InvalidArgument(
        f"return_gathered is {return_gathered!r}, save_gathered {save_gathered!r}; expected bools"
    )


def _without_gathered(out: Any, return_gathered: bool) -> Any:
    if return_gathered:
        raise InvalidArgument("out= does not take the gathered x; leave return_gathered out")
    return out


def _listed_weights(weight: Any, bias: Any) -> "tuple[list[Tensor], list[Tensor | None]]":
    """Weights, and a bias or None for each, of one or of a list."""
    weights = [weight] if isinstance(weight, Tensor) else weight
    if not isinstance(weights, (list, tuple)):
        raise InvalidArgument(
            f"weight is a {type(weight).__name__}; expected a torch.Tensor [N, K], or a list of "
            "them"
        )
    if bias is None:
        return list(weights), [None] * len(weights)
    biases = [bias] if isinstance(bias, Tensor) else bias
    if not isinstance(biases, (list, tuple)):
        raise InvalidArgument(
            f"bias is a {type(bias).__name__}; expected a torch.Tensor [N], a list with one (or "
            "None) for each weight, or None"
        )
    if len(biases) != len(weights):
        raise InvalidArgument(
            f"bias has {len(biases)} entries for {len(weights)} weights; pass one for each"
        )
    return list(weights), list(biases)


@announced
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
    main_grad: "Tensor | MainGrad | Sequence[Tensor | None] | None" = None,
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
    if type(return_gathered) is not bool or type(save_gathered) is not bool:
        told(_NAME, group, _refuse_bools, return_gathered, save_gathered)
    sizes = None if shard_sizes is None else told(_NAME, group, listed_sizes, shard_sizes)
    weights, biases = told(_NAME, group, _listed_weights, weight, bias)
    if is_scaled(x_scale, weight_scale, out_dtype):
        scales = list(weight_scale) if isinstance(weight_scale, (list, tuple)) else [weight_scale]
        given = [b for b in biases if b is not None]
        biased = [i for i, b in enumerate(biases) if b is not None]
        products = scaled(
            _NAME,
            group,
            {"out": out, "main_grad": main_grad, "return_gathered": return_gathered or None},
            lambda at: (x, weights, given, biased, x_scale, scales, at, sizes),
            out_dtype,
            algorithm,
            gather_dim,
        )
        return products if listed else products[0]
    x, *operands = casts(x, *weights, *biases)
    weights, biases = operands[: len(weights)], operands[len(weights) :]
    into = None
    if main_grad is not None:
        into = told(_NAME, group, main_grads_of, weights, main_grad, out)
    ws = list(weights) if into is None else without_gradient(weights, into)
    given = [b for b in biases if b is not None]
    biased = [i for i, b in enumerate(biases) if b is not None]
    if out is not None:
        return invoke(
            _INTO,
            group,
            lambda at: (x, ws, given, biased, at, gather_dim, sizes, algorithm),
            told(_NAME, group, _without_gathered, out, return_gathered),
        )
    keep = save_gathered and any(isinstance(w, Tensor) and w.requires_grad for w in weights)
    keep = return_gathered or (keep and torch.is_grad_enabled())
    results = invoke(
        _OP,
        group,
        lambda at: (x, ws, given, biased, at, gather_dim, sizes, keep, save_gathered, algorithm),
    )
    ys = results[: len(weights)]
    if into is not None:
        if keep:
            ys = behind(ys, weights, results[-1], into)
        else:
            ys = behind(ys, weights, x, into, (group_name(group), gather_dim, sizes))
    y = ys if listed else ys[0]
    return (y, results[-1]) if return_gathered else y
