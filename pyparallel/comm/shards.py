"""How a tensor falls into one shard per rank along a dimension, even or not."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor

from pyparallel.errors import InvalidArgument

# What `dim` is by default. Compared by identity, which cannot raise, whatever was passed: another
# zero only takes the longer way.
FIRST = 0


class Shards(NamedTuple):
    """Shards along `dim` of a whole of `shape`; shard r has `sizes[r]` of that dimension."""

    shape: tuple[int, ...]
    dim: int
    sizes: tuple[int, ...]

    @property
    def counts(self) -> list[int]:
        """Elements of each shard."""
        rest = prod(self.shape[: self.dim]) * prod(self.shape[self.dim + 1 :])
        return [size * rest for size in self.sizes]

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.sizes[rank], *self.shape[self.dim + 1 :])


def to_front(x: Tensor, dim: int) -> Tensor:
    """A view with `dim` first."""
    return x if dim == 0 else x.movedim(dim, 0)


def axis_of(shape: Sequence[int], dim: int, what: str) -> int:
    """`dim`, which may be negative, as an index of `shape`."""
    if not -len(shape) <= dim < len(shape):
        raise InvalidArgument(
            f"dim is {dim}, but {what} has shape {list(shape)}; "
            f"expected {-len(shape)} to {len(shape) - 1}"
        )
    return dim % len(shape)


def whole_from_shard(
    shard: Sequence[int], dim: int, sizes: Sequence[int] | None, rank: int, world_size: int
) -> Shards:
    """What shards like mine make together; without `sizes` all are as large as mine."""
    shape = tuple(shard) or (1,)
    dim = axis_of(shape, dim, "x")
    if sizes is None:
        sizes = [shape[dim]] * world_size
    else:
        _check_sizes(sizes, world_size, "sizes")
    if sizes[rank] != shape[dim]:
        raise InvalidArgument(
            f"sizes[{rank}] is {sizes[rank]}, but dim {dim} of this rank's x is {shape[dim]} "
            f"(shape {list(shape)}, sizes {list(sizes)})"
        )
    return Shards((*shape[:dim], sum(sizes), *shape[dim + 1 :]), dim, tuple(sizes))


def shards_of_whole(
    whole: Sequence[int],
    dim: int,
    sizes: Sequence[int] | None,
    world_size: int,
    what: str = "sizes",
) -> Shards:
    """The shards of a whole; without `sizes` they are equal, and must divide it."""
    shape = tuple(whole)
    if not shape:
        raise InvalidArgument("x is 0-dimensional and has no shards; pass x.reshape(1)")
    dim = axis_of(shape, dim, "x")
    if sizes is None:
        if shape[dim] % world_size:
            n, extra = divmod(shape[dim], world_size)
            uneven = [n + (r < extra) for r in range(world_size)]
            raise InvalidArgument(
                f"dim {dim} of x (shape {list(shape)}) does not divide by {world_size} ranks; "
                f"for uneven shards pass {what}, such as {what}={uneven}"
            )
        sizes = [shape[dim] // world_size] * world_size
    else:
        _check_sizes(sizes, world_size, what)
    if sum(sizes) != shape[dim]:
        raise InvalidArgument(
            f"{what} {list(sizes)} add up to {sum(sizes)}, but dim {dim} of x is {shape[dim]} "
            f"(shape {list(shape)})"
        )
    return Shards(shape, dim, tuple(sizes))


def _check_sizes(sizes: Sequence[int], world_size: int, what: str) -> None:
    if len(sizes) != world_size or any(not isinstance(n, int) or n < 0 for n in sizes):
        raise InvalidArgument(
            f"{what} is {list(sizes)}; expected {world_size} sizes, one per rank, none negative"
        )
