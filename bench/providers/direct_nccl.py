"""Contestant: pyparallel.comm.nccl.NcclCommunicator, our binding of NCCL, called directly."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from bench.case import Case
from bench.ops import ROOT
from bench.providers.base import Buffers, Provider, Setup
from pyparallel.comm import nccl

Call = Callable[[], object]


class DirectNccl(Provider):
    name = "direct"
    lacks = ("barrier",)  # NCCL orders streams, not processes

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.comm = nccl.NcclCommunicator.from_store(
            dist.FileStore(str(setup.scratch / "direct"), setup.world),
            setup.rank,
            setup.world,
            name="bench",
            timeout=setup.timeout,
            device=setup.device,
        )

    def all_reduce(self, case: Case, b: Buffers) -> Call:
        return lambda: self.comm.all_reduce(b.x)

    def reduce(self, case: Case, b: Buffers) -> Call:
        return lambda: self.comm.reduce(b.x, ROOT)

    def reduce_scatter(self, case: Case, b: Buffers) -> Call:
        return lambda: self.comm.reduce_scatter(b.x, b.y)

    def reduce_scatter_uneven(self, case: Case, b: Buffers) -> Call:
        sizes = b.layout.in_splits
        return lambda: self.comm.reduce_scatter(b.x, b.y, sizes=sizes)

    def all_gather(self, case: Case, b: Buffers) -> Call:
        return lambda: self.comm.all_gather(b.x, b.y)

    def all_gather_uneven(self, case: Case, b: Buffers) -> Call:
        sizes = b.layout.out_splits
        return lambda: self.comm.all_gather(b.x, b.y, sizes=sizes)

    def all_to_all(self, case: Case, b: Buffers) -> Call:
        return lambda: self.comm.all_to_all(b.x, b.y)

    def all_to_all_uneven(self, case: Case, b: Buffers) -> Call:
        to, fro = b.layout.in_splits, b.layout.out_splits
        return lambda: self.comm.all_to_all(b.x, b.y, in_sizes=to, out_sizes=fro)

    def broadcast(self, case: Case, b: Buffers) -> Call:
        return lambda: self.comm.broadcast(b.x, ROOT)

    def scatter(self, case: Case, b: Buffers) -> Call:
        x = b.x if self.setup.rank == ROOT else None
        return lambda: self.comm.scatter(x, ROOT, b.y)

    def gather(self, case: Case, b: Buffers) -> Call:
        y = b.y if self.setup.rank == ROOT else None
        return lambda: self.comm.gather(b.x, ROOT, y)

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

        def call() -> None:
            with nccl.group():
                self.comm.send(b.x, after)
                self.comm.recv(b.y, before)

        return call

    def close(self) -> None:
        self.comm.close()
