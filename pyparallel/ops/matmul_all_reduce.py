"""Row-parallel GEMM with a replicated result: y = all_reduce(x @ w^T) + b.

Kernel: triton_kernels/gemm_all_reduce.py.

With this rank's columns x [..., K_r] and w [N, K_r]; y [..., N] and its gradient are alike on all
ranks:

    forward   y = sum_r x_r @ w_r^T + b, b once
    dgrad     dx = dy @ w
    wgrad     dw = dy^T @ x
    dbias     db = sum of the rows of dy, alike on all ranks

Saved: x and w. Backward communicates nothing.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor

from pyparallel.comm.products import part_times_weight
from pyparallel.ops.all_reduce_rms_norm import rms_norm
from pyparallel.ops.autocast import casts
from pyparallel.ops.checks import Misfits, by, check_algorithm, check_floats, check_linear
from pyparallel.ops.device_path import KERNELS, NormOf
from pyparallel.ops.dispatch import Operation, announced, invoke, told
from pyparallel.ops.groups import Seat, key_of, seat_of
from pyparallel.ops.host_path import chunk_rows_of
from pyparallel.ops.library import define, matmul, rows_of
from pyparallel.ops.main_grad import MainGrad, behind, main_grads_of, without_gradient
from pyparallel.ops.outputs import define_out
from pyparallel.ops.scaled import is_scaled, scaled

__all__ = ["matmul_all_reduce"]

_NAME = "matmul_all_reduce"


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, group: Any, algorithm: Any) -> None:
    misfits = Misfits()
    check_algorithm(algorithm, misfits)
    check_floats({"x": x, "weight": weight, "bias": bias}, misfits)
    misfits.raise_any()
    if x.dim() == 0:
        misfits.add("x is 0-dimensional; expected [..., K]")
    misfits.raise_any()
    text = f"x has K = {x.shape[-1]} (shape {list(x.shape)})"
    check_linear(x.shape[-1], weight, bias, misfits, x_text=text)
    misfits.raise_any()


def known_plan(seat: Seat, key: tuple[Any, ...]) -> tuple[str, str] | None:
    """The plan of an earlier call like this one, which has been checked."""
    try:
        return seat.plans.get(key)
    except TypeError:  # something that is no tensor, and no key: the checks say what
        return None


def planned(
    seat: Seat, key: tuple[Any, ...], x: Tensor, weight: Tensor, algorithm: str | None, text: str
) -> tuple[str, str]:
    """The algorithm of a checked call, and its note, in which `text` says whose call it is."""
    n = weight.shape[0]
    note = f"{text}, result {[*x.shape[:-1], n]} {x.dtype}{by(algorithm)}"
    return seat.plan(key, _NAME, prod(x.shape[:-1]), n, x, algorithm, note)


def summed_product(
    seat: Seat,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: NormOf | None,
    plan: tuple[str, str],
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The sum over ranks of x @ weight^T, plus bias, and None; `plan` is that of `planned`.

    In `out`, where a copy is saved by that.

    With `norm`: the norm of the sum with bias and residual, and that sum.
    """
    chosen, note = plan
    n = weight.shape[0]
    shape = (*x.shape[:-1], n)
    rows = prod(shape[:-1])
    if chosen == "plain":
        engine = seat.engine_of(x)
        y = part_times_weight(x, weight)
        engine.note(note)
        y = engine.all_reduce(y, "sum", out)
    elif chosen == "signal":
        flat = x.reshape(rows, x.shape[-1])
        y = seat.grouped_path(x).matmul_all_reduce(flat, weight, bias, note).view(shape)
        bias = None  # it has been added
    elif chosen in KERNELS[_NAME]:
        kernels = seat.device_path(x.device)
        y, h = kernels.matmul_all_reduce(
            x.reshape(rows, x.shape[-1]), weight, bias, norm, note, chosen
        )
        return y.view(shape), h if h is None else h.view(shape)
    else:
        path = seat.engine.host_path
        assert path is not None, chosen
        chunk = chunk_rows_of(n, x.dtype) if chosen == "chunked" else rows
        y = path.matmul_all_reduce(x.reshape(rows, x.shape[-1]), weight, note, chunk).view(shape)
    if bias is not None:
        y += bias
    if norm is None:
        return y, None
    y += norm.residual.view(shape)
    return rms_norm(y, norm.weight, norm.eps), y


def _run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: Any,
    algorithm: str | None,
    out: Tensor | None = None,
) -> Tensor:
    seat = seat_of(group)
    key = key_of(_NAME, x, weight, bias, algorithm)
    plan = known_plan(seat, key)
    if plan is None:
        try:
            _check(x, weight, bias, seat, algorithm)
        except Exception as error:
            raise seat.refused(_NAME, error) from None
        text = f"{_NAME} with {'no ' if bias is None else ''}bias"
        plan = planned(seat, key, x, weight, algorithm, text)
    return summed_product(seat, x, weight, bias, None, plan, out)[0]


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, algorithm: str | None
) -> Tensor:
    _check(x, weight, bias, group, algorithm)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_w, needs_b = ctx.needs_input_grad[:3]
    rows = rows_of(dy)
    dx = matmul(dy, weight) if needs_x else None
    dw = matmul(rows.t(), rows_of(x)) if needs_w else None
    return dx, dw, rows.sum(0) if needs_b else None, None, None


define(
    f"{_NAME}(Tensor x, Tensor weight, Tensor? bias, str group, str? algorithm) -> Tensor",
    _run,
    _fake,
    _backward,
    _setup_context,
)
define_out(_NAME, "Tensor x, Tensor weight, Tensor? bias, str group, str? algorithm", _run)
_OP = Operation(
    _NAME, _run, _check, lambda x, weight, *rest: [(*x.shape[:-1], weight.shape[0])], _run
)


@announced
def matmul_all_reduce(
    x: Tensor,
    weight: Tensor,
    group: Any,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    algorithm: str | None = None,
    main_grad: "Tensor | MainGrad | None" = None,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The sum over ranks of `x @ weight.T`, plus `bias`, the same bits on every rank. Collective.

    Args:
        x: [..., K], this rank's columns, any strides, K may differ between ranks; float64, float32,
            float16 or bfloat16.
        weight: [N, K], this rank's columns of the whole weight.
        group: see `pyparallel.ops`.
        bias: [N], the whole bias, alike on all ranks; it is added once.
        out: takes the result, of its shape and dtype, and shares no memory with an input. Without
            derivative.
        algorithm: one of docs/ops.md; by default the one that explain() tells. Alike on all ranks.
        main_grad: float32 [N, K] buffer that the weight gradient is added to; the weight's own
            `.grad` then stays None.
        x_scale, weight_scale: of float8_e4m3fn operands, on CUDA; float32, one value or one for
            each row (see ops/scaled.py). Without derivative.
        out_dtype: of the result of such operands; bfloat16 by default.

    Returns:
        [..., N]. Partial products are rounded to the dtype and then added in rank order (16-bit
        floats in float32, rounded once).

    Raises:
        ValueError: on every rank, where one rank's arguments cannot work or ranks disagree.
    """
    if is_scaled(x_scale, weight_scale, out_dtype):
        total: Tensor = scaled(
            _NAME,
            group,
            {"out": out, "main_grad": main_grad},
            lambda at: (x, weight, bias, x_scale, weight_scale, at),
            out_dtype,
            algorithm,
        )
        return total
    x, weight, bias = casts(x, weight, bias)
    into = None
    if main_grad is not None:
        into = told(_NAME, group, main_grads_of, [weight], main_grad, out)
    w = weight if into is None else without_gradient([weight], into)[0]
    y: Tensor = invoke(_OP, group, lambda at: (x, w, bias, at, algorithm), out)
    return y if into is None else behind([y], [weight], x, into)[0]
