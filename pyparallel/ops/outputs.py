"""Results that go into tensors of the caller's: `out=`, and the ops that end in an underscore.

torch.library wants to know what an op writes, and an op with a derivative may write nothing: so
each op with `out=` has a twin NAME_out that gives nothing back. Neither has a derivative.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyparallel.comm.tensors import overlap, repeats
from pyparallel.errors import InvalidArgument
from pyparallel.ops.library import define

__all__ = ["check_like", "check_written", "define_out", "listed", "put"]


def check_written(written: dict[str, Tensor], read: dict[str, Any]) -> None:
    """What is written can be, is none of what is read, and needs no gradient."""
    texts = []
    grad = torch.is_grad_enabled()
    inputs = {name: x for name, x in read.items() if isinstance(x, Tensor)}
    for name, x in {**inputs, **written}.items():
        if isinstance(x, Tensor) and grad and x.requires_grad:
            texts.append(
                f"{name} requires grad, and what is written in place has no derivative; call it "
                "under torch.no_grad(), or the form that gives a new tensor"
            )
    for name, out in written.items():
        if not isinstance(out, Tensor):
            texts.append(f"{name} is a {type(out).__name__}; expected a torch.Tensor")
            continue
        if repeats(out):
            texts.append(
                f"{name} has an element at two places (shape {list(out.shape)}, strides "
                f"{list(out.stride())}), as an expanded tensor: it cannot be written"
            )
        for other, x in inputs.items():
            if other != name and x.device == out.device and overlap(out, x):
                texts.append(f"{name} shares memory with {other}; pass one of its own")
    tensors = {name: out for name, out in written.items() if isinstance(out, Tensor)}
    for (name, out), (other, x) in itertools.combinations(tensors.items(), 2):
        if out.device == x.device and repeats(out, x) and not (repeats(out) or repeats(x)):
            texts.append(f"{name} shares memory with {other}; pass one of its own")
    if texts:
        raise InvalidArgument("; ".join(texts))


def define_out(name: str, arguments: str, run: Callable[..., Any]) -> None:
    """Defines NAME_out(arguments, Tensor(a!)[] out): as `run`, whose results go into `out`."""

    def into(*args: Any) -> None:
        *given, outs = args
        put(outs, run(*given))

    define(f"{name}_out({arguments}, Tensor(a!)[] out) -> ()", into, lambda *args: None)


def check_like(outs: dict[str, Tensor], shapes: Sequence[Sequence[int]], x: Tensor) -> None:
    """`outs` are of these shapes, and of the dtype and device of `x`."""
    texts = []
    if len(outs) != len(shapes):
        texts.append(f"out has {len(outs)} tensors for {len(shapes)} results")
    for (name, out), shape in zip(outs.items(), shapes, strict=False):
        if list(out.shape) != list(shape):
            texts.append(f"{name} has shape {list(out.shape)}; expected {list(shape)}")
        if (out.dtype, out.device) != (x.dtype, x.device):
            texts.append(
                f"{name} is {out.dtype} on {out.device}; expected {x.dtype} on {x.device}, as x"
            )
    if texts:
        raise InvalidArgument("; ".join(texts))


def put(outs: Sequence[Tensor], results: Any) -> None:
    """The results into `outs`, where they do not lie there yet."""
    for out, result in zip(outs, listed(results), strict=True):
        if result is not out:
            out.copy_(result)


def listed(tensors: Any) -> list[Tensor]:
    """One tensor, or several, as a list."""
    if isinstance(tensors, Tensor):
        return [tensors]
    try:
        return list(tensors)
    except TypeError:
        raise InvalidArgument(
            f"out is a {type(tensors).__name__}; expected a torch.Tensor, or a list of them"
        ) from None
