"""Weight gradients that are added to a buffer of the caller's instead of `.grad`.

    buffer += dy^T x      in the buffer's dtype: 16-bit operands are multiplied in float32 and the
                          product is never rounded to 16 bits, as a weight's own `.grad` would be

The op then runs on a weight without gradient, and a node of its own takes dy where it passes:
behind the product (dy is the gradient of y), or before the residual of a norm (dy is that of the
sum).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyparallel.errors import InvalidArgument
from pyparallel.ops.library import library_op, rows_of

__all__ = ["MainGrad", "behind", "main_grads_of", "without_gradient"]

_WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True)
class MainGrad:
    """Where one weight's gradient goes.

    before: what is done, in place, to the gradient of this call before it is added (a layer sums
    those of copies, and clears that of padding).
    """

    buffer: Tensor
    before: Callable[[Tensor], None] | None = None

    def add(self, dy_rows: Tensor, x_rows: Tensor) -> None:
        """buffer += dy^T x, of [rows, N] and [rows, K]."""
        if self.before is None and dy_rows.device.type == "cpu":
            self.buffer.addmm_(dy_rows.to(self.buffer.dtype).t(), x_rows.to(self.buffer.dtype))
            return
        if dy_rows.device.type == "cpu" or dy_rows.dtype in _WIDE:
            product = dy_rows.to(self.buffer.dtype).t() @ x_rows.to(self.buffer.dtype)
        else:  # a GEMM that accumulates in float32 anyway, and keeps what it has
            product = torch.mm(dy_rows.t(), x_rows, out_dtype=torch.float32)
        if self.before is not None:
            self.before(product)
        self.buffer.add_(product)


def main_grads_of(
    weights: Sequence[Tensor], given: Any, out: Any = None
) -> "list[MainGrad | None] | None":
    """What the argument `main_grad` means for these weights, None without it.

    Raises where it does not fit, or cannot go with `out`.
    """
    if given is None:
        return None
    if out is not None:
        raise InvalidArgument("main_grad does not go with out=, which has no derivative")
    listed = [given] if isinstance(given, (Tensor, MainGrad)) else given
    if not isinstance(listed, (list, tuple)):
        raise InvalidArgument(
            f"main_grad is a {type(given).__name__}; expected a torch.Tensor, or a list of them"
        )
    if len(listed) != len(weights):
        raise InvalidArgument(
            f"main_grad has {len(listed)} entries for {len(weights)} weights; pass one for each"
        )
    return [_main_grad(weight, one) for weight, one in zip(weights, listed, strict=True)]


def _main_grad(weight: Any, given: Any) -> "MainGrad | None":
    if given is None or not isinstance(weight, Tensor):  # the op says what is no weight
        return None
    into = given if isinstance(given, MainGrad) else MainGrad(given)
    buffer = into.buffer
    if not isinstance(buffer, Tensor):
        raise InvalidArgument(
            f"main_grad is a {type(buffer).__name__}; expected a torch.Tensor like the weight"
        )
    if buffer.shape != weight.shape or buffer.device != weight.device:
        raise InvalidArgument(
            f"main_grad has shape {list(buffer.shape)} on {buffer.device}, its weight "
            f"{list(weight.shape)} on {weight.device}; pass a buffer like the weight"
        )
    if buffer.requires_grad or buffer.dtype not in _WIDE:
        raise InvalidArgument(
            f"main_grad has dtype {buffer.dtype}, requires_grad {buffer.requires_grad}; "
            "expected a float32 (or float64) buffer that requires none"
        )
    return into


def without_gradient(weights: Sequence[Tensor], into: "Sequence[MainGrad | None]") -> list[Tensor]:
    """The weights for the op: those whose gradient goes into a buffer are detached."""
    return [w if m is None else w.detach() for w, m in zip(weights, into, strict=True)]


class _Behind(torch.autograd.Function):
    """Results of an op as they are; their gradients make those of its weights on the way back."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gather: "tuple[Any, ...] | None",
        into: "Sequence[MainGrad | None]",
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.gather, ctx.into = gather, into
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return tuple(y.view_as(y) for y in tensors[len(into) :])

    @staticmethod
    def backward(ctx: Any, *dys: "Tensor | None") -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        if ctx.gather is not None:
            x = library_op("all_gather")(x, *ctx.gather)
        rows = rows_of(x)
        for into, dy in zip(ctx.into, dys, strict=True):
            if into is not None and dy is not None:
                into.add(rows_of(dy), rows)
        return None, None, None, *(None for _ in ctx.into), *dys


def behind(
    ys: Sequence[Tensor],
    weights: Sequence[Tensor],
    x: Tensor,
    into: "Sequence[MainGrad | None]",
    gather: "tuple[Any, ...] | None" = None,
) -> "list[Tensor]":
    """`ys`, the products of `x` with `weights`, whose gradients also go through `into`.

    `gather`: `x` is a shard, and what all_gather takes (group, dim, sizes) makes it whole again.
    """
    wanted = [m if w.requires_grad else None for m, w in zip(into, weights, strict=True)]
    if not torch.is_grad_enabled() or not any(wanted):
        return list(ys)
    return list(_Behind.apply(x.detach(), gather, wanted, *weights, *ys))  # type: ignore[no-untyped-call]
