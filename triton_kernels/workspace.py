"""Memory of equal layout on every rank, as kernels and launchers take it."""

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from .signals import LINE_BYTES, new_status

Layout = TypeVar("Layout")


@dataclass
class Workspace(Generic[Layout]):
    """A rank's view of the memory that a family of kernels talks through.

    It belongs to one (group, generation). A layout says what lies where; it has `nbytes`, and is
    equal on all ranks. Calls on one workspace are ordered on each rank: one stream, or events.
    """

    layout: Layout
    rank: int
    peers: tuple[torch.Tensor, ...]  # uint8 [nbytes] of every rank; peers[rank] is our own
    table: torch.Tensor  # int64 [world] on the device: their addresses
    status: torch.Tensor  # the status page of signals.py
    turn: int = 0  # calls made, on the host; launchers count it
    _words: tuple[torch.Tensor, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._words = tuple(memory.view(torch.int64) for memory in self.peers)

    @classmethod
    def make(cls, memory: Any, layout: Any) -> "Workspace[Any]":
        """Cuts a workspace from a pyparallel.comm.SymmetricMemory. Collective.

        All zero when it returns, on every rank. Its status page is pinned memory of the host where
        the kernels run on CUDA.
        """
        own = memory.empty(layout.nbytes, dtype=torch.uint8, alignment=LINE_BYTES)
        own.zero_()
        memory.barrier()
        return cls(
            layout,
            memory.rank,
            tuple(memory.peer(rank, own) for rank in range(memory.world_size)),
            memory.pointers(own),
            new_status(memory.device),
        )

    @property
    def world(self) -> int:
        return len(self.peers)

    @property
    def seat(self) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """(table, status, rank, world), as kernels take them one after another."""
        return self.table, self.status, self.rank, self.world

    @property
    def memory(self) -> torch.Tensor:
        """This rank's own bytes."""
        return self.peers[self.rank]

    def word(self, rank: int, offset: int) -> torch.Tensor:
        """The 64-bit word at a byte offset of a rank's memory, as a tensor of one element."""
        return self._words[rank].narrow(0, offset // 8, 1)
