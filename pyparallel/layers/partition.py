"""How one dimension of a whole parameter falls onto the ranks of a group: integers only, no torch.

    whole   0 1 2 3 4 5 6 7 8 9            Partition.even(10, 4): sizes 3, 3, 2, 2, nothing padded
    rank    0 0 0 1 1 1 2 2 3 3
    rank    0 0 0 0 1 1 1 1 2 2 - - - - - -    multiple_of=4: four on each rank, "-" is padding

A rank holds runs of the whole, in its own order: fused projections hold one per part, replicated kv
heads put the same run on several ranks. Every rank computes every rank's runs, without
communication. Where a run ends, padding may follow: zeros that no whole parameter has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from pyparallel.errors import InvalidArgument

__all__ = ["HeadSplit", "Partition", "Run", "even_sizes", "split_heads"]


def even_sizes(size: int, world_size: int) -> list[int]:
    """Sizes of shards that differ by at most one, the larger first; some are 0 if size is small."""
    if size < 0 or world_size < 1:
        raise InvalidArgument(f"{size} elements over {world_size} ranks; expected >= 0 and >= 1")
    each, extra = divmod(size, world_size)
    return [each + (rank < extra) for rank in range(world_size)]


@dataclass(frozen=True)
class Run:
    """`length` consecutive indices of the whole from `start` on, then `padding` that are none."""

    start: int
    length: int
    padding: int = 0


@dataclass(frozen=True)
class Segment:
    """`length` indices that lie at `local` in a rank's shard and at `whole` somewhere else."""

    local: int
    whole: int
    length: int


@dataclass(frozen=True)
class Partition:
    """Which runs of a whole of `size` each rank holds; `runs[rank]` are in the shard's order.

    Every index of the whole is held by some rank. An index may be held more than once, on one rank
    or on several: such copies must stay equal (`shared`).
    """

    size: int
    runs: tuple[tuple[Run, ...], ...]

    def __post_init__(self) -> None:
        for run in (run for runs in self.runs for run in runs):
            if min(run.start, run.length, run.padding) < 0 or run.start + run.length > self.size:
                raise InvalidArgument(f"{run} does not lie in a whole of {self.size}")
        for part, holders in self._holders:
            if not holders:
                raise InvalidArgument(f"no rank holds {part.start} to {part.stop} of {self.size}")
        # Now: until Python 3.12 its first look takes a lock, which a compiled graph cannot hold.
        _ = self.shared

    # --- making one

    @classmethod
    def even(
        cls, size: int, world_size: int, *, unit: int = 1, multiple_of: int = 1
    ) -> "Partition":
        """Shards of whole units (a head, say), alike up to one unit.

        With `multiple_of` > 1 all shards are of one size, which is a multiple of it, by padding:
        what kernels with aligned rows want of a vocabulary. Units and padding exclude one another.
        """
        if unit < 1 or size % unit:
            raise InvalidArgument(f"{size} is no multiple of the unit {unit}")
        if multiple_of < 1:
            raise InvalidArgument(f"multiple_of is {multiple_of}; expected 1 or more")
        if multiple_of == 1:
            sizes = [unit * n for n in even_sizes(size // unit, world_size)]
            return cls.of_sizes(sizes)
        if unit != 1:
            raise InvalidArgument(f"multiple_of={multiple_of} cannot pad units of {unit}")
        block = -(-size // world_size)
        block = -(-block // multiple_of) * multiple_of
        edges = [min(size, rank * block) for rank in range(world_size + 1)]
        return cls(
            size,
            tuple(
                (Run(start, stop - start, block - (stop - start)),)
                for start, stop in pairwise(edges)
            ),
        )

    @classmethod
    def of_sizes(cls, sizes: Sequence[int]) -> "Partition":
        """Shards of these sizes, in rank order, nothing padded."""
        ends = list(accumulate(sizes))
        runs = tuple((Run(end - n, n),) for end, n in zip(ends, sizes, strict=True))
        return cls(ends[-1], runs)

    @classmethod
    def joined(cls, parts: Sequence["Partition"]) -> "Partition":
        """Wholes one after another, and so each rank's shards: what a fused projection holds."""
        if len({part.world_size for part in parts}) != 1:
            raise InvalidArgument("parts of a fused parameter must be over the same ranks")
        offsets = [0, *accumulate(part.size for part in parts)]
        return cls(
            offsets[-1],
            tuple(
                tuple(
                    Run(run.start + offset, run.length, run.padding)
                    for part, offset in zip(parts, offsets[:-1], strict=True)
                    for run in part.runs[rank]
                )
                for rank in range(parts[0].world_size)
            ),
        )

    # --- asking it

    @property
    def world_size(self) -> int:
        return len(self.runs)

    def local_size(self, rank: int) -> int:
        """Indices of a rank's shard, padding included."""
        return sum(run.length + run.padding for run in self.runs[rank])

    def real_size(self, rank: int) -> int:
        """Indices of a rank's shard that the whole has."""
        return sum(run.length for run in self.runs[rank])

    def is_padded(self, rank: int) -> bool:
        return any(run.padding for run in self.runs[rank])

    def contiguous(self, rank: int) -> range:
        """The one run of a rank, for what needs consecutive indices (a vocabulary)."""
        (run,) = self.runs[rank]
        return range(run.start, run.start + run.length)

    def segments(self, rank: int) -> list[Segment]:
        """Where a rank's shard lies in the whole. Zero lengths are left out."""
        found, local = [], 0
        for run in self.runs[rank]:
            if run.length:
                found.append(Segment(local, run.start, run.length))
            local += run.length + run.padding
        return found

    def padding(self, rank: int) -> list[range]:
        """The padded indices of a rank's shard."""
        found, local = [], 0
        for run in self.runs[rank]:
            if run.padding:
                found.append(range(local + run.length, local + run.length + run.padding))
            local += run.length + run.padding
        return found

    @cached_property
    def shared(self) -> list[range]:
        """Ranges of the whole that are held more than once."""
        found: list[range] = []
        for part, holders in self._holders:
            if len(holders) > 1:
                if found and found[-1].stop == part.start:
                    part = range(found.pop().start, part.stop)
                found.append(part)
        return found

    def shared_segments(self, rank: int) -> list[Segment]:
        """Where a rank's copies lie in its shard, and in all of `shared` put one after another."""
        found, offset = [], 0
        for part in self.shared:
            for segment in self.segments(rank):
                start = max(part.start, segment.whole)
                stop = min(part.stop, segment.whole + segment.length)
                if start < stop:
                    local = segment.local + start - segment.whole
                    found.append(Segment(local, offset + start - part.start, stop - start))
            offset += len(part)
        return found

    def counted(self, rank: int) -> list[Segment]:
        """This rank's segments without the copies that an earlier run or rank holds already.

        Over all ranks they hold every index of the whole exactly once.
        """
        found: list[Segment] = []
        for part, holders in self._holders:
            holder, local = holders[0]
            if holder == rank:
                found.append(Segment(local, part.start, len(part)))
        return found

    @cached_property
    def _holders(self) -> list[tuple[range, list[tuple[int, int]]]]:
        """The whole cut wherever a run begins or ends; who holds each part: (rank, local index)."""
        segments = [(rank, s) for rank in range(self.world_size) for s in self.segments(rank)]
        cuts = {0, self.size}
        for _, s in segments:
            cuts |= {s.whole, s.whole + s.length}
        ordered = sorted(cuts)
        return [
            (
                range(start, stop),
                [
                    (rank, s.local + start - s.whole)
                    for rank, s in segments
                    if s.whole <= start and stop <= s.whole + s.length
                ],
            )
            for start, stop in pairwise(ordered)
        ]


@dataclass(frozen=True)
class HeadSplit:
    """Query and kv heads of each rank: query heads `queries_per_kv` at a time use one kv head."""

    query: Partition
    kv: Partition
    queries_per_kv: int
    head_dim: int

    def query_heads(self, rank: int) -> int:
        return self.query.local_size(rank) // self.head_dim

    def kv_heads(self, rank: int) -> int:
        return self.kv.local_size(rank) // self.head_dim


def split_heads(num_heads: int, num_kv_heads: int, head_dim: int, world_size: int) -> HeadSplit:
    """Query heads over the ranks, each with the kv heads that its query heads read.

    On every rank the ratio of query to kv heads is the same, so that any attention kernel runs on a
    rank's heads as if they were all. If the model's ratio leaves ranks idle, kv heads are copied:
    the ratio becomes the divisor of it that gives the busiest rank the fewest query heads (of
    equals, the largest: the fewest copies). 8 query and 2 kv heads on 4 ranks: 2 and 1 on each; on
    3 ranks: 3, 3, 2 and as many kv heads. With fewer query heads than ranks, some ranks hold none.
    """
    if min(num_heads, num_kv_heads, head_dim) < 1:
        raise InvalidArgument(
            f"num_heads={num_heads}, num_kv_heads={num_kv_heads}, head_dim={head_dim}: "
            "expected 1 or more of each"
        )
    if num_heads % num_kv_heads:
        fits = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise InvalidArgument(
            f"num_kv_heads={num_kv_heads} does not divide num_heads={num_heads}: query heads share "
            f"kv heads in groups of one size; num_kv_heads could be one of {fits}"
        )
    ratio = num_heads // num_kv_heads

    def busiest(per_kv: int) -> int:
        return -(-(num_heads // per_kv) // world_size) * per_kv

    per_kv = min((d for d in range(ratio, 0, -1) if ratio % d == 0), key=busiest)
    groups = even_sizes(num_heads // per_kv, world_size)
    first = [0, *accumulate(groups)]
    kv = tuple(
        tuple(
            Run((first[rank] + i) * per_kv // ratio * head_dim, head_dim)
            for i in range(groups[rank])
        )
        for rank in range(world_size)
    )
    return HeadSplit(
        query=Partition.of_sizes([n * per_kv * head_dim for n in groups]),
        kv=Partition(num_kv_heads * head_dim, tuple(_merged(runs) for runs in kv)),
        queries_per_kv=per_kv,
        head_dim=head_dim,
    )


def _merged(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Runs that follow one another in the whole become one."""
    merged: list[Run] = []
    for run in runs:
        last = merged[-1] if merged else None
        if last and last.start + last.length == run.start:
            merged[-1] = Run(last.start, last.length + run.length)
        else:
            merged.append(run)
    return tuple(merged)
