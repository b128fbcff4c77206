"""GPipe (Huang et al., arXiv:1811.06965): all forwards, then all backwards. Every activation is
kept."""

from collections.abc import Iterator

from pyparallel.schedule.actions import Action, Place

__all__ = ["gpipe_row"]


def gpipe_row(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    here = Place(rank, stage=rank)
    yield from map(here.F, range(microbatches))
    yield from map(here.B, range(microbatches))
