"""Weight gradients that go into a buffer of the caller's instead of `.grad`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyparallel.errors import InvalidArgument
from pyparallel.ops.groups import seat_of

__all__ = ["into_main_grad"]


class _Into(torch.autograd.Function):
    """The weight as it is; its gradient is added to `buffer` and goes no further."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, buffer: Tensor) -> Tensor:
        ctx.buffer = buffer
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> tuple[None, None]:  # type: ignore[override]
        ctx.buffer.add_(dw)
        return None, None


def into_main_grad(
    op: str, group: Any, weights: Sequence[Tensor], buffers: "Tensor | Sequence[Tensor | None]"
) -> list[Tensor]:
    """The weights, with those that have a buffer sending their gradients there."""
    given = [buffers] if isinstance(buffers, Tensor) else list(buffers)
    try:
        if len(given) != len(weights):
            raise InvalidArgument(
                f"main_grad has {len(given)} entries for {len(weights)} weights; pass one for each"
            )
        for weight, buffer in zip(weights, given, strict=True):
            if buffer is None:
                continue
            if buffer.shape != weight.shape or buffer.device != weight.device:
                raise InvalidArgument(
                    f"main_grad has shape {list(buffer.shape)} on {buffer.device}, its weight "
                    f"{list(weight.shape)} on {weight.device}; pass a buffer like the weight"
                )
            if buffer.requires_grad or buffer.dtype not in (torch.float32, torch.float64):
                raise InvalidArgument(
                    f"main_grad has dtype {buffer.dtype}, requires_grad {buffer.requires_grad}; "
                    "expected a float32 (or float64) buffer that requires none"
                )
    except Exception as error:
        raise seat_of(group).refused(op, error) from None
    return [
        weight if buffer is None else _Into.apply(weight, buffer)  # type: ignore[no-untyped-call]
        for weight, buffer in zip(weights, given, strict=True)
    ]
