"""ZB-V (Qi et al., arXiv:2401.10241, section 6): two chunks a rank in a V, no bubble, 1F1B's
memory.

Rank i holds stage i on the way down and stage 2p - 1 - i on the way up, so the rank that takes
the input also has the loss and turns round at once.
"""

from collections.abc import Iterator
from itertools import count, islice

from pyparallel.schedule.actions import Action, Place

__all__ = ["v_places", "zb_v_row"]


def v_places(rank: int, ranks: int) -> tuple[Place, Place]:
    """The rank's chunk on the way down, and the one on the way up."""
    return Place(rank, rank, 0), Place(rank, 2 * ranks - 1 - rank, 1)


def zb_v_row(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Needs at least 2 `ranks` - 1 microbatches."""
    down, up = v_places(rank, ranks)
    down_f, up_f = map(down.F, count()), map(up.F, count())
    down_i, up_i = map(down.I, count()), map(up.I, count())
    down_w, up_w = map(down.W, count()), map(up.W, count())

    yield from islice(down_f, 2 * (ranks - rank) - 1)  # fill the V
    for _ in range(rank):  # the way up has begun
        yield from (next(up_f), next(down_f))
    for _ in range(ranks - rank):  # the loss is there: backward begins on the way up
        yield from (next(up_f), next(up_i), next(up_w))
    for _ in range(microbatches - 2 * ranks + rank + 1):  # steady: one of each
        yield from (next(down_f), next(down_i), next(down_w))
        yield from (next(up_f), next(up_i), next(up_w))
    for _ in range(ranks - rank - 1):  # the input has ended
        yield from (next(down_i), next(down_w))
        yield from (next(up_f), next(up_i), next(up_w))
    for _ in range(rank):  # empty the V: halves that others wait for first
        yield from (next(down_i), next(up_i))
    for _ in range(ranks - rank):
        yield from (next(down_i), next(down_w))
    yield from islice(up_w, rank)
    yield from islice(down_w, rank)
