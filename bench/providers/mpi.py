"""Contestant: MPI through mpi4py, in ranks that mpiexec started (MPICH is what we compare with).

MPI has no bfloat16: such data are moved as bytes, and sums of them are reported as unsupported.
Persistent or neighbourhood variants are not used: these are the calls that a user would write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.case import Case
from bench.ops import ROOT, starts
from bench.providers.base import Buffers, Provider, Setup, Unsupported

Call = Callable[[], object]


class Mpi(Provider):
    name = "mpich"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        from mpi4py import MPI

        self.mpi = MPI
        self.comm = MPI.COMM_WORLD.Dup()
        if (self.comm.rank, self.comm.size) != (setup.rank, setup.world):
            raise RuntimeError(
                f"MPI says rank {self.comm.rank} of {self.comm.size}, the benchmark rank "
                f"{setup.rank} of {setup.world}: is mpi4py built for the MPI whose mpiexec is used?"
            )

    def note(self, case: Case) -> str:
        return self.mpi.Get_library_version().splitlines()[0].replace("\t", " ").strip()

    def _array(self, tensor: torch.Tensor) -> tuple[np.ndarray, Any, int]:
        """The memory, its MPI type, and MPI items per element."""
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.uint8).numpy(), self.mpi.BYTE, 2
        return tensor.numpy(), self.mpi.FLOAT, 1

    def _summable(self, tensor: torch.Tensor) -> np.ndarray:
        if tensor.dtype == torch.bfloat16:
            raise Unsupported("MPI has no bfloat16 to add")
        return tensor.numpy()

    def _spec(self, tensor: torch.Tensor) -> list[Any]:
        array, kind, _ = self._array(tensor)
        return [array, kind]

    def _vector(self, tensor: torch.Tensor, splits: tuple[int, ...]) -> list[Any]:
        array, kind, per = self._array(tensor)
        counts = [split * per for split in splits]
        return [array, counts, [start * per for start in starts(splits)], kind]

    def all_reduce(self, case: Case, b: Buffers) -> Call:
        array = self._summable(b.x)
        return lambda: self.comm.Allreduce(self.mpi.IN_PLACE, array)

    def reduce(self, case: Case, b: Buffers) -> Call:
        array = self._summable(b.x)
        if self.setup.rank == ROOT:
            return lambda: self.comm.Reduce(self.mpi.IN_PLACE, array, root=ROOT)
        return lambda: self.comm.Reduce(array, None, root=ROOT)

    def reduce_scatter(self, case: Case, b: Buffers) -> Call:
        x, y = self._summable(b.x), self._summable(b.y)
        return lambda: self.comm.Reduce_scatter_block(x, y)

    def reduce_scatter_uneven(self, case: Case, b: Buffers) -> Call:
        x, y, counts = self._summable(b.x), self._summable(b.y), list(b.layout.in_splits)
        return lambda: self.comm.Reduce_scatter(x, y, recvcounts=counts)

    def all_gather(self, case: Case, b: Buffers) -> Call:
        x, y = self._spec(b.x), self._spec(b.y)
        return lambda: self.comm.Allgather(x, y)

    def all_gather_uneven(self, case: Case, b: Buffers) -> Call:
        x, y = self._spec(b.x), self._vector(b.y, b.layout.out_splits)
        return lambda: self.comm.Allgatherv(x, y)

    def all_to_all(self, case: Case, b: Buffers) -> Call:
        x, y = self._spec(b.x), self._spec(b.y)
        return lambda: self.comm.Alltoall(x, y)

    def all_to_all_uneven(self, case: Case, b: Buffers) -> Call:
        x, y = self._vector(b.x, b.layout.in_splits), self._vector(b.y, b.layout.out_splits)
        return lambda: self.comm.Alltoallv(x, y)

    def broadcast(self, case: Case, b: Buffers) -> Call:
        x = self._spec(b.x)
        return lambda: self.comm.Bcast(x, root=ROOT)

    def scatter(self, case: Case, b: Buffers) -> Call:
        x = self._spec(b.x) if self.setup.rank == ROOT else None
        y = self._spec(b.y)
        return lambda: self.comm.Scatter(x, y, root=ROOT)

    def gather(self, case: Case, b: Buffers) -> Call:
        y = self._spec(b.y) if self.setup.rank == ROOT else None
        x = self._spec(b.x)
        return lambda: self.comm.Gather(x, y, root=ROOT)

    def barrier(self, case: Case, b: Buffers) -> Call:
        return self.comm.Barrier

    def send_recv(self, case: Case, b: Buffers) -> Call:
        after, before = self.setup.neighbours
        x, y = self._spec(b.x), self._spec(b.y)

        def first() -> None:
            self.comm.Send(x, after)
            self.comm.Recv(y, before)

        def other() -> None:
            self.comm.Recv(y, before)
            self.comm.Send(y, after)

        return first if self.setup.rank == 0 else other

    def exchange(self, case: Case, b: Buffers) -> Call:
        after, before = self.setup.neighbours
        x, y = self._spec(b.x), self._spec(b.y)
        return lambda: self.comm.Sendrecv(x, after, recvbuf=y, source=before)

    def close(self) -> None:
        self.comm.Free()
