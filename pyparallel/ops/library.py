"""The ops as torch sees them: schemas in `torch.ops.pyparallel`, and when a call may skip them.

Each op file gives its schema, the function that runs on real tensors, the one that makes fake
tensors of the same shapes and strides, and its derivative. Autograd, torch.compile and tensor
subclasses go through torch's dispatcher; a plain call that none of them watches runs directly,
which saves some 20 us of Python.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pyparallel.comm.products import times_weight
from pyparallel.errors import Unsupported

__all__ = ["define", "is_direct", "is_real", "library_op", "matmul", "rows_of"]

_LIBRARY = torch.library.Library("pyparallel", "FRAGMENT")
_PLAIN = (Tensor, torch.nn.Parameter)


def define(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
) -> None:
    """Defines one op. Without `backward` it is not differentiable."""
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.split("(", 1)[0]
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, run, key)
    torch.library.register_fake(f"pyparallel::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(
            f"pyparallel::{name}", backward, setup_context=setup_context, lib=_LIBRARY
        )


def library_op(name: str) -> Callable[..., Any]:
    """`torch.ops.pyparallel.NAME.default`."""
    op: Callable[..., Any] = getattr(torch.ops.pyparallel, name).default
    return op


def is_direct(*tensors: Any) -> bool:
    """Whether nothing but the caller watches this call: no autograd, tracing, or subclass.

    So it is for what is no tensor, or a DTensor, which the op's own checks refuse in words.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    if forward_ad._current_level >= 0:
        _refuse_tangents(tensors)
    grad = torch.is_grad_enabled()
    for x in tensors:
        if not isinstance(x, Tensor) or type(x).__name__ == "DTensor":
            continue
        if type(x) not in _PLAIN or (grad and x.requires_grad):
            return False
    return torch._C._functorch.peek_interpreter_stack() is None


def is_real(x: Tensor) -> bool:
    """Whether it is what it says, on its device: no fake, no subclass, nothing traced."""
    return type(x) in _PLAIN and not torch._C._len_torch_dispatch_stack()


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for a derivative, b being a matrix: in float32 by the core, where only this call sees
    the tensors."""
    if a.dtype is torch.float32 and is_direct(a, b):
        product: Tensor = times_weight(a, b.t())
        return product
    return a @ b


def _refuse_tangents(tensors: Sequence[Any]) -> None:
    """An error for dual tensors: torch would drop the tangent, and a derivative would be zero."""
    for x in tensors:
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise Unsupported(
                f"an operand of shape {list(x.shape)} has a forward-mode tangent (jvp), and no op "
                "of a group has a forward-mode derivative; use backward, or vjp"
            )


def rows_of(x: Tensor) -> Tensor:
    """`x` [..., K] as [rows, K]. K may be 0 (a rank without features): reshape(-1, 0) fails."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])
