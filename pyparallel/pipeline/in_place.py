"""Linear layers of a stage, whose weight gradients are multiplied straight into those of the
microbatches before.

    autograd     g = dy^T x;  w.grad += g       writes g, reads it, reads and writes w.grad
    here         w.grad += dy^T x               one product, that reads and writes w.grad

A microbatch has few rows, so its product is a small one for the bytes it gives: with 64 rows of
1024 that addition, and memory new to the process for each g, are a quarter of a layer's backward.
The other two products are the core's (comm/products.py).

Only in the executor's own backwards, and where nobody could tell: a weight with hooks, of a
subclass, in a compiled or a wrapped stage, or asked for by `torch.autograd.grad`, goes autograd's
way.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.functional import linear
from torch.nn.parallel import DistributedDataParallel

from pyparallel.comm.products import biased_product, times_weight
from pyparallel.pipeline.compiled import is_compiled

__all__ = ["adding", "layers_in_place"]

_LARGE = 1 << 17  # bytes of a weight: below, calling a function in Python costs what it saves

_adding = 0  # backwards under way whose weight gradients are added to `.grad`


@contextlib.contextmanager
def adding() -> Iterator[None]:
    """Around a whole backward. Device threads of the engine see it too."""
    global _adding
    _adding += 1
    try:
        yield
    finally:
        _adding -= 1


@contextlib.contextmanager
def layers_in_place(modules: Iterable[nn.Module]) -> Iterator[None]:
    """While it lasts, large linear layers of these modules multiply into `.grad`."""
    changed = [
        layer
        for module in modules
        if not is_compiled(module) and not _is_wrapped(module)
        for layer in module.modules()
        if type(layer) is nn.Linear and "forward" not in vars(layer) and _large(layer.weight)
    ]
    try:
        for layer in changed:
            layer.forward = functools.partial(_forward, layer)  # type: ignore[method-assign]
        yield
    finally:
        for layer in changed:
            vars(layer).pop("forward", None)


def _is_wrapped(module: nn.Module) -> bool:
    return any(isinstance(inner, DistributedDataParallel) for inner in module.modules())


def _large(weight: Tensor) -> bool:
    return type(weight) is nn.Parameter and weight.nbytes >= _LARGE


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    weight = layer.weight
    if (
        type(x) is not Tensor
        or type(weight) is not nn.Parameter
        or not weight.requires_grad
        or not torch.is_grad_enabled()
        or x.dtype != weight.dtype
        or torch.is_autocast_enabled(x.device.type)
        or weight._backward_hooks
        or getattr(weight, "_post_accumulate_grad_hooks", None)
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch.compiler.is_compiling()
    ):
        return linear(x, weight, layer.bias)
    return cast(Tensor, _Linear.apply(x, weight, layer.bias))  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.leaf = weight  # hooks on saved tensors may give back a copy
        return biased_product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = gradients
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        dx = _product(dy, weight) if for_x else None
        rows = dy.reshape(-1, dy.shape[-1])
        dw = _weight_gradient(ctx.leaf, rows, x.reshape(-1, x.shape[-1])) if for_weight else None
        return dx, dw, rows.sum(0) if for_bias else None


def _weight_gradient(weight: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
    """For autograd to add, or None where it has been added."""
    into = weight.grad
    if (
        not _adding
        or type(into) is not Tensor
        or into.layout is not torch.strided
        or into.dtype != dy.dtype
    ):
        return _product(dy.t(), x)
    into.addmm_(dy.t(), x)
    return None


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, by the core where nobody differentiates it."""
    if torch.is_grad_enabled():
        return a @ b
    product: Tensor = times_weight(a, b.t())
    return product
