"""Contestant: pyparallel.comm.Communicator, called directly."""

from __future__ import annotations

from collections.abc import Callable

from bench.case import Case
from bench.ops import ROOT
from bench.providers.base import Buffers, Provider, Setup
from pyparallel.comm import Communicator, Recv, Send

Call = Callable[[], object]
_BUFFERED = 256 << 10  # exchanges up to here are plain sends and receives, larger ones a batch


class Direct(Provider):
    name = "direct"
    wide_sum = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.comm = Communicator.from_file(
            setup.scratch / "direct",
            setup.rank,
            setup.world,
            name="bench",
            timeout=setup.timeout,
        )

    def all_reduce(self, case: Case, b: Buffers) -> Call:
        return lambda: self.comm.all_reduce(b.x)

    def reduce(self, case: Case, b: Buffers) -> Call:
        return lambda: self.comm.reduce(b.x, root=ROOT)

    def reduce_scatter(self, case: Case, b: Buffers) -> Call:
        return lambda: self.comm.reduce_scatter(b.x, out=b.y)

    def reduce_scatter_uneven(self, case: Case, b: Buffers) -> Call:
        sizes = list(b.layout.in_splits)
        return lambda: self.comm.reduce_scatter(b.x, sizes=sizes, out=b.y)

    def all_gather(self, case: Case, b: Buffers) -> Call:
        return lambda: self.comm.all_gather(b.x, out=b.y)

    def all_gather_uneven(self, case: Case, b: Buffers) -> Call:
        sizes = list(b.layout.out_splits)
        return lambda: self.comm.all_gather(b.x, sizes=sizes, out=b.y)

    def all_to_all(self, case: Case, b: Buffers) -> Call:
        return lambda: self.comm.all_to_all(b.x, out=b.y)

    def all_to_all_uneven(self, case: Case, b: Buffers) -> Call:
        to, fro = list(b.layout.in_splits), list(b.layout.out_splits)
        return lambda: self.comm.all_to_all(b.x, in_sizes=to, out_sizes=fro, out=b.y)

    def broadcast(self, case: Case, b: Buffers) -> Call:
        return lambda: self.comm.broadcast(b.x, ROOT)

    def scatter(self, case: Case, b: Buffers) -> Call:
        x = b.x if self.setup.rank == ROOT else None
        return lambda: self.comm.scatter(x, b.y, root=ROOT)

    def gather(self, case: Case, b: Buffers) -> Call:
        y = b.y if self.setup.rank == ROOT else None
        return lambda: self.comm.gather(b.x, root=ROOT, out=y)

    def barrier(self, case: Case, b: Buffers) -> Call:
        return self.comm.barrier

    def send_recv(self, case: Case, b: Buffers) -> Call:
        after, before = self.setup.neighbours

        def first() -> None:
            self.comm.send(b.x, after)
            self.comm.recv(b.y, before)

        def other() -> None:
            self.comm.recv(b.y, before)
            self.comm.send(b.y, after)

        return first if self.setup.rank == 0 else other

    def exchange(self, case: Case, b: Buffers) -> Call:
        after, before = self.setup.neighbours

        ops: list[Send | Recv] = [Send(b.x, after), Recv(b.y, before)]

        def batched() -> None:
            for work in self.comm.batch(ops):
                work.wait()

        def one_by_one() -> None:
            self.comm.send(b.x, after)  # buffered: not held up by the other's own send
            self.comm.recv(b.y, before)

        return one_by_one if case.nbytes <= _BUFFERED else batched

    def close(self) -> None:
        self.comm.close()
