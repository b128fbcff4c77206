"""DualPipeV (Sea AI Lab's "cut in half" of DualPipe): the same eight steps on a V, without a
second copy.

Half of DualPipe's ranks, each with two stages in a V (places as in ZB-V): what the two ends of
DualPipe do at one depth is the same, so one rank can do it with both chunks.
"""

from collections.abc import Iterator

from pyparallel.schedule.actions import Action
from pyparallel.schedule.dualpipe import eight_steps
from pyparallel.schedule.zb_v import v_places

__all__ = ["dualpipev_row"]


def dualpipev_row(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Needs at least 2 `ranks` microbatches."""
    low, high = v_places(rank, ranks)
    every = range(microbatches)
    return eight_steps(rank, ranks, low, high, near=every, far=every)
