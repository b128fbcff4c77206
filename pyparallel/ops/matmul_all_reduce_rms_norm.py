"""matmul_all_reduce with residual add and RMSNorm as its epilogue.

Kernel: triton_kernels/gemm_all_reduce.py.

    forward   h = sum_r x_r @ w_r^T + b + residual      y = rms_norm(h)
    backward  that of all_reduce_rms_norm, then that of matmul_all_reduce with dy = dh

Saved: x, w, h and the norm's weight. Backward communicates nothing.
"""

from typing import Any

from torch import Tensor

from pyparallel.ops.all_reduce_rms_norm import check_norm, rms_norm_backward
from pyparallel.ops.autocast import casts
from pyparallel.ops.checks import Misfits, check_algorithm, check_floats, check_linear
from pyparallel.ops.device_path import NormOf
from pyparallel.ops.dispatch import Operation, announced, invoke, told
from pyparallel.ops.groups import key_of, seat_of
from pyparallel.ops.library import define, matmul, rows_of
from pyparallel.ops.main_grad import MainGrad, behind, main_grads_of, without_gradient
from pyparallel.ops.matmul_all_reduce import known_plan, planned, summed_product

__all__ = ["matmul_all_reduce_rms_norm"]

_NAME = "matmul_all_reduce_rms_norm"


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    group: Any,
    algorithm: Any,
) -> None:
    misfits = Misfits()
    check_algorithm(algorithm, misfits)
    named = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    check_floats({**named, "norm_weight": norm_weight}, misfits)
    misfits.raise_any()
    if x.dim() == 0:
        misfits.add("x is 0-dimensional; expected [..., K]")
    misfits.raise_any()
    text = f"x has K = {x.shape[-1]} (shape {list(x.shape)})"
    check_linear(x.shape[-1], weight, bias, misfits, x_text=text)
    misfits.raise_any()
    shape = (*x.shape[:-1], weight.shape[0])
    check_norm(shape, "the result", residual, norm_weight, eps, misfits, "norm_weight")
    misfits.raise_any()


def _run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    group: Any,
    algorithm: str | None,
) -> tuple[Tensor, Tensor]:
    seat = seat_of(group)
    key = key_of(_NAME, x, weight, bias, residual, norm_weight, eps, algorithm)
    plan = known_plan(seat, key)
    if plan is None:
        try:
            _check(x, weight, bias, residual, norm_weight, eps, seat, algorithm)
        except Exception as error:
            raise seat.refused(_NAME, error) from None
        text = f"{_NAME} with {'no ' if bias is None else ''}bias, eps {eps}"
        plan = planned(seat, key, x, weight, algorithm, text)
    norm = NormOf(residual.reshape(-1, weight.shape[0]), norm_weight, eps)
    y, h = summed_product(seat, x, weight, bias, norm, plan)
    assert h is not None
    return y, h


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    group: str,
    algorithm: str | None,
) -> tuple[Tensor, Tensor]:
    _check(x, weight, bias, residual, norm_weight, eps, group, algorithm)
    shape = (*x.shape[:-1], weight.shape[0])
    return x.new_empty(shape), x.new_empty(shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, _, norm_weight, ctx.eps, _, _ = inputs
    ctx.save_for_backward(x, weight, output[1], norm_weight)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, dh: Tensor | None) -> tuple[Any, ...]:
    x, weight, h, norm_weight = ctx.saved_tensors
    needs_x, needs_w, needs_b = ctx.needs_input_grad[:3]
    d_sum, d_norm = rms_norm_backward(h, norm_weight, ctx.eps, dy, dh)
    if d_sum is None:
        return (None,) * 8
    rows = rows_of(d_sum)
    dx = matmul(d_sum, weight) if needs_x else None
    dw = matmul(rows.t(), rows_of(x)) if needs_w else None
    return dx, dw, rows.sum(0) if needs_b else None, d_sum, d_norm, None, None, None


define(
    f"{_NAME}(Tensor x, Tensor weight, Tensor? bias, Tensor residual, Tensor norm_weight, "
    "float eps, str group, str? algorithm) -> (Tensor, Tensor)",
    _run,
    _fake,
    _backward,
    _setup_context,
)
_OP = Operation(_NAME, _run, _check)


@announced
def matmul_all_reduce_rms_norm(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    group: Any,
    bias: Tensor | None = None,
    *,
    algorithm: str | None = None,
    main_grad: "Tensor | MainGrad | None" = None,
) -> tuple[Tensor, Tensor]:
    """`h = matmul_all_reduce(x, weight, bias) + residual` and its RMSNorm; gives (normed, h).

    Collective. Arguments as in `matmul_all_reduce` and `all_reduce_rms_norm`: residual [..., N]
    and norm_weight [N] are alike on all ranks, and added or applied once. Both results [..., N] are
    the same bits on every rank.

    Raises:
        ValueError: on every rank, where one rank's arguments cannot work or ranks disagree.
    """
    x, weight, bias, residual, norm_weight = casts(x, weight, bias, residual, norm_weight)
    into = None
    if main_grad is not None:
        into = told(_NAME, group, main_grads_of, [weight], main_grad)
    w = weight if into is None else without_gradient([weight], into)[0]
    if into is not None and isinstance(residual, Tensor):
        # The gradient of the residual is that of the sum, which the weight's is made of.
        (residual,) = behind([residual], [weight], x, into)
    both: tuple[Tensor, Tensor] = invoke(
        _OP, group, lambda at: (x, w, bias, residual, norm_weight, eps, at, algorithm)
    )
    return both
