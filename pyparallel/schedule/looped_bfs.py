"""Looped breadth-first (Lamy-Poirier, arXiv:2211.05953): each chunk passes all microbatches at
once.

The interleaved schedule with one group of everything, and GPipe's order of all forwards first: a
chunk's weights are needed once forward and once backward, which is what sharded weights want.
"""

from collections.abc import Iterator

from pyparallel.schedule.actions import Action, Place

__all__ = ["looped_bfs_row"]


def looped_bfs_row(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    here = [Place(rank, stage=c * ranks + rank, chunk=c) for c in range(chunks)]
    for chunk in here:
        yield from map(chunk.F, range(microbatches))
    for chunk in reversed(here):
        yield from map(chunk.B, range(microbatches))
