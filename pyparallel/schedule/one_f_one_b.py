"""1F1B (Narayanan et al., arXiv:2104.04473, figure 3): a backward as soon as there is one.

Rank i fills the ranks after it with p - i - 1 forwards, then takes one forward and one backward
in turn: the bubble of GPipe, but no rank keeps more than p - i microbatches.
"""

from collections.abc import Iterator

from pyparallel.schedule.actions import Action, Place

__all__ = ["one_f_one_b_row"]


def one_f_one_b_row(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    here = Place(rank, stage=rank)
    warm_up = min(ranks - rank - 1, microbatches)
    yield from map(here.F, range(warm_up))
    for j in range(microbatches):
        if warm_up + j < microbatches:
            yield here.F(warm_up + j)
        yield here.B(j)
