"""Parameters that several stages hold: one gradient, the sum of theirs."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from pyparallel.pipeline.partition import TiedParameter

__all__ = ["sum_tied_gradients"]


def sum_tied_gradients(
    stage: nn.Module,
    index: int,
    tied: Iterable[TiedParameter],
    all_reduce: Callable[[Tensor, tuple[int, ...]], object],
) -> None:
    """Gives every copy of a tied parameter the sum of all copies' gradients.

    Called after the backward by every stage that holds one; stages without any may call it too.
    Where `all_reduce` gives all ranks the same bits, and their optimizers the same states, copies
    that began equal stay equal to the bit.

    Args:
        stage: this rank's stage, from `Partition.stage`.
        index: its number.
        tied: `Partition.tied`: in the same order on every stage.
        all_reduce: (tensor, stages) sums the tensor in place over the ranks of these stages, which
            are sorted and without repeats.
    """
    parameters = dict(stage.named_parameters(remove_duplicate=False))
    for one in tied:
        if index not in one.stages:
            continue
        mine = [n for n, s in zip(one.names, one.stages, strict=True) if s == index]
        parameter = parameters[mine[0]]  # names on one stage are one parameter
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        all_reduce(parameter.grad, tuple(sorted(set(one.stages))))
