"""Stages that several ranks of a pipeline hold (DualPipe): one gradient, the sum of theirs."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyparallel.pipeline.packets import as_bytes

__all__ = ["sum_between", "sum_copies"]


def sum_copies(module: nn.Module, holders: Sequence[int], group: dist.ProcessGroup) -> None:
    """Gives each copy of a stage the sum of all copies' gradients, added in rank order, so that
    they have the same bits.

    Args:
        module: this rank's copy.
        holders: the ranks of the group that have one, ascending; each calls this.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    sum_between([p.grad for p in parameters if p.grad is not None], holders, group)


def sum_between(mine: list[Tensor], holders: Sequence[int], group: dist.ProcessGroup) -> None:
    """Sums tensors in place over some ranks of a group, in rank order: the same bits on all.

    Args:
        mine: of the same shapes and dtypes on all holders.
        holders: ascending, this rank among them; each calls this, and no other rank.
    """
    others = {
        rank: [torch.empty(g.shape, dtype=g.dtype, device=g.device) for g in mine]
        for rank in holders
        if rank != group.rank()
    }
    sent = [as_bytes(gradient) for gradient in mine]
    for rank, theirs in others.items():
        ops = [
            dist.P2POp(call, data, group=group, group_peer=rank)
            for out, into in zip(sent, theirs, strict=True)
            if out.numel()
            for call, data in ((dist.isend, out), (dist.irecv, as_bytes(into)))
        ]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
    for index, gradient in enumerate(mine):
        parts: list[Tensor] = [
            gradient if rank == group.rank() else others[rank][index] for rank in holders
        ]
        whole = parts[0].clone()
        for part in parts[1:]:
            whole += part
        gradient.copy_(whole)
