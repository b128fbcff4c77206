"""Send and receive between two ranks, matched by source and tag."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import Tensor

from pyparallel.comm.base import Base
from pyparallel.comm.reductions import DTYPES
from pyparallel.comm.tensors import (
    checked,
    checked_output,
    contiguous,
    give_back,
    is_plain,
    staging_for,
)
from pyparallel.comm.work import ReceiveWork, Work
from pyparallel.errors import InvalidArgument

_ANY_SOURCE = -1


@dataclass(frozen=True)
class Send:
    """A send in a `batch`."""

    tensor: Tensor
    peer: int
    tag: int = 0


@dataclass(frozen=True)
class Recv:
    """A receive in a `batch`; peer None takes a message from any rank."""

    tensor: Tensor
    peer: int | None = None
    tag: int = 0


class Messages(Base):
    """The point-to-point half of `Communicator`."""

    def send(
        self, x: Tensor, to: int, tag: int = 0, *, timeout: "float | timedelta | None" = None
    ) -> None:
        """Sends the elements of `x` to rank `to`.

        Returns when `x` may be changed again, which may be before they have arrived. Two ranks may
        both send first, then receive.
        """
        if timeout is None and self._fast.send(x, to, tag) is not None:
            return
        self._check_peer(to, "to")
        data = x if is_plain(x) else contiguous(checked(x, "x"))
        self._core.send(
            data.data_ptr(), data.numel(), DTYPES[data.dtype], to, tag, self._ms(timeout)
        )

    def recv(
        self,
        out: Tensor,
        source: int | None = None,
        tag: int = 0,
        *,
        timeout: "float | timedelta | None" = None,
    ) -> int:
        """Receives the oldest message with this tag from `source` (None: from any rank) into `out`.

        Number of elements and dtype must be the sender's. Gives the rank that sent.
        """
        if source is not None and timeout is None and self._fast.recv(out, source, tag) is not None:
            return source
        origin = self._source(source)
        target = out if is_plain(out) else checked_output(out, "out")
        staging = staging_for(target)
        sender = self._core.recv(
            staging.data_ptr(),
            staging.numel(),
            DTYPES[staging.dtype],
            origin,
            tag,
            self._ms(timeout),
        )
        give_back(staging, target)
        return sender

    def isend(self, x: Tensor, to: int, tag: int = 0) -> Work[None]:
        """Starts a send. `x` must not be changed until the work is over."""
        self._check_peer(to, "to")
        data = x if is_plain(x) else contiguous(checked(x, "x"))
        work = self._core.isend(data.data_ptr(), data.numel(), DTYPES[data.dtype], to, tag)
        return Work(work, None, owner=self._core, tensors=data, limit_ms=self._timeout_ms)

    def irecv(self, out: Tensor, source: int | None = None, tag: int = 0) -> Work[int]:
        """Starts a receive into `out`, valid after `wait()`, which gives the rank that sent."""
        origin = self._source(source)
        target = out if is_plain(out) else checked_output(out, "out")
        staging = staging_for(target)
        work = self._core.irecv(
            staging.data_ptr(), staging.numel(), DTYPES[staging.dtype], origin, tag
        )
        return ReceiveWork(
            work, owner=self._core, staging=staging, out=target, limit_ms=self._timeout_ms
        )

    def batch(self, ops: Sequence[Send | Recv]) -> list[Work[Any]]:
        """Starts sends and receives together, receives first; gives their works, in `ops`' order.

        Nothing is started unless every op is well-formed. Ranks need not batch alike: a batch on
        one rank may meet single sends and receives on another.
        """
        for op in ops:
            if isinstance(op, Send):
                self._check_peer(op.peer, "peer")
                checked(op.tensor, "tensor")
            elif isinstance(op, Recv):
                self._source(op.peer)
                checked_output(op.tensor, "tensor")
            else:
                raise InvalidArgument(f"batch takes Send and Recv, got {type(op).__name__}")
        works: dict[int, Work[Any]] = {}
        for i, op in enumerate(ops):
            if isinstance(op, Recv):
                works[i] = self.irecv(op.tensor, op.peer, op.tag)
        for i, op in enumerate(ops):
            if isinstance(op, Send):
                works[i] = self.isend(op.tensor, op.peer, op.tag)
        return [works[i] for i in range(len(ops))]

    def _check_peer(self, rank: int, what: str) -> None:
        if not isinstance(rank, int) or not 0 <= rank < self._world_size:
            raise InvalidArgument(
                f"{what} is {rank!r}; expected a rank of group {self._core.name}: "
                f"0 to {self._world_size - 1}"
            )

    def _source(self, source: int | None) -> int:
        if source is None:
            return _ANY_SOURCE
        self._check_peer(source, "source")
        return source
