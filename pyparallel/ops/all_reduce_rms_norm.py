"""Sum over ranks, residual add and RMSNorm in one pass.

With partial sums x [..., N], and residual [..., N], weight [N] alike on all ranks:

    forward   h = all_reduce(x) + residual      r = 1 / sqrt(mean(h^2) + eps)      y = h r weight
              (Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, eq. 4)
    backward  g = dy weight
              dh = dh_given + r (g - h r^2 mean(g h))
              dx = dresidual = dh         h is replicated, so its gradient is, and passes as it is
              dweight = sum of the rows of dy h r

Saved: h and weight. Arithmetic is in float32 (float64 for float64); h and y are rounded once each,
and y is made of the h that is given back.
"""

from typing import Any

import torch
from torch import Tensor

from pyparallel.ops.checks import Misfits, check_floats
from pyparallel.ops.dispatch import Operation, announced, invoke
from pyparallel.ops.groups import seat_of
from pyparallel.ops.library import define
from pyparallel.ops.outputs import check_written

__all__ = ["all_reduce_rms_norm", "all_reduce_rms_norm_"]

_NAME = "all_reduce_rms_norm"


def check_norm(
    shape: "tuple[int, ...] | torch.Size",
    what: str,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    misfits: Misfits,
    weight_name: str = "weight",
) -> None:
    """residual is like the sum (of `shape`, called `what`), weight [N], eps positive."""
    if residual.shape != shape:
        misfits.add(f"residual has shape {list(residual.shape)}; expected {list(shape)}, as {what}")
    if len(shape) == 0:
        misfits.add(f"{what} is 0-dimensional; expected [..., N]")
    elif tuple(weight.shape) != (shape[-1],):
        misfits.add(
            f"{weight_name} has shape {list(weight.shape)}; expected [{shape[-1]}], the last dim "
            f"of {what} (shape {list(shape)})"
        )
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not eps >= 0:
        misfits.add(f"eps is {eps!r}; expected a number, at least 0")


def _check(x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: Any) -> None:
    misfits = Misfits()
    check_floats({"x": x, "residual": residual, "weight": weight}, misfits)
    misfits.raise_any()
    check_norm(x.shape, "x", residual, weight, eps, misfits)
    misfits.raise_any()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def rms_norm(h: Tensor, weight: Tensor, eps: float) -> Tensor:
    """h r weight, as the head of this file has it."""
    wide = h.to(_wide(h.dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.to(wide.dtype)).to(h.dtype)


def rms_norm_backward(
    h: Tensor, weight: Tensor, eps: float, dy: Tensor | None, dh: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of h and of the weight, from those of y and of h as it was given out."""
    if dy is None:
        return dh, None
    wide = h.to(_wide(h.dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = wide * scale
    dy_wide = dy.to(wide.dtype)
    g = dy_wide * weight.to(wide.dtype)
    d_sum = scale * (g - normed * (g * normed).mean(-1, keepdim=True))
    if dh is not None:
        d_sum = d_sum + dh
    d_weight = (dy_wide * normed).reshape(-1, h.shape[-1]).sum(0)
    return d_sum.to(h.dtype), d_weight.to(weight.dtype)


def _run(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: Any
) -> tuple[Tensor, Tensor]:
    seat = seat_of(group)
    try:
        _check(x, residual, weight, eps, seat)
    except Exception as error:
        raise seat.refused(_NAME, error) from None
    engine = seat.engine_of(x)
    engine.note(f"{_NAME} of x {list(x.shape)} {x.dtype}, eps {eps}")
    h = engine.all_reduce(x.detach().clone(memory_format=torch.contiguous_format), "sum")
    h += residual
    return rms_norm(h, weight, eps), h


def _fake(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: str
) -> tuple[Tensor, Tensor]:
    _check(x, residual, weight, eps, group)
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.eps = inputs[3]
    ctx.save_for_backward(output[1], inputs[2])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, dh: Tensor | None) -> tuple[Any, ...]:
    h, weight = ctx.saved_tensors
    d_sum, d_weight = rms_norm_backward(h, weight, ctx.eps, dy, dh)
    return d_sum, d_sum, d_weight, None, None


define(
    f"{_NAME}(Tensor x, Tensor residual, Tensor weight, float eps, str group) -> (Tensor, Tensor)",
    _run,
    _fake,
    _backward,
    _setup_context,
)
_OP = Operation(_NAME, _run, _check)


def _run_in_place(x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: Any) -> None:
    seat = seat_of(group)
    try:
        _check(x, residual, weight, eps, seat)
        check_written({"x": x, "residual": residual}, {"weight": weight})
        check_written({"x": x}, {"residual": residual})
    except Exception as error:
        raise seat.refused(f"{_NAME}_", error) from None
    normed, h = _run(x, residual, weight, eps, group)
    x.copy_(normed)
    residual.copy_(h)


define(
    f"{_NAME}_(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps, str group) -> ()",
    _run_in_place,
    lambda x, residual, weight, eps, group: None,
)
_IN_PLACE = Operation(f"{_NAME}_", _run_in_place, _check, writes=True)


@announced
def all_reduce_rms_norm_(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: Any
) -> tuple[Tensor, Tensor]:
    """As `all_reduce_rms_norm`, in place: x becomes the norm, residual the sum. Gives both.

    Without derivative.
    """
    invoke(_IN_PLACE, group, lambda at: (x, residual, weight, eps, at))
    return x, residual


@announced
def all_reduce_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: Any
) -> tuple[Tensor, Tensor]:
    """`h = all_reduce(x) + residual` and its RMSNorm. Collective; gives (normed, h).

    Args:
        x: [..., N], this rank's partial sums, any strides; float64, float32, float16 or bfloat16.
        residual: like x, alike on all ranks; it is added once.
        weight: [N], of the norm, alike on all ranks.
        eps: added to the mean of squares.
        group: see `pyparallel.ops`.

    Returns:
        Both [..., N], the same bits on every rank, where the inputs that should be alike are.

    Raises:
        ValueError: on every rank, where one rank's arguments cannot work or ranks disagree.
    """
    both: tuple[Tensor, Tensor] = invoke(_OP, group, lambda at: (x, residual, weight, eps, at))
    return both
