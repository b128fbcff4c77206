"""What moves an op's data between ranks: our communicator, torch's collectives, or nothing.

An engine's calls have checked arguments and plain results: the op has seen to both. `all_gather`
and `reduce_scatter` take any dim and any sizes, `sizes[r]` being rank r's, all alike or not.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pyparallel.comm import Communicator
from pyparallel.errors import Closed, InvalidArgument, Unsupported
from pyparallel.ops.host_path import HostPath

__all__ = ["SYMMETRIC", "Alone", "Engine", "Native", "Torch", "Unserved"]


SYMMETRIC = ("symmetric", "chunked")  # the algorithms of host_path.py


class Engine(Protocol):
    """One rank's means of communication."""

    rank: int
    world_size: int
    meeting: Communicator | None  # where ranks agree; None: there is nobody to agree with
    host_path: "HostPath | None"  # None: no CPU tensor may take it, see barred()

    def barred(self) -> Mapping[str, str]:
        """Algorithms that CPU tensors cannot take in this group, and why. Collective at first."""

    def note(self, text: str) -> None:
        """What the next call is part of: compared between ranks, all raise where it differs."""

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """All ranks' `x`, joined along `dim`: a new tensor."""

    def reduce_scatter(
        self, x: Tensor, dim: int, sizes: Sequence[int], out: Tensor | None = None
    ) -> Tensor:
        """This rank's shard of the sum of all ranks' `x`: a new tensor, or `out` where that saves
        a copy."""

    def all_reduce(self, x: Tensor, op: str, out: Tensor | None = None) -> Tensor:
        """Reduces `x` in place, or into `out` where that saves a copy, alike on all ranks."""

    def refused(self, op: str, error: Exception) -> Exception:
        """Tells the other ranks that this one cannot call; gives what to raise here."""


def raised(error: Exception, where: str) -> Exception:
    """The error with the place put before its text; one of arguments stays a ValueError."""
    kept = isinstance(error, (TypeError, ValueError, Unsupported))
    kind = type(error) if kept else InvalidArgument
    return kind(f"{where}: {error}")


class Alone:
    """A group of one rank: what is gathered or reduced is what there is."""

    rank = 0
    world_size = 1
    meeting: Communicator | None = None
    host_path: HostPath | None = None

    def barred(self) -> Mapping[str, str]:
        return {}

    def note(self, text: str) -> None:
        pass

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    def reduce_scatter(
        self, x: Tensor, dim: int, sizes: Sequence[int], out: Tensor | None = None
    ) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    def all_reduce(self, x: Tensor, op: str, out: Tensor | None = None) -> Tensor:
        return x

    def refused(self, op: str, error: Exception) -> Exception:
        return raised(error, f"{op}, group of one rank")


class Native:
    """Our communicator: shared memory on a host, gloo between hosts."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.rank = communicator.rank
        self.world_size = communicator.world_size
        self.note = communicator._core.note  # a method of the communicator would keep it alive
        self.meeting: Communicator | None = communicator
        self.host_path: HostPath | None = HostPath(communicator)

    def barred(self) -> Mapping[str, str]:
        if self.communicator.spans_hosts():
            return dict.fromkeys(SYMMETRIC, "the group's ranks are on several hosts")
        return {}

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        gathered: Tensor = self.communicator.all_gather(x, dim=dim, sizes=list(sizes))
        return gathered

    def reduce_scatter(
        self, x: Tensor, dim: int, sizes: Sequence[int], out: Tensor | None = None
    ) -> Tensor:
        shard: Tensor = self.communicator.reduce_scatter(x, dim=dim, sizes=list(sizes), out=out)
        return shard

    def all_reduce(self, x: Tensor, op: str, out: Tensor | None = None) -> Tensor:
        if out is None:
            reduced: Tensor = self.communicator.all_reduce(x, op)
            return reduced
        self.communicator.all_reduce(x, op, out=out)
        return out

    def refused(self, op: str, error: Exception) -> Exception:
        return self.communicator._refused(op, error)


_TORCH_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


class Unserved:
    """CUDA tensors of a bare Communicator: fused kernels may take them, collectives cannot."""

    host_path: HostPath | None = None

    def __init__(self, communicator: Communicator) -> None:
        self.meeting: Communicator | None = communicator
        self.rank = communicator.rank
        self.world_size = communicator.world_size
        self.note = communicator._core.note
        self._name = communicator.name

    def barred(self) -> Mapping[str, str]:
        return {}

    def _error(self, op: str) -> Exception:
        """Told to the other ranks, whose tensors may be where they should."""
        error = InvalidArgument(
            f"group {self._name}: a Communicator moves CPU memory; for CUDA tensors pass a "
            "torch.distributed ProcessGroup that serves them, or algorithm= of a fused kernel"
        )
        return self.refused(op, error)

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        raise self._error("all_gather")

    def reduce_scatter(
        self, x: Tensor, dim: int, sizes: Sequence[int], out: Tensor | None = None
    ) -> Tensor:
        raise self._error("reduce_scatter")

    def all_reduce(self, x: Tensor, op: str, out: Tensor | None = None) -> Tensor:
        raise self._error("all_reduce")

    def refused(self, op: str, error: Exception) -> Exception:
        assert self.meeting is not None
        return self.meeting._refused(op, error)


# torch 2.13 renamed them, and warns at the old names.
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Torch:
    """A ProcessGroup of another backend: torch's collectives, after an agreement of our own.

    `agreement` joins the same ranks; every call passes through it once, so that a rank that cannot
    make its call is heard by all before anything moves.
    """

    def __init__(self, group: dist.ProcessGroup, agreement: Communicator) -> None:
        self._group = weakref.ref(group)
        self.meeting: Communicator | None = agreement
        self.agreement = agreement
        self.host_path: HostPath | None = None
        self._bars = f"the group's data go through its own backend, {group.name()}"
        self.rank = agreement.rank
        self.world_size = agreement.world_size

    def barred(self) -> Mapping[str, str]:
        return dict.fromkeys(SYMMETRIC, self._bars)

    def note(self, text: str) -> None:
        self.agreement.note(text)

    def _agreed(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise Closed("the process group of this call has been destroyed")
        self.agreement.barrier()
        return group

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        group = self._agreed()
        most = max(sizes)
        front = x.movedim(dim, 0)
        mine = front.new_empty((most, *front.shape[1:]))
        mine[: front.shape[0]].copy_(front)
        whole = mine.new_empty((most * self.world_size, *mine.shape[1:]))
        if whole.numel():
            _ALL_GATHER(whole, mine, group=group)
        rows = whole.view(self.world_size, most, *mine.shape[1:])
        joined = torch.cat([rows[r, :n] for r, n in enumerate(sizes)])
        return joined.movedim(0, dim).contiguous()

    def reduce_scatter(
        self, x: Tensor, dim: int, sizes: Sequence[int], out: Tensor | None = None
    ) -> Tensor:
        group = self._agreed()
        most = max(sizes)
        front = x.movedim(dim, 0)
        whole = front.new_zeros((self.world_size, most, *front.shape[1:]))
        for r, shard in enumerate(front.split(list(sizes))):
            whole[r, : sizes[r]].copy_(shard)
        mine = whole.new_empty((most, *front.shape[1:]))
        if mine.numel():
            _REDUCE_SCATTER(mine, whole.flatten(0, 1), group=group)
        return mine[: sizes[self.rank]].movedim(0, dim).contiguous()

    def all_reduce(self, x: Tensor, op: str, out: Tensor | None = None) -> Tensor:
        group = self._agreed()
        array = x.contiguous()
        if array.numel():
            dist.all_reduce(array, _TORCH_OPS[op], group=group)
        if array is not x:
            x.copy_(array)
        return x

    def refused(self, op: str, error: Exception) -> Exception:
        return self.agreement._refused(op, error)
