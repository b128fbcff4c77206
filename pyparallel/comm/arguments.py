"""The tensors of a collective: lists with one per rank, and outputs made where none is given."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pyparallel.comm.base import Base
from pyparallel.comm.shards import Shards, shards_of_whole
from pyparallel.comm.tensors import check_like, checked, checked_output, tensor_list
from pyparallel.errors import InvalidArgument


class Arguments(Base):
    """Checks that need to know which rank this is, and of how many."""

    def _list_in(
        self, x: Sequence[Tensor], dim: int, sizes: Sequence[int] | None
    ) -> tuple[list[Tensor], list[int], tuple[int, ...]]:
        """A list of one tensor per rank: the tensors, their counts, the shape of this rank's."""
        _check_no_axis(dim, sizes, "x")
        tensors = tensor_list(x, "x", self._world_size, checked)
        return tensors, [t.numel() for t in tensors], tuple(tensors[self._rank].shape)

    def _list_out(
        self, x: Tensor, out: Sequence[Tensor], dim: int, sizes: Sequence[int] | None
    ) -> tuple[list[Tensor], list[int]]:
        """A list to receive every rank's `x`."""
        _check_no_axis(dim, sizes, "out")
        tensors = tensor_list(out, "out", self._world_size, checked_output, x.dtype)
        counts = [t.numel() for t in tensors]
        if counts[self._rank] != x.numel():
            raise InvalidArgument(
                f"out[{self._rank}] has {counts[self._rank]} elements, but receives this rank's x, "
                f"which has {x.numel()} (shape {list(x.shape)})"
            )
        return tensors, counts

    def _own(self, counts: int | list[int], like: Tensor) -> int:
        """Where this rank's shard begins in the whole, in bytes."""
        before = counts * self._rank if isinstance(counts, int) else sum(counts[: self._rank])
        return before * like.element_size()

    def _out(self, out: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if out is None:
            return torch.empty(tuple(shape), dtype=dtype)
        out = checked_output(out, "out")
        check_like(out, "out", shape, dtype)
        return out

    def _exchange(
        self,
        x: Tensor,
        dim: int,
        in_sizes: Sequence[int] | None,
        out_sizes: Sequence[int] | None,
    ) -> tuple[Shards, Shards]:
        """What an all_to_all sends, and what it receives."""
        if (in_sizes is None) != (out_sizes is None):
            raise InvalidArgument(
                f"in_sizes is {in_sizes} and out_sizes is {out_sizes}; pass both or neither"
            )
        sent = shards_of_whole(x.shape, dim, in_sizes, self._world_size, "in_sizes")
        if out_sizes is None:
            return sent, sent
        shape = list(x.shape)
        shape[sent.dim] = sum(out_sizes)
        return sent, shards_of_whole(shape, sent.dim, out_sizes, self._world_size, "out_sizes")


def _check_no_axis(dim: int, sizes: Sequence[int] | None, what: str) -> None:
    if dim != 0 or sizes is not None:
        raise InvalidArgument(f"a list {what} has no dim or sizes: the tensors say it all")


def blocks_of(addresses: list[int], counts: int | list[int]) -> int | list[int]:
    """One address stands for consecutive blocks."""
    listed = isinstance(counts, list) and len(counts) == len(addresses)
    return addresses if listed else addresses[0]
