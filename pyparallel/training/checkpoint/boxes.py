"""Boxes of tensors: integers only. Where a rank's shard lies in the model's whole tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from pyparallel.layers.parameters import ParameterLayout

__all__ = ["Box", "Spot", "spots"]


@dataclass(frozen=True)
class Box:
    """`sizes` elements from `offsets` on, one number per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @classmethod
    def whole(cls, sizes: Sequence[int]) -> "Box":
        return cls((0,) * len(sizes), tuple(sizes))


@dataclass(frozen=True)
class Spot:
    """A box of a rank's shard, and where it lies in one of the model's whole tensors.

    Attributes:
        part: which of the tensors that are fused in the shard; 0 where there is but one.
        shape: of that tensor, as state dicts have it.
        local: in the box that `spots` was asked about, not yet transposed.
        offsets: in the whole tensor.
        transposed: the whole tensor has the dimensions the other way round.
    """

    part: int
    shape: tuple[int, ...]
    local: Box
    offsets: tuple[int, ...]
    transposed: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """In the whole tensor."""
        return self.local.sizes[::-1] if self.transposed else self.local.sizes


def spots(
    layout: ParameterLayout, rank: int, shape: Sequence[int], box: Box, *, counted: bool
) -> list[Spot]:
    """Where a box of a rank's shard lies in the model's whole tensors. Padding lies nowhere.

    shape: of the shard, padding included. With `counted`, copies that another rank (or an earlier
    run of this one) holds are left out: the counted spots of all ranks hold everything once.
    """
    dim, partition = layout.dim, layout.partition
    if dim is None or partition is None:
        whole = tuple(shape)
        spot = Spot(0, whole, Box.whole(box.sizes), box.offsets, layout.transposed)
        return [_turned(spot)] if box.numel or not prod(whole) else []
    ends, total = [], 0
    for size in [part.size for part in layout.parts] or [partition.size]:
        total += size
        ends.append(total)
    found = []
    low, high = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
    for segment in partition.counted(rank) if counted else partition.segments(rank):
        start = max(low, segment.local)
        stop = min(high, segment.local + segment.length)
        while start < stop:  # cut where the parts of a fused parameter meet
            at = segment.whole + start - segment.local
            part = next(i for i, end in enumerate(ends) if at < end)
            length = min(stop - start, ends[part] - at)
            begin = ends[part - 1] if part else 0
            local_offsets = [0] * len(shape)
            local_offsets[dim] = start - low
            sizes = list(box.sizes)
            sizes[dim] = length
            offsets = list(box.offsets)
            offsets[dim] = at - begin
            whole_shape = list(shape)
            whole_shape[dim] = ends[part] - begin
            local = Box(tuple(local_offsets), tuple(sizes))
            if local.numel:
                spot = Spot(part, tuple(whole_shape), local, tuple(offsets), layout.transposed)
                found.append(_turned(spot))
            start += length
    return found


def _turned(spot: Spot) -> Spot:
    if not spot.transposed:
        return spot
    return Spot(spot.part, spot.shape[::-1], spot.local, spot.offsets[::-1], True)
