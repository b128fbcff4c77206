"""The plain collectives of tensor parallelism, differentiable, along any dim, for uneven shards.

Two kinds of tensors: a shard is this rank's part, a replicated tensor is alike on all ranks, and so
is its gradient. What each function makes of its input, and of the gradient on the way back:

    function        forward                              backward
    all_gather      shards -> whole                      reduce_scatter (ranks use the whole apart)
    gather          shards -> whole                      own shard      (ranks use it alike)
    reduce_scatter  partial sums -> shard of the sum     all_gather
    all_reduce      partial sums -> sum, replicated      as it is       (Megatron-LM's g)
    replicate       replicated, as it is                 all_reduce     (Megatron-LM's f)
    split           replicated -> own shard              all_gather
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyparallel.ops.checks import (
    Misfits,
    check_floats,
    dim_of,
    listed_sizes,
    own_sizes,
    sizes_of_whole,
)
from pyparallel.ops.dispatch import Operation, announced, invoke, told
from pyparallel.ops.groups import group_name, place_of, seat_of
from pyparallel.ops.library import define, library_op
from pyparallel.ops.outputs import check_written

__all__ = [
    "all_gather",
    "all_reduce",
    "all_reduce_",
    "gather",
    "reduce_scatter",
    "replicate",
    "split",
]

REDUCTIONS = ("sum", "max", "min")


# --- all_gather: y = x_0 | x_1 | ...   dx = reduce_scatter(dy)


def _run_all_gather(x: Tensor, group: Any, dim: int, shard_sizes: Sequence[int] | None) -> Tensor:
    seat = seat_of(group)
    try:
        dim, sizes = _shards_of_shard(x, seat, dim, shard_sizes)
    except Exception as error:
        raise seat.refused("all_gather", error) from None
    whole = [*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :]]
    engine = seat.engine_of(x)
    engine.note(f"all_gather of x {whole} {x.dtype} from shards {sizes} of dim {dim}")
    return engine.all_gather(x.detach(), dim, sizes)


def _shards_of_shard(
    x: Tensor, group: Any, dim: int, shard_sizes: Sequence[int] | None
) -> tuple[int, list[int]]:
    seat = seat_of(group)
    misfits = Misfits()
    check_floats({"x": x}, misfits)
    misfits.raise_any()
    dim = dim_of(dim, x.shape, "dim", "x", misfits)
    misfits.raise_any()
    sizes = own_sizes(x.shape[dim], dim, shard_sizes, seat.rank, seat.world_size, misfits)
    misfits.raise_any()
    return dim, sizes


def _fake_all_gather(x: Tensor, group: str, dim: int, shard_sizes: Sequence[int] | None) -> Tensor:
    dim, sizes = _shards_of_shard(x, group, dim, shard_sizes)
    return x.new_empty((*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :]))


def _keep_dims(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.group, ctx.dim, ctx.shard_sizes = inputs


def _backward_all_gather(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
    dx = library_op("reduce_scatter")(dy, ctx.group, ctx.dim, listed_sizes(ctx.shard_sizes))
    return dx, None, None, None


define(
    "all_gather(Tensor x, str group, int dim, SymInt[]? shard_sizes) -> Tensor",
    _run_all_gather,
    _fake_all_gather,
    _backward_all_gather,
    _keep_dims,
)
_ALL_GATHER = Operation("all_gather", _run_all_gather, _shards_of_shard)


@announced
def all_gather(
    x: Tensor, group: Any, dim: int = 0, shard_sizes: Sequence[int] | None = None
) -> Tensor:
    """All ranks' shards joined along `dim`. Collective; backward: reduce_scatter.

    Use it where each rank goes on with the whole in its own way, as a column-parallel layer does:
    then the whole's gradients differ, and each shard's is their sum. See `gather` for the other.

    Args:
        x: this rank's shard, any strides; float64, float32, float16 or bfloat16.
        group: see `pyparallel.ops`.
        dim: along which the shards are joined; may be negative.
        shard_sizes: every rank's size of `dim`, where they differ.

    Raises:
        ValueError: on every rank, where one rank's arguments cannot work or ranks disagree.
    """
    gathered: Tensor = invoke(
        _ALL_GATHER, group, lambda at: (x, at, dim, listed_sizes(shard_sizes))
    )
    return gathered


# --- reduce_scatter: y = own shard of x_0 + x_1 + ...   dx = all_gather(dy)


def _run_reduce_scatter(
    x: Tensor, group: Any, dim: int, shard_sizes: Sequence[int] | None
) -> Tensor:
    seat = seat_of(group)
    try:
        dim, sizes = _shards_of_whole(x, seat, dim, shard_sizes)
    except Exception as error:
        raise seat.refused("reduce_scatter", error) from None
    engine = seat.engine_of(x)
    engine.note(f"reduce_scatter of x {list(x.shape)} {x.dtype} to shards {sizes} of dim {dim}")
    return engine.reduce_scatter(x.detach(), dim, sizes)


def _shards_of_whole(
    x: Tensor, group: Any, dim: int, shard_sizes: Sequence[int] | None
) -> tuple[int, list[int]]:
    world_size = place_of(group)[1]
    misfits = Misfits()
    check_floats({"x": x}, misfits)
    misfits.raise_any()
    dim = dim_of(dim, x.shape, "dim", "x", misfits)
    misfits.raise_any()
    sizes = sizes_of_whole(x.shape[dim], dim, shard_sizes, world_size, misfits, "x")
    misfits.raise_any()
    return dim, sizes


def _fake_reduce_scatter(
    x: Tensor, group: str, dim: int, shard_sizes: Sequence[int] | None
) -> Tensor:
    seat = seat_of(group)
    dim, sizes = _shards_of_whole(x, group, dim, shard_sizes)
    return x.new_empty((*x.shape[:dim], sizes[seat.rank], *x.shape[dim + 1 :]))


def _backward_reduce_scatter(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
    dx = library_op("all_gather")(dy, ctx.group, ctx.dim, listed_sizes(ctx.shard_sizes))
    return dx, None, None, None


define(
    "reduce_scatter(Tensor x, str group, int dim, SymInt[]? shard_sizes) -> Tensor",
    _run_reduce_scatter,
    _fake_reduce_scatter,
    _backward_reduce_scatter,
    _keep_dims,
)
_REDUCE_SCATTER = Operation("reduce_scatter", _run_reduce_scatter, _shards_of_whole)


@announced
def reduce_scatter(
    x: Tensor, group: Any, dim: int = 0, shard_sizes: Sequence[int] | None = None
) -> Tensor:
    """This rank's shard, along `dim`, of the sum of all ranks' `x`. Collective.

    Backward: all_gather. Values are added in rank order, 16-bit floats in float32 with one
    rounding. Arguments and errors as in `all_gather`; `x` is the whole, and without `shard_sizes`
    its `dim` must divide by the number of ranks.
    """
    shard: Tensor = invoke(
        _REDUCE_SCATTER, group, lambda at: (x, at, dim, listed_sizes(shard_sizes))
    )
    return shard


# --- all_reduce: y = x_0 + x_1 + ...   dx = dy


def _check_all_reduce(x: Tensor, group: Any, op: str) -> None:
    misfits = Misfits()
    check_floats({"x": x}, misfits)
    if op not in REDUCTIONS:
        misfits.add(f"op is {op!r}; expected one of {', '.join(REDUCTIONS)}")
    misfits.raise_any()


def _run_all_reduce(x: Tensor, group: Any, op: str) -> Tensor:
    seat = seat_of(group)
    try:
        _check_all_reduce(x, seat, op)
    except Exception as error:
        raise seat.refused("all_reduce", error) from None
    engine = seat.engine_of(x)
    engine.note(f"all_reduce {op} of x {list(x.shape)} {x.dtype}")
    return engine.all_reduce(x.detach().clone(memory_format=torch.contiguous_format), op)


def _fake_all_reduce(x: Tensor, group: str, op: str) -> Tensor:
    return x.new_empty(x.shape)


def _keep_op(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    if inputs[2] != "sum":
        ctx.mark_non_differentiable(output)


def _backward_all_reduce(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
    return dy, None, None


define(
    "all_reduce(Tensor x, str group, str op) -> Tensor",
    _run_all_reduce,
    _fake_all_reduce,
    _backward_all_reduce,
    _keep_op,
)
_ALL_REDUCE = Operation("all_reduce", _run_all_reduce, _check_all_reduce)


@announced
def all_reduce(x: Tensor, group: Any, op: str = "sum") -> Tensor:
    """The sum ("max", "min") of all ranks' `x`, the same bits on every rank. Collective.

    Backward: the gradient as it is, because what is replicated has its gradient replicated
    (Megatron-LM's g). "max" and "min" are not differentiable. Arguments and errors as in
    `all_gather`.
    """
    reduced: Tensor = invoke(_ALL_REDUCE, group, lambda at: (x, at, op))
    return reduced


def _run_all_reduce_in_place(x: Tensor, group: Any, op: str) -> None:
    seat = seat_of(group)
    try:
        _check_all_reduce(x, seat, op)
        check_written({"x": x}, {})
    except Exception as error:
        raise seat.refused("all_reduce_", error) from None
    engine = seat.engine_of(x)
    engine.note(f"all_reduce {op} of x {list(x.shape)} {x.dtype}")
    engine.all_reduce(x.detach(), op)


define(
    "all_reduce_(Tensor(a!) x, str group, str op) -> ()",
    _run_all_reduce_in_place,
    lambda x, group, op: None,
)
_IN_PLACE = Operation("all_reduce_", _run_all_reduce_in_place, _check_all_reduce, writes=True)


@announced
def all_reduce_(x: Tensor, group: Any, op: str = "sum") -> Tensor:
    """As `all_reduce`, in place, for an `x` of any strides; gives `x`. Without derivative."""
    invoke(_IN_PLACE, group, lambda at: (x, at, op))
    return x


# --- those made of the above


def _check_tensor(x: Any) -> None:
    misfits = Misfits()
    check_floats({"x": x}, misfits)
    misfits.raise_any()


class _Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return library_op("all_reduce")(dy, ctx.name, "sum"), None


@announced
def replicate(x: Tensor, group: Any) -> Tensor:
    """`x` as it is; backward: all_reduce of the gradient (Megatron-LM's f).

    For a replicated `x` that each rank goes on to use with its own shard of a weight. Collective
    in backward only.
    """
    told("replicate", group, _check_tensor, x)
    replicated: Tensor = _Replicate.apply(x, group_name(group))  # type: ignore[no-untyped-call]
    return replicated


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, name: str, dim: int, shard_sizes: Sequence[int] | None
    ) -> Tensor:
        ctx.name, ctx.dim, ctx.shard_sizes = name, dim, shard_sizes
        ctx.own = x.shape[dim]
        gathered: Tensor = library_op("all_gather")(x, name, dim, listed_sizes(shard_sizes))
        return gathered

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        rank, _ = place_of(ctx.name)
        before = rank * ctx.own if ctx.shard_sizes is None else sum(ctx.shard_sizes[:rank])
        return dy.narrow(ctx.dim, before, ctx.own).contiguous(), None, None, None


@announced
def gather(x: Tensor, group: Any, dim: int = 0, shard_sizes: Sequence[int] | None = None) -> Tensor:
    """All ranks' shards joined along `dim`; backward: the own shard of the gradient. Collective.

    Use it where every rank goes on with the whole alike (a model's output, say): its gradient is
    then replicated already, and a sum over ranks would count it once per rank. Arguments and errors
    as in `all_gather`.
    """
    sizes = told("gather", group, listed_sizes, shard_sizes)
    if not torch.compiler.is_compiling():
        told("gather", group, _shards_of_shard, x, group, dim, sizes)
    gathered: Tensor = _Gather.apply(  # type: ignore[no-untyped-call]
        x, group_name(group), dim, sizes
    )
    return gathered


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, dim: int, sizes: list[int]) -> Tensor:
        ctx.name, ctx.dim, ctx.sizes = name, dim, sizes
        rank, _ = place_of(name)
        # A copy: the part is no view that is written through, and torch.compile of 2.11 gives the
        # gradient of a contiguous() that copies nothing as 0.
        part = x.narrow(dim, sum(sizes[:rank]), sizes[rank])
        return part.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return library_op("all_gather")(dy, ctx.name, ctx.dim, ctx.sizes), None, None, None


@announced
def split(x: Tensor, group: Any, dim: int = 0, shard_sizes: Sequence[int] | None = None) -> Tensor:
    """This rank's shard, along `dim`, of a replicated `x`; backward: all_gather.

    Nothing is communicated in forward; a misfit on one rank raises on the others in their next
    call. Arguments and errors as in `reduce_scatter`.
    """
    name = group_name(group)
    dim, sizes = told("split", group, _shards_of_whole, x, name, dim, shard_sizes)
    shard: Tensor = _Split.apply(x, name, dim, sizes)  # type: ignore[no-untyped-call]
    return shard
