"""What moves the parts of a sequence between ranks: messages, and the agreement before them.

Strategies are written against `Transport` alone. A real group has one over its own means (our
communicator's messages for CPU memory, torch.distributed's for the rest: those of NCCL run on a
stream of their own, beside the kernels; keys may be fetched from a shelf); simulator.py has one
between threads of one process.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pyparallel.attention.shelf import Shelf
from pyparallel.comm import Communicator, Recv, Send
from pyparallel.errors import Closed, InvalidArgument
from pyparallel.ops.engines import Alone, Native, Torch, raised
from pyparallel.ops.groups import seat_of

__all__ = ["Lone", "Message", "Traffic", "Transport", "transport_of"]


@dataclass
class Message:
    """A tensor that goes to, or comes from, `peer`. One to oneself, or empty, is not sent."""

    peer: int
    tensor: Tensor


@dataclass
class Traffic:
    """What this rank has sent and received: for tests, and for those who wonder."""

    messages: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


class Transport(Protocol):
    """One rank's means of moving tensors. Every rank makes matching calls."""

    rank: int
    world_size: int
    traffic: Traffic
    shelf: Shelf | None  # where peers fetch keys; None, or a shelf that is none: they are sent

    def agree(self, note: str, facts: Sequence[int]) -> list[list[int]]:
        """Every rank's integers. Where the ranks' notes differ, or one refuses, all raise."""

    def refused(self, op: str, error: Exception) -> Exception:
        """Tells the other ranks that this one cannot call; gives what to raise here."""

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int
    ) -> Callable[[], None]:
        """Starts messages; the call returned waits for them. Between two ranks and of one tag they
        arrive in the order of their sending. Tensors may have any strides."""

    def gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """All ranks' `x` joined along `dim`."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place."""


def _matter(messages: Sequence[Message]) -> list[Message]:
    return [m for m in messages if m.tensor.numel()]


def _counted(traffic: Traffic, sends: Sequence[Message], receives: Sequence[Message]) -> None:
    traffic.messages += len(sends)
    traffic.bytes_sent += sum(m.tensor.nbytes for m in sends)
    traffic.bytes_received += sum(m.tensor.nbytes for m in receives)


class Lone:
    """A group of one rank."""

    rank = 0
    world_size = 1
    shelf: Shelf | None = None

    def __init__(self) -> None:
        self.traffic = Traffic()

    def agree(self, note: str, facts: Sequence[int]) -> list[list[int]]:
        return [list(facts)]

    def refused(self, op: str, error: Exception) -> Exception:
        return raised(error, f"{op}, group of one rank")

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int
    ) -> Callable[[], None]:
        assert not _matter([*sends, *receives]), "a group of one rank has nobody to write to"
        return lambda: None

    def gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        return x

    def all_reduce(self, x: Tensor) -> Tensor:
        return x


class _Agreeing:
    """A transport whose ranks agree over a communicator in CPU memory."""

    def __init__(self, meeting: Communicator, shelf: Shelf) -> None:
        self._meeting = meeting
        self.shelf: Shelf | None = shelf
        self.rank = meeting.rank
        self.world_size = meeting.world_size
        self.traffic = Traffic()

    def agree(self, note: str, facts: Sequence[int]) -> list[list[int]]:
        self._meeting.note(note)
        mine = torch.tensor([list(facts)], dtype=torch.int64)
        together: list[list[int]] = self._meeting.all_gather(mine).tolist()
        return together

    def refused(self, op: str, error: Exception) -> Exception:
        return self._meeting._refused(op, error)


class OverCommunicator(_Agreeing):
    """CPU tensors of a group that has a communicator of ours."""

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int
    ) -> Callable[[], None]:
        sends, receives = _matter(sends), _matter(receives)
        _counted(self.traffic, sends, receives)
        works = self._meeting.batch(
            [
                *(Recv(m.tensor, m.peer, tag) for m in receives),
                *(Send(m.tensor, m.peer, tag) for m in sends),
            ]
        )

        def wait() -> None:
            for work in works:
                work.wait()

        return wait

    def gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        joined: Tensor = self._meeting.all_gather(x, dim=dim, sizes=list(sizes))
        return joined

    def all_reduce(self, x: Tensor) -> Tensor:
        reduced: Tensor = self._meeting.all_reduce(x)
        return reduced


class OverTorch(_Agreeing):
    """Tensors of any device, through the process group's own backend."""

    def __init__(self, engine: Torch, shelf: Shelf) -> None:
        super().__init__(engine.agreement, shelf)
        self._owned = weakref.ref(engine)

    @property
    def _engine(self) -> Torch:
        engine = self._owned()
        if engine is None:
            raise Closed("the process group of this call has been destroyed")
        return engine

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int
    ) -> Callable[[], None]:
        sends, receives = _matter(sends), _matter(receives)
        _counted(self.traffic, sends, receives)
        if not sends and not receives:
            return lambda: None
        group = self._engine._group()
        if group is None:
            raise Closed("the process group of this call has been destroyed")
        outgoing = [m.tensor.contiguous() for m in sends]
        incoming = [
            m.tensor if m.tensor.is_contiguous() else torch.empty_like(
                m.tensor, memory_format=torch.contiguous_format
            )
            for m in receives
        ]  # fmt: skip
        # Receives first, by peer, so that all backends can start them at once.
        operations = [
            dist.P2POp(dist.irecv, x, group=group, tag=tag, group_peer=m.peer)
            for x, m in zip(incoming, receives, strict=True)
        ] + [
            dist.P2POp(dist.isend, x, group=group, tag=tag, group_peer=m.peer)
            for x, m in zip(outgoing, sends, strict=True)
        ]
        works = dist.batch_isend_irecv(operations)

        def wait() -> None:
            for work in works:
                work.wait()
            for x, m in zip(incoming, receives, strict=True):
                if x is not m.tensor:
                    m.tensor.copy_(x)
            outgoing.clear()

        return wait

    def gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        return self._engine.all_gather(x, dim, sizes)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._engine.all_reduce(x, "sum")


_kept: "weakref.WeakKeyDictionary[Any, Transport]" = weakref.WeakKeyDictionary()


def transport_of(group: Any, device: torch.device) -> Transport:
    """What moves tensors of `device` in `group`, which may be a simulated one.

    Raises:
        ValueError: `group` is none; a Communicator, and the tensors are not in CPU memory.
    """
    own = getattr(group, "attention_transport", None)
    if own is not None:
        transport: Transport = own
        return transport
    seat = seat_of(group)
    engine = seat.engine if device.type in ("cpu", "meta") else seat._device_engine
    found = _kept.get(engine)
    if found is None:
        if isinstance(engine, Alone):
            found = Lone()
        elif isinstance(engine, Native):
            found = OverCommunicator(engine.communicator, Shelf(seat))
        elif isinstance(engine, Torch):
            found = OverTorch(engine, Shelf(seat))
        else:
            raise InvalidArgument(
                f"group {seat.name}: a Communicator moves CPU memory, and these tensors are on "
                f"{device}; pass a torch.distributed ProcessGroup that serves them"
            )
        _kept[engine] = found
    return found
