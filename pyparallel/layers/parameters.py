"""What a rank's parameter is of the whole one: cut out, put together again, trained alike.

A `ParameterLayout` says it for one parameter. `take` cuts a rank's shard out of the whole,
`assemble` makes the whole of all shards, `shared_gradient` keeps copies equal and padding at zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyparallel import ops
from pyparallel.layers.partition import Partition

__all__ = ["ParameterLayout", "assemble", "shared_gradient", "take"]


class Part(NamedTuple):
    """A named piece of a fused parameter: `size` indices of the whole, after the parts before."""

    name: str
    size: int


@dataclass(frozen=True)
class ParameterLayout:
    """The place of a parameter in the whole model.

    dim         the dimension that is sharded; None if every rank holds the whole, alike
    partition   how that dimension falls onto the ranks
    parts       the whole's parameters that are fused along `dim`; empty if it is one
    transposed  whether the whole is stored the other way round in state dicts ([in, out])
    """

    dim: int | None = None
    partition: Partition | None = None
    parts: tuple[Part, ...] = ()
    transposed: bool = False

    def whole_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole, given that of a shard; parts put one after another."""
        if self.dim is None or self.partition is None:
            return tuple(local)
        return (*local[: self.dim], self.partition.size, *local[self.dim + 1 :])

    def pieces(self, whole: Tensor) -> list[Tensor]:
        """Views of `whole`, one per part; as state dicts have them."""
        found = [whole]
        if self.parts and self.dim is not None:
            found = list(whole.split([part.size for part in self.parts], self.dim))
        return [piece.t() for piece in found] if self.transposed else found

    def keys(self, name: str) -> list[str]:
        """The names that `pieces` have in a state dict of the whole module."""
        return [f"{part.name}.{name}" for part in self.parts] or [name]

    def is_padded(self, rank: int) -> bool:
        return self.partition is not None and self.partition.is_padded(rank)

    def trimmed(self, shard: Tensor, rank: int) -> Tensor:
        """A shard without its padding."""
        assert self.dim is not None
        assert self.partition is not None
        parts = [shard.narrow(self.dim, s.local, s.length) for s in self.partition.segments(rank)]
        if not parts:
            return shard.narrow(self.dim, 0, 0)
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def padded(self, real: Tensor, rank: int) -> Tensor:
        """A shard again, of what `trimmed` gave. What has another size is given back as it is."""
        assert self.dim is not None
        assert self.partition is not None
        if real.dim() <= self.dim or real.shape[self.dim] != self.partition.real_size(rank):
            return real
        shape = list(real.shape)
        shape[self.dim] = self.partition.local_size(rank)
        shard = real.new_zeros(shape)
        start = 0
        for s in self.partition.segments(rank):
            place = shard.narrow(self.dim, s.local, s.length)
            place.copy_(real.narrow(self.dim, start, s.length))
            start += s.length
        return shard


REPLICATED = ParameterLayout()


def take(whole: Tensor, layout: ParameterLayout, rank: int) -> Tensor:
    """This rank's shard of a whole parameter: a copy, zero where it is padded."""
    if layout.dim is None or layout.partition is None:
        return whole.clone(memory_format=torch.contiguous_format)
    dim, partition = layout.dim, layout.partition
    shape = list(whole.shape)
    shape[dim] = partition.local_size(rank)
    shard = whole.new_zeros(shape) if partition.is_padded(rank) else whole.new_empty(shape)
    for segment in partition.segments(rank):
        shard.narrow(dim, segment.local, segment.length).copy_(
            whole.narrow(dim, segment.whole, segment.length)
        )
    return shard


def assemble(
    shards: Tensor, dim: int, partition: Partition, *, check: str = ""
) -> tuple[Tensor, str]:
    """The whole of all ranks' shards, which lie in `shards` one after another along `dim`.

    With `check`, the parameter's name, also a text that says which copies differ ("" if none do).
    """
    pieces: list[tuple[int, int, int]] = []
    base, bases = 0, []
    for rank in range(partition.world_size):
        pieces += [(s.whole, base + s.local, s.length) for s in partition.counted(rank)]
        bases.append(base)
        base += partition.local_size(rank)
    pieces.sort()
    in_order = [shards.narrow(dim, at, length) for _, at, length in pieces]
    whole = torch.cat(in_order, dim) if in_order else shards.narrow(dim, 0, 0)
    if check and partition.shared:
        for rank in range(partition.world_size):
            for segment in partition.segments(rank):
                copy = shards.narrow(dim, bases[rank] + segment.local, segment.length)
                if not torch.equal(copy, whole.narrow(dim, segment.whole, segment.length)):
                    return whole, f"rank {rank}'s copy of {check} differs from that of another rank"
    return whole, ""


def shared_gradient(parameter: Tensor, layout: ParameterLayout, rank: int, group: str) -> Tensor:
    """`parameter` itself, but its gradient is the same on all copies, and zero where padded.

    Every backward pass sums what the copies got in it, so that it is done once however many passes
    accumulate into `.grad`. Costs nothing, and communicates nothing, where there is no copy.
    """
    if is_complete(layout, rank):
        return parameter
    shared: Tensor = _SharedGradient.apply(  # type: ignore[no-untyped-call]
        parameter, layout, rank, group
    )
    return shared


def is_complete(layout: ParameterLayout, rank: int) -> bool:
    """Whether a gradient of this layout is whole as it comes: no copies, no padding."""
    if layout.dim is None or layout.partition is None:
        return True
    return not layout.partition.shared and not layout.partition.is_padded(rank)


def share_gradient_(grad: Tensor, layout: ParameterLayout, rank: int, group: str) -> None:
    """Sums in place what the copies got, and clears padding. Collective where there are copies."""
    dim, partition = layout.dim, layout.partition
    assert dim is not None
    assert partition is not None
    for padding in partition.padding(rank):
        grad.narrow(dim, padding.start, len(padding)).zero_()
    if not partition.shared:
        return
    shape = list(grad.shape)
    shape[dim] = sum(map(len, partition.shared))
    wide = torch.float64 if grad.dtype is torch.float64 else torch.float32
    total = grad.new_zeros(shape, dtype=wide)
    segments = partition.shared_segments(rank)
    for s in segments:
        total.narrow(dim, s.whole, s.length).add_(grad.narrow(dim, s.local, s.length))
    total = ops.all_reduce(total, group)
    for s in segments:
        grad.narrow(dim, s.local, s.length).copy_(total.narrow(dim, s.whole, s.length))


class _SharedGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, parameter: Tensor, layout: ParameterLayout, rank: int, group: str
    ) -> Tensor:
        ctx.layout, ctx.rank, ctx.group = layout, rank, group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        grad = grad.clone()
        share_gradient_(grad, ctx.layout, ctx.rank, ctx.group)
        return grad, None, None, None
