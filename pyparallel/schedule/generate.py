"""Schedules by name: which there are, what each takes, and what to take instead where one cannot
work."""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pyparallel.schedule.actions import Action
from pyparallel.schedule.dualpipe import dualpipe_row
from pyparallel.schedule.dualpipev import dualpipev_row
from pyparallel.schedule.errors import ScheduleError
from pyparallel.schedule.gpipe import gpipe_row
from pyparallel.schedule.interleaved import interleaved_row
from pyparallel.schedule.looped_bfs import looped_bfs_row
from pyparallel.schedule.one_f_one_b import one_f_one_b_row
from pyparallel.schedule.schedule import Schedule
from pyparallel.schedule.v_half import v_half_row
from pyparallel.schedule.v_min import v_min_row
from pyparallel.schedule.zb_h1 import zb_h1_row
from pyparallel.schedule.zb_h2 import zb_h2_row
from pyparallel.schedule.zb_v import zb_v_row

__all__ = ["FAMILIES", "Family", "generate"]


@dataclass(frozen=True)
class Family:
    """What a named schedule takes.

    Attributes:
        name: as `generate` takes it.
        effect: what it is for, in a line.
        row: (rank, ranks, microbatches, chunks, group_size) -> the rank's actions.
        chunks: stages a rank holds; None where the caller chooses.
        copies: how many ranks hold each stage.
        even_ranks: an odd number of ranks is refused.
        takes_group_size: `group_size` has an effect.
        fewest: ranks -> the fewest microbatches that `row` can write. A schedule for fewer is cut
            from that one: the microbatches left out leave idle time, and the rest is unchanged.
        multiple: `row` needs a multiple of this many microbatches; other numbers are cut as well.
    """

    name: str
    effect: str
    row: Callable[[int, int, int, int, int], Iterable[Action]]
    chunks: int | None = 1
    copies: int = 1
    even_ranks: bool = False
    takes_group_size: bool = False
    fewest: Callable[[int], int] = lambda ranks: 1
    multiple: int = 1

    def default_chunks(self) -> int:
        return 2 if self.chunks is None else self.chunks


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "gpipe",
            "all forwards, then all backwards",
            lambda r, p, m, v, g: gpipe_row(r, p, m),
        ),
        Family(
            "1f1b",
            "GPipe's bubble, at most p microbatches kept",
            lambda r, p, m, v, g: one_f_one_b_row(r, p, m),
        ),
        Family(
            "interleaved-1f1b",
            "v chunks a rank, 1F1B's bubble divided by v",
            interleaved_row,
            chunks=None,
            takes_group_size=True,
        ),
        Family(
            "looped-bfs",
            "each chunk's weights are needed once each way; GPipe's memory",
            lambda r, p, m, v, g: looped_bfs_row(r, p, m, v),
            chunks=None,
        ),
        Family(
            "zb-h1",
            "backward in halves: a third of 1F1B's bubble in its memory",
            lambda r, p, m, v, g: zb_h1_row(r, p, m),
        ),
        Family(
            "zb-h2",
            "no bubble in twice 1F1B's memory",
            lambda r, p, m, v, g: zb_h2_row(r, p, m),
        ),
        Family(
            "zb-v",
            "two chunks in a V: no bubble in 1F1B's memory",
            lambda r, p, m, v, g: zb_v_row(r, p, m),
            chunks=2,
            fewest=lambda ranks: 2 * ranks - 1,
        ),
        Family(
            "v-half",
            "two chunks in a V: half of 1F1B's memory and bubble",
            lambda r, p, m, v, g: v_half_row(r, p, m),
            chunks=2,
        ),
        Family(
            "v-min",
            "two chunks in a V: a third of 1F1B's memory, two thirds of its bubble",
            lambda r, p, m, v, g: v_min_row(r, p, m),
            chunks=2,
        ),
        Family(
            "dualpipe",
            "microbatches from both ends, forward beside backward; weights twice",
            lambda r, p, m, v, g: dualpipe_row(r, p, m),
            chunks=2,
            copies=2,
            even_ranks=True,
            fewest=lambda ranks: 2 * ranks,
            multiple=2,
        ),
        Family(
            "dualpipev",
            "DualPipe's pairs on a V of half its ranks",
            lambda r, p, m, v, g: dualpipev_row(r, p, m),
            chunks=2,
            fewest=lambda ranks: 2 * ranks,
        ),
    )
}


def generate(
    name: str,
    ranks: int,
    microbatches: int,
    *,
    chunks: int | None = None,
    group_size: int | None = None,
) -> Schedule:
    """The schedule called `name`, compute only.

    Args:
        name: a key of `FAMILIES`. Schedules made from measured times come from `auto_schedule`.
        ranks: p, one or more; even for DualPipe.
        microbatches: m, one or more: every schedule takes any number, fewer than ranks too.
        chunks: v, stages per rank, where the schedule leaves the choice (default 2).
        group_size: for interleaved 1F1B, how many microbatches pass a chunk before the next
            (default p, and no fewer).

    Raises:
        ScheduleError: a choice that gives no schedule; all misfits are named, with what would work.
    """
    family = FAMILIES.get(name)
    if family is None:
        close = difflib.get_close_matches(name, FAMILIES, n=1, cutoff=0.4)
        nearest = f" Nearest: {close[0]!r}." if close else ""
        raise ScheduleError(f"no schedule {name!r}; there are {', '.join(FAMILIES)}.{nearest}")
    misfits = [
        *_misfits(family, ranks, microbatches, chunks),
        *_group_misfits(family, ranks, group_size),
    ]
    if misfits:
        raise ScheduleError(f"{name}: " + " ".join(misfits))

    v = family.default_chunks() if chunks is None else chunks
    group = ranks if group_size is None else group_size
    written = max(microbatches, family.fewest(ranks))
    written += -written % family.multiple
    rows = (family.row(r, ranks, written, v, group) for r in range(ranks))
    return Schedule.from_rows(name, rows).first(microbatches)


def _misfits(family: Family, ranks: int, microbatches: int, chunks: int | None) -> Iterable[str]:
    if ranks < 1:
        yield f"{ranks} ranks: allowed are 1, 2, 3, ...; nearest 1."
    elif family.even_ranks and ranks % 2:
        yield (
            f"{ranks} ranks: each end needs its half, so allowed are 2, 4, 6, ...; "
            f"nearest {' and '.join(str(n) for n in (ranks - 1, ranks + 1) if n)}."
        )
    if microbatches < 1:
        yield f"{microbatches} microbatches: allowed are 1, 2, 3, ...; nearest 1."
    if family.chunks is None and chunks is not None and chunks < 1:
        yield f"{chunks} chunks a rank: allowed are 1, 2, 3, ...; nearest 1."
    if family.chunks is not None and chunks not in (None, family.chunks):
        other = "zb-v" if chunks == 2 else "interleaved-1f1b"
        yield f"{chunks} chunks a rank: it has {family.chunks}; for {chunks} take {other!r}."


def _group_misfits(family: Family, ranks: int, group_size: int | None) -> Iterable[str]:
    if group_size is None:
        return
    if not family.takes_group_size:
        yield f"group_size {group_size} has no effect: only 'interleaved-1f1b' takes one."
    elif group_size < ranks:
        yield (
            f"group_size {group_size} with {ranks} ranks: it has to fill the ranks, so "
            f"allowed are {ranks}, {ranks + 1}, ...; nearest {ranks}."
        )
