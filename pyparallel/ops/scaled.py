"""The GEMM ops on float8_e4m3fn operands with scales: (x x_scale) @ (weight weight_scale)^T.

    x_scale       float32, one value (tensor-wise) or one for each row of x: x's shape with K = 1
    weight_scale  float32, one value or one for each row of the weight: [N] or [1, N]

The product is summed in float32, scaled, and rounded to out_dtype. For CUDA tensors: fused
kernels, or torch._scaled_mm and the group's collective. Without derivative. Ranks share rows: the
dim that is gathered or scattered is any but the last. The schemas have it first; `scaled` brings
another one there and back.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from pyparallel.errors import InvalidArgument
from pyparallel.ops.checks import (
    Misfits,
    by,
    check_algorithm,
    check_linear,
    own_sizes,
    sizes_of_whole,
)
from pyparallel.ops.device_path import KERNELS
from pyparallel.ops.dispatch import Operation, invoke
from pyparallel.ops.groups import Seat, seat_of
from pyparallel.ops.library import define

__all__ = ["is_scaled", "scaled"]

FP8 = torch.float8_e4m3fn
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def is_scaled(*facts: Any) -> bool:
    """Whether a call is one of these: it has a scale or an out_dtype."""
    return any(fact is not None for fact in facts)


# --- checks


def _check(
    seat: Seat,
    op: str,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    x_scale: Tensor | None,
    weight_scales: Sequence[Tensor | None],
    dim: int,
    out_dtype: torch.dtype,
    algorithm: str | None,
) -> None:
    misfits = Misfits()
    check_algorithm(algorithm, misfits)
    for name, t in [("x", x), *((f"weight[{i}]", w) for i, w in enumerate(weights))]:
        if not isinstance(t, Tensor):
            misfits.add(f"{name} is a {type(t).__name__}; expected a torch.Tensor")
        elif t.dtype is not FP8:
            misfits.add(f"{name} has dtype {t.dtype}; scales and out_dtype go with {FP8}")
    misfits.raise_any()
    if x.dim() < 2 or dim not in (0, -x.dim()):
        misfits.add(f"dim is {dim} of x with shape {list(x.shape)}; scaled products share rows: 0")
    if out_dtype not in OUT_DTYPES:
        misfits.add(f"out_dtype is {out_dtype}; expected one of {', '.join(map(str, OUT_DTYPES))}")
    scales = [x_scale, *weight_scales]
    if len(weight_scales) != len(weights) or not all(isinstance(s, Tensor) for s in scales):
        kinds = ", ".join(type(s).__name__ for s in scales)
        misfits.add(
            f"x_scale and weight_scale are {kinds}; {FP8} operands need a torch.Tensor for x and "
            "one for each weight"
        )
    misfits.raise_any()
    assert x_scale is not None
    _check_scale("x_scale", x_scale, [(*x.shape[:-1], 1), (prod(x.shape[:-1]),)], misfits)
    for w, b, s in zip(weights, biases, weight_scales, strict=True):
        assert s is not None
        if b is not None and not isinstance(b, Tensor):
            misfits.add(f"bias is a {type(b).__name__}; expected a torch.Tensor, or None")
            continue
        check_linear(x.shape[-1], w, b, misfits, x_text=f"x has K = {x.shape[-1]}")
        _check_scale("weight_scale", s, [(w.shape[0],), (1, w.shape[0])], misfits)
    if x.device.type != "cuda" and not seat.is_interpreted(op, algorithm):
        misfits.add(f"x is on {x.device}: {FP8} is multiplied on CUDA devices only")
    misfits.raise_any()


def _check_scale(
    name: str, scale: Tensor, shapes: Sequence[tuple[int, ...]], misfits: Misfits
) -> None:
    if scale.dtype is not torch.float32:
        misfits.add(f"{name} has dtype {scale.dtype}; expected torch.float32")
    if scale.numel() != 1 and tuple(scale.shape) not in shapes:
        rows = " or ".join(str(list(shape)) for shape in shapes)
        misfits.add(f"{name} has shape {list(scale.shape)}; expected one value, or {rows}")


# --- what runs


def _multiply(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """The vendor's product of [M, K] and [N, K], scaled."""
    if x_scale.numel() > 1 or weight_scale.numel() > 1:  # it wants both by rows, or none
        x_scale = x_scale.reshape(-1, 1).expand(x.shape[0], 1).contiguous()
        weight_scale = weight_scale.reshape(1, -1).expand(1, weight.shape[0]).contiguous()
    product: Tensor = torch._scaled_mm(
        x.contiguous(), weight.t(), x_scale, weight_scale, out_dtype=out_dtype
    )
    return product


def _run_all_gather(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    biased: list[int],
    x_scale: Tensor,
    weight_scales: list[Tensor],
    group: str,
    shard_sizes: list[int] | None,
    out_dtype: torch.dtype,
    algorithm: str | None,
) -> list[Tensor]:
    op = "all_gather_matmul"
    seat = seat_of(group)
    spread = _spread(len(weights), biases, biased)
    try:
        _check(seat, op, x, weights, spread, x_scale, weight_scales, 0, out_dtype, algorithm)
        misfits = Misfits()
        sizes = own_sizes(x.shape[0], 0, shard_sizes, seat.rank, seat.world_size, misfits)
        misfits.raise_any()
    except Exception as error:
        raise seat.refused(op, error) from None
    inner, k = prod(x.shape[1:-1]), x.shape[-1]
    rows = [n * inner for n in sizes]
    by_row = x_scale.numel() > 1 or (x.shape[0] * inner == 1 and x_scale.dim() == x.dim())
    note = (
        f"{op} of x {[sum(sizes), *x.shape[1:]]} {x.dtype} gathered from shards {sizes} of dim 0, "
        f"scaled {'by row' if by_row else 'as a whole'}, to {out_dtype}{by(algorithm)}"
    )
    chosen = seat.choose(op, sum(rows), k, x, algorithm, note)
    flat = x.reshape(rows[seat.rank], k)
    scale = x_scale.reshape(-1)
    if chosen in KERNELS[op]:
        products, _ = seat.device_path(x.device).all_gather_matmul(
            flat,
            weights,
            spread,
            rows,
            note,
            chosen,
            x_scale=scale.expand(rows[seat.rank]).contiguous(),
            column_scales=[s.reshape(-1) for s in weight_scales],
            out_dtype=out_dtype,
        )
    else:
        engine = seat.engine_of(x)
        engine.note(note)
        whole = engine.all_gather(flat.view(torch.uint8), 0, rows).view(FP8)
        every = scale.expand(rows[seat.rank]).contiguous()
        engine.note(note)
        every = engine.all_gather(every, 0, rows)
        products = []
        for w, s, b in zip(weights, weight_scales, spread, strict=True):
            product = _multiply(whole, w, every, s, out_dtype)
            products.append(product if b is None else product + b.to(out_dtype))
    return [y.view(sum(sizes), *x.shape[1:-1], y.shape[1]) for y in products]


def _run_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_scale: Tensor,
    weight_scale: Tensor,
    group: str,
    shard_sizes: list[int] | None,
    out_dtype: torch.dtype,
    algorithm: str | None,
) -> Tensor:
    op = "matmul_reduce_scatter"
    seat = seat_of(group)
    try:
        _check(seat, op, x, [weight], [bias], x_scale, [weight_scale], 0, out_dtype, algorithm)
        misfits = Misfits()
        sizes = sizes_of_whole(x.shape[0], 0, shard_sizes, seat.world_size, misfits, "x")
        misfits.raise_any()
    except Exception as error:
        raise seat.refused(op, error) from None
    inner, n = prod(x.shape[1:-1]), weight.shape[0]
    note = (
        f"{op} with {'no ' if bias is None else ''}bias, result {[*x.shape[:-1], n]} {out_dtype} "
        f"scattered to shards {sizes} of dim 0, from {x.dtype}{by(algorithm)}"
    )
    rows = x.shape[0] * inner
    chosen = seat.choose(op, rows, n, x, algorithm, note)
    flat = x.reshape(rows, x.shape[-1])
    if chosen in KERNELS[op]:
        shard = seat.device_path(x.device).matmul_reduce_scatter(
            flat,
            weight,
            bias,
            [size * inner for size in sizes],
            note,
            scales=(x_scale.reshape(-1), weight_scale.reshape(-1)),
            out_dtype=out_dtype,
        )
    else:
        partial = _multiply(flat, weight, x_scale, weight_scale, out_dtype)
        engine = seat.engine_of(x)
        engine.note(note)
        shard = engine.reduce_scatter(partial, 0, [size * inner for size in sizes])
        if bias is not None:
            shard += bias
    return shard.view(sizes[seat.rank], *x.shape[1:-1], n)


def _run_all_reduce(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_scale: Tensor,
    weight_scale: Tensor,
    group: str,
    out_dtype: torch.dtype,
    algorithm: str | None,
) -> Tensor:
    op = "matmul_all_reduce"
    seat = seat_of(group)
    try:
        _check(seat, op, x, [weight], [bias], x_scale, [weight_scale], 0, out_dtype, algorithm)
    except Exception as error:
        raise seat.refused(op, error) from None
    n, rows = weight.shape[0], prod(x.shape[:-1])
    note = (
        f"{op} with {'no ' if bias is None else ''}bias, result {[*x.shape[:-1], n]} {out_dtype} "
        f"from {x.dtype}{by(algorithm)}"
    )
    chosen = seat.choose(op, rows, n, x, algorithm, note)
    flat = x.reshape(rows, x.shape[-1])
    if chosen in KERNELS[op]:
        y, _ = seat.device_path(x.device).matmul_all_reduce(
            flat,
            weight,
            bias,
            None,
            note,
            chosen,
            scales=(x_scale.reshape(-1), weight_scale.reshape(-1)),
            out_dtype=out_dtype,
        )
    else:
        partial = _multiply(flat, weight, x_scale, weight_scale, out_dtype)
        engine = seat.engine_of(x)
        engine.note(note)
        y = engine.all_reduce(partial, "sum")
        if bias is not None:
            y += bias
    return y.view(*x.shape[:-1], n)


def _spread(count: int, biases: Sequence[Tensor], biased: Sequence[int]) -> list[Tensor | None]:
    spread: list[Tensor | None] = [None] * count
    for i, bias in zip(biased, biases, strict=True):
        spread[i] = bias
    return spread


# --- schemas and fakes


def _fake_all_gather(
    x: Tensor, weights: list[Tensor], biases: Any, biased: Any, x_scale: Any, weight_scales: Any,
    group: str, shard_sizes: list[int] | None, out_dtype: torch.dtype, algorithm: Any,
) -> list[Tensor]:  # fmt: skip
    world = seat_of(group).world_size
    rows = x.shape[0] * world if shard_sizes is None else sum(shard_sizes)
    return [x.new_empty((rows, *x.shape[1:-1], w.shape[0]), dtype=out_dtype) for w in weights]


def _fake_reduce_scatter(
    x: Tensor, weight: Tensor, bias: Any, x_scale: Any, weight_scale: Any, group: str,
    shard_sizes: list[int] | None, out_dtype: torch.dtype, algorithm: Any,
) -> Tensor:  # fmt: skip
    seat = seat_of(group)
    rows = x.shape[0] // seat.world_size if shard_sizes is None else shard_sizes[seat.rank]
    return x.new_empty((rows, *x.shape[1:-1], weight.shape[0]), dtype=out_dtype)


define(
    "all_gather_matmul_scaled(Tensor x, Tensor[] weights, Tensor[] biases, int[] biased, "
    "Tensor x_scale, Tensor[] weight_scales, str group, SymInt[]? shard_sizes, "
    "ScalarType out_dtype, str? algorithm) -> Tensor[]",
    _run_all_gather,
    _fake_all_gather,
)
define(
    "matmul_reduce_scatter_scaled(Tensor x, Tensor weight, Tensor? bias, Tensor x_scale, "
    "Tensor weight_scale, str group, SymInt[]? shard_sizes, ScalarType out_dtype, "
    "str? algorithm) -> Tensor",
    _run_reduce_scatter,
    _fake_reduce_scatter,
)
define(
    "matmul_all_reduce_scaled(Tensor x, Tensor weight, Tensor? bias, Tensor x_scale, "
    "Tensor weight_scale, str group, ScalarType out_dtype, str? algorithm) -> Tensor",
    _run_all_reduce,
    lambda x, weight, bias, x_scale, weight_scale, group, out_dtype, algorithm: x.new_empty(
        (*x.shape[:-1], weight.shape[0]), dtype=out_dtype
    ),
)


# --- what the public functions call


def _checked(op: str, *args: Any) -> None:
    """`_check` of the arguments of a schema."""
    if op == "all_gather_matmul":
        x, weights, biases, biased, x_scale, scales, group, _, out_dtype, algorithm = args
        spread = _spread(len(weights), biases, biased)
    else:
        x, weight, bias, x_scale, scale, group, *_, out_dtype, algorithm = args
        weights, spread, scales = [weight], [bias], [scale]
    seat = seat_of(group)
    _check(seat, op, x, weights, spread, x_scale, scales, 0, out_dtype, algorithm)


_OPERATIONS = {
    op: Operation(f"{op}_scaled", run, partial(_checked, op), shown=op)
    for op, run in (
        ("all_gather_matmul", _run_all_gather),
        ("matmul_reduce_scatter", _run_reduce_scatter),
        ("matmul_all_reduce", _run_all_reduce),
    )
}


def scaled(
    op: str,
    group: Any,
    without: dict[str, Any],
    first: Callable[[Any], tuple[Any, ...]],
    out_dtype: "torch.dtype | None",
    algorithm: str | None,
    dim: int = 0,
) -> Any:
    """The op of that name with scales; `first` gives what its schema has before out_dtype.

    `without`: arguments that do not go together with scales, where they are given. `dim`: of x,
    that is gathered or scattered.
    """

    def prepare(at: Any) -> tuple[Any, ...]:
        names = [name for name, value in without.items() if value is not None]
        if names:
            raise InvalidArgument(f"with scales or out_dtype there is no {', '.join(names)}")
        given = first(at)
        if isinstance(given[0], Tensor) and dim not in (0, -given[0].dim()):
            given = _brought_first(given, dim, 4 if op == "all_gather_matmul" else 3)
        return (*given, out_dtype or torch.bfloat16, algorithm)

    results = invoke(_OPERATIONS[op], group, prepare)
    if isinstance(results, Tensor):
        return _put_back(results, dim)
    return [_put_back(y, dim) for y in results]


def _brought_first(given: tuple[Any, ...], dim: Any, at_scale: int) -> tuple[Any, ...]:
    """The arguments with `dim` of x, and of the scales of its rows, moved to the front."""
    x, scale = given[0], given[at_scale]
    last = x.dim() - 1
    fits = isinstance(dim, int) and not isinstance(dim, bool)
    if not fits or not -last - 1 <= dim < last or dim == -1:
        raise InvalidArgument(
            f"dim is {dim!r} of x with shape {list(x.shape)}; scaled products share rows: expected "
            f"0 to {last - 1}"
        )
    moved = list(given)
    moved[0] = x.movedim(dim, 0)
    if isinstance(scale, Tensor) and scale.numel() > 1 and scale.numel() * x.shape[-1] == x.numel():
        moved[at_scale] = scale.reshape(*x.shape[:-1], 1).movedim(dim, 0)
    return tuple(moved)


def _put_back(y: Tensor, dim: int) -> Tensor:
    return y if dim in (0, -y.dim()) else y.movedim(0, dim).contiguous()
