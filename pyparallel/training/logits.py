"""Logits of tensor parallel ranks and of a pipeline's last stage, whole on every rank."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyparallel import ops
from pyparallel.layers import ColumnParallelLinear
from pyparallel.layers.parameters import assemble

__all__ = ["from_rank", "sharded_head", "whole_classes"]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def sharded_head(module: Any) -> ColumnParallelLinear | None:
    """The output layer, where ranks have the logits of a part of the classes each."""
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    return head if isinstance(head, ColumnParallelLinear) and not head.gather_output else None


def whole_classes(head: ColumnParallelLinear, logits: Tensor) -> Tensor:
    """All classes, of logits of this rank's."""
    sizes = [head.partition.local_size(rank) for rank in range(head.place.size)]
    every = ops.gather(logits, head.place.name, -1, sizes)
    return assemble(every, every.dim() - 1, head.partition)[0]


def from_rank(
    found: Tensor | None, source: int, group: dist.ProcessGroup, device_type: str
) -> Tensor:
    """What the source rank of the group has found, on all of them. Collective."""
    if group.size() == 1:
        assert found is not None
        return found
    sizes = torch.zeros(4, dtype=torch.int64, device=device_type)
    if found is not None:
        sizes = sizes.new_tensor([*found.shape, _DTYPES.index(found.dtype)])
    dist.broadcast(sizes, group=group, group_src=source)
    *shape, dtype = sizes.tolist()
    if found is None:
        found = torch.empty(shape, dtype=_DTYPES[dtype], device=device_type)
    found = found.contiguous()
    dist.broadcast(found, group=group, group_src=source)
    return found
