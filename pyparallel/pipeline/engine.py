"""Runs of the autograd engine as a pipeline makes them: many and small, with gradients whose shapes
are those of the outputs. torch.autograd's own entries take 30 to 50 us of Python each, to find out
what is known here; a backward in halves makes one for every operation with a weight."""

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge

__all__ = ["accumulate", "gradients_of", "python_nodes_last"]

Place = Tensor | GradientEdge


def gradients_of(
    inputs: Sequence[Place], outputs: Sequence[Place], gradients: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """The gradient of each input (None where no output depends on it); the graph is kept."""
    found = Variable._execution_engine.run_backward(
        tuple(outputs), tuple(gradients), True, False, tuple(inputs), True, accumulate_grad=False
    )
    return cast("tuple[Tensor | None, ...]", found)


def accumulate(
    outputs: Sequence[Place],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor] = (),
) -> None:
    """Adds to `.grad` of the inputs (of all leaves by default); the graph is freed."""
    Variable._execution_engine.run_backward(
        tuple(outputs), tuple(gradients), False, False, tuple(inputs), True, accumulate_grad=True
    )


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


@functools.cache
def python_nodes_last() -> bool:
    """Whether holding the operation of an autograd.Function keeps it runnable. In torch 2.9 it is
    gone with the tensors and operations that follow it, and the engine says that "element 0 of
    tensors does not require grad"; from 2.13 on at the latest it stays."""
    with torch.enable_grad():
        leaf = torch.ones((), requires_grad=True)
        node = _Same.apply(leaf).grad_fn  # type: ignore[no-untyped-call]
    try:
        gradients_of([leaf], [GradientEdge(node, 0)], [torch.ones(())])
    except RuntimeError:
        return False
    return True
