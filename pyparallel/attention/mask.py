"""What an attention computes beside its sums: the same for every engine and every rank."""

from dataclasses import dataclass, replace

from torch import Tensor

__all__ = ["Mask"]


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys a query sees, and what becomes of a score on its way to a weight.

    The score of query i and key j is, in this order:

        s = softmax_scale * (q_i . k_j)
        s = softcap * tanh(s / softcap)                     where softcap is not 0
        s = s - slope * |q_pos - k_pos|                     where there are alibi_slopes
        s = -inf   unless the documents are equal and
                   k_pos <= q_pos                           where causal
                   q_pos - window_left <= k_pos             where window_left is not -1
                   k_pos <= q_pos + window_right            where window_right is not -1

    A weight is dropped where `keep` says so (see dropout.py), and otherwise divided by
    1 - dropout_p; the denominator and the log-sum-exp are of all weights.
    """

    softmax_scale: float
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None  # float32 [heads] or [batch, heads], of the heads of q
    dropout_p: float = 0.0
    seed: int = 0  # unsigned, 64 bits
    # For dropout, where q has only some of the heads (Ulysses): the first of them, and how many
    # there are in all; 0: as many as q has.
    first_head: int = 0
    all_heads: int = 0

    def of_heads(self, begin: int, end: int, heads: int) -> "Mask":
        """For heads begin .. end - 1 of a q that has `heads`."""
        slopes = self.alibi_slopes
        if slopes is not None:
            slopes = slopes[..., begin:end]
        return replace(
            self,
            alibi_slopes=slopes,
            first_head=self.first_head + begin,
            all_heads=self.all_heads or heads,
        )

    @property
    def before(self) -> float:
        """How many positions before its own a query sees; inf: all."""
        return float("inf") if self.window_left < 0 else self.window_left

    @property
    def after(self) -> float:
        """How many positions after its own a query sees; inf: all. Negative: not even its own."""
        after = float("inf") if self.window_right < 0 else self.window_right
        return min(after, 0) if self.causal else after
