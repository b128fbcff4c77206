"""Interleaved 1F1B (Narayanan et al., arXiv:2104.04473, figure 4): v chunks a rank, bubble
divided by v.

Rank i holds stages i, p + i, 2p + i, ... Microbatches go round in groups: a group passes the
first chunk, then the second, and so on, before the next group begins. Any number of microbatches
is cut into groups of nearly equal size, none smaller than `group_size` unless there are fewer
microbatches than that: a group smaller than p would come back to rank 0 before the ranks had
anything else to do.
"""

from collections.abc import Iterator
from itertools import pairwise

from pyparallel.schedule.actions import Action, Place

__all__ = ["interleaved_row", "microbatch_groups"]


def microbatch_groups(microbatches: int, group_size: int) -> list[range]:
    """Consecutive groups whose sizes differ by one at most, as many as are of `group_size` or
    more."""
    count = max(microbatches // group_size, 1)
    cuts = [microbatches * i // count for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(cuts)]


def interleaved_row(
    rank: int, ranks: int, microbatches: int, chunks: int, group_size: int
) -> Iterator[Action]:
    here = [Place(rank, stage=c * ranks + rank, chunk=c) for c in range(chunks)]
    groups = microbatch_groups(microbatches, group_size)
    forwards = [here[c].F(j) for group in groups for c in range(chunks) for j in group]
    backwards = [here[c].B(j) for group in groups for c in reversed(range(chunks)) for j in group]

    largest = max(group_size, *map(len, groups))
    warm_up = min(2 * (ranks - rank - 1) + (chunks - 1) * largest, len(forwards))
    yield from forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - warm_up :]
