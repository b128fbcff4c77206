"""The running state of an online softmax, which a forward step continues and `finish` ends."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["State", "accumulator_dtype", "finish"]


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of operands of `dtype` are kept in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


@dataclass
class State:
    """Of each query row: the largest score so far, the sum of weights, the weighted sum of v.

    Weights are exp(score - row_max), natural. A row that has seen no key: -inf, 0 and zeros.
    """

    row_max: Tensor  # [batch, heads, seq_q], float32, or float64 for float64 operands
    row_sum: Tensor  # the same
    acc: Tensor  # [batch, seq_q, heads, d_v], the same dtype; not normalised

    @classmethod
    def empty(cls, q: Tensor, d_v: int) -> "State":
        """Before the first step, for q [batch, seq_q, heads, d]."""
        batch, rows, heads, _ = q.shape
        dtype = accumulator_dtype(q.dtype)
        row_max = torch.full((batch, heads, rows), -math.inf, dtype=dtype, device=q.device)
        acc = torch.zeros((batch, rows, heads, d_v), dtype=dtype, device=q.device)
        return cls(row_max, torch.zeros_like(row_max), acc)

    def heads(self, begin: int, end: int) -> "State":
        """The part of heads begin .. end - 1, in the same memory."""
        return State(
            self.row_max[:, begin:end], self.row_sum[:, begin:end], self.acc[:, :, begin:end]
        )

    def merge(self, other: "State") -> None:
        """Takes in the keys that `other` has seen. Rows without a key change nothing."""
        highest = torch.maximum(self.row_max, other.row_max)
        base = torch.where(highest == -math.inf, 0.0, highest)
        mine, theirs = torch.exp(self.row_max - base), torch.exp(other.row_max - base)
        self.row_sum.mul_(mine).add_(other.row_sum * theirs)
        self.acc.mul_(mine.transpose(1, 2).unsqueeze(-1))
        self.acc.add_(other.acc * theirs.transpose(1, 2).unsqueeze(-1))
        self.row_max.copy_(highest)


def finish(state: State, sinks: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The attention's result [batch, seq_q, heads, d_v] in `dtype`, and its log-sum-exp.

    `sinks` [heads] are scores of one more key without a value: they enter the denominator here,
    once. The log-sum-exp [batch, heads, seq_q] is natural, in the state's dtype, -inf for a row
    that has seen no key and has no sink; the result of such a row is 0.
    """
    highest, total = state.row_max, state.row_sum
    if sinks is None:  # a sum that is not 0 is at least 1, the largest score's
        out = state.acc / total.clamp(min=0.5).transpose(1, 2).unsqueeze(-1)
        return out.to(dtype), highest + torch.log(total)
    sink = sinks.to(highest.dtype).view(1, -1, 1)
    highest = torch.maximum(highest, sink)
    base = torch.where(highest == -math.inf, 0.0, highest)
    scale = torch.exp(state.row_max - base)
    total = state.row_sum * scale + torch.exp(sink - base)
    share = torch.where(total == 0, 0.0, scale / total)
    out = state.acc * share.transpose(1, 2).unsqueeze(-1)
    return out.to(dtype), highest + torch.log(total)
