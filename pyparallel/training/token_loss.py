"""The loss of a step, summed over a microbatch's tokens: what composes over any layout.

A sum over tokens is the sum of its parts, however the tokens are dealt out to ranks and
microbatches; the mean over all of a step is that sum, divided once by the number of tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pyparallel.layers import ColumnParallelLinear, vocab_parallel_cross_entropy

__all__ = ["IGNORED", "CrossEntropy", "Loss", "counted"]

IGNORED = -100  # the label of a token that takes no part

Loss = Callable[[Tensor, Tensor], Tensor]


class CrossEntropy:
    """Cross entropy over classes, summed over the tokens whose label is not IGNORED.

    Args:
        head: the output layer, where ranks have the logits of a part of the classes each, which
            are not gathered; else None.
    """

    def __init__(self, head: ColumnParallelLinear | None) -> None:
        self.head = head

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """A tensor of one element, in float32 at least.

        Args:
            logits: [batch, rows, classes], or this rank's part of the classes.
            labels: [batch, rows], int64.
        """
        head = self.head
        if head is not None:
            return vocab_parallel_cross_entropy(
                logits,
                labels,
                head.partition,
                head.place,
                ignore_index=IGNORED,
                reduction="sum",
            )
        if logits.dtype is not torch.float64:
            logits = logits.float()
        return nn.functional.cross_entropy(
            logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )


def counted(labels: Tensor) -> int:
    """How many tokens take part in the loss."""
    return int((labels != IGNORED).sum())
