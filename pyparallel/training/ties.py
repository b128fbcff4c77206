"""Parameters that stages on several ranks hold: after a step, one gradient on all of them."""

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn

from pyparallel.pipeline import TiedParameter, sum_tied_gradients
from pyparallel.pipeline.copies import sum_between
from pyparallel.training.precision import local

__all__ = ["Ties"]


class Ties:
    """Of one pipeline.

    Args:
        tied: `Partition.tied`.
        placement: stage -> the rank of the group that holds it.
    """

    def __init__(
        self, tied: Sequence[TiedParameter], placement: Mapping[int, int], group: dist.ProcessGroup
    ) -> None:
        self._placement, self._group = dict(placement), group
        # Stages of one rank share the parameter itself, and so its gradient.
        self.tied = [one for one in tied if len({placement[s] for s in one.stages}) > 1]

    def sum(self, stages: Mapping[int, nn.Module]) -> None:
        """Gives every copy the sum of all copies' gradients, in rank order. Collective over the
        ranks that hold one."""
        for one in self.tied:
            first: dict[int, int] = {}
            for stage in sorted(set(one.stages)):
                first.setdefault(self._placement[stage], stage)
            here = first.get(self._group.rank())
            if here is None or here not in stages:
                continue
            ranks = sorted(first)

            def over_ranks(gradient: Tensor, _: object, ranks: list[int] = ranks) -> None:
                sum_between([local(gradient)], ranks, self._group)

            sum_tied_gradients(stages[here], here, [one], over_ranks)
