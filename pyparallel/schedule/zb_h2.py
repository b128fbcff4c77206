"""ZB-H2 (Qi et al., arXiv:2401.10241, figure 3 bottom): a warm-up so long that no rank ever waits.

Rank i begins with 2 (p - i) - 1 forwards and lags 2 i weight halves behind. Each rank's own span
is then without bubble where the three passes take equally long and m >= 2p - 1; the ranks' spans
are shifted against each other, so the optimizer's step must not be a barrier to gain it all.
"""

from collections.abc import Iterator

from pyparallel.schedule.actions import Action
from pyparallel.schedule.zb_h1 import delayed_weight_row

__all__ = ["zb_h2_row"]


def zb_h2_row(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    return delayed_weight_row(rank, microbatches, warm_up=2 * (ranks - rank - 1), lag=2 * rank)
