"""ZB-H1 (Qi et al., arXiv:2401.10241, figure 3 top): 1F1B whose weight halves fill the end.

Rank i lags i weight halves behind, so that the halves that nobody waits for are left for the time
when 1F1B idles. The memory of 1F1B, a third of its bubble where the three passes take equally
long.
"""

from collections.abc import Iterator

from pyparallel.schedule.actions import Action, Place

__all__ = ["delayed_weight_row", "zb_h1_row"]


def zb_h1_row(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    return delayed_weight_row(rank, microbatches, warm_up=ranks - rank - 1, lag=rank)


def delayed_weight_row(rank: int, microbatches: int, warm_up: int, lag: int) -> Iterator[Action]:
    """`warm_up` forwards; then F I W in turn, each W `lag` microbatches behind its I."""
    here = Place(rank, stage=rank)
    warm_up = min(warm_up, microbatches)
    yield from map(here.F, range(warm_up))
    for j in range(microbatches):
        if warm_up + j < microbatches:
            yield here.F(warm_up + j)
        yield here.I(j)
        if j >= lag:
            yield here.W(j - lag)
    yield from map(here.W, range(max(microbatches - lag, 0), microbatches))
