"""Contestants behind torch.distributed: gloo, NCCL and our own backend, called in the same way.

Every op goes through the public torch.distributed function that a user would call for it, so the
front end's own cost is in everybody's time.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from bench.case import Case
from bench.ops import ROOT
from bench.providers.base import Buffers, Provider, Setup

Call = Callable[[], object]
# Newer torch has new names for these two and warns at each call of the old ones.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TorchDistributed(Provider):
    backend = ""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        timeout = timedelta(seconds=setup.timeout)
        if not dist.is_initialized():
            store = dist.FileStore(str(setup.scratch / "store"), setup.world)
            dist.init_process_group(
                "gloo", store=store, rank=setup.rank, world_size=setup.world, timeout=timeout
            )
        self.group = dist.new_group(backend=self.backend, timeout=timeout)

    def all_reduce(self, case: Case, b: Buffers) -> Call:
        return lambda: dist.all_reduce(b.x, group=self.group)

    def reduce(self, case: Case, b: Buffers) -> Call:
        return lambda: dist.reduce(b.x, ROOT, group=self.group)

    def reduce_scatter(self, case: Case, b: Buffers) -> Call:
        return lambda: reduce_scatter_flat(b.y, b.x, group=self.group)

    def reduce_scatter_uneven(self, case: Case, b: Buffers) -> Call:
        parts = b.x_parts()
        return lambda: dist.reduce_scatter(b.y, parts, group=self.group)

    def all_gather(self, case: Case, b: Buffers) -> Call:
        return lambda: all_gather_flat(b.y, b.x, group=self.group)

    def all_gather_uneven(self, case: Case, b: Buffers) -> Call:
        parts = b.y_parts()
        return lambda: dist.all_gather(parts, b.x, group=self.group)

    def all_to_all(self, case: Case, b: Buffers) -> Call:
        return lambda: dist.all_to_all_single(b.y, b.x, group=self.group)

    def all_to_all_uneven(self, case: Case, b: Buffers) -> Call:
        to, fro = list(b.layout.in_splits), list(b.layout.out_splits)
        return lambda: dist.all_to_all_single(b.y, b.x, fro, to, group=self.group)

    def broadcast(self, case: Case, b: Buffers) -> Call:
        return lambda: dist.broadcast(b.x, ROOT, group=self.group)

    def scatter(self, case: Case, b: Buffers) -> Call:
        parts = b.x_parts() if self.setup.rank == ROOT else None
        return lambda: dist.scatter(b.y, parts, ROOT, group=self.group)

    def gather(self, case: Case, b: Buffers) -> Call:
        parts = b.y_parts() if self.setup.rank == ROOT else None
        return lambda: dist.gather(b.x, parts, ROOT, group=self.group)

    def barrier(self, case: Case, b: Buffers) -> Call:
        return lambda: dist.barrier(group=self.group)

    def send_recv(self, case: Case, b: Buffers) -> Call:
        after, before = self.setup.neighbours

        def first() -> None:
            dist.send(b.x, after, group=self.group)
            dist.recv(b.y, before, group=self.group)

        def other() -> None:
            dist.recv(b.y, before, group=self.group)
            dist.send(b.y, after, group=self.group)

        return first if self.setup.rank == 0 else other

    def exchange(self, case: Case, b: Buffers) -> Call:
        after, before = self.setup.neighbours
        ops = [
            dist.P2POp(dist.isend, b.x, after, self.group),
            dist.P2POp(dist.irecv, b.y, before, self.group),
        ]

        def call() -> None:
            for work in dist.batch_isend_irecv(ops):
                work.wait()

        return call

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class Ours(TorchDistributed):
    name = "torch"
    backend = "pyparallel"

    def __init__(self, setup: Setup) -> None:
        import pyparallel.comm  # noqa: F401  (registers the backend)

        super().__init__(setup)
        self.wide_sum = setup.device.type == "cpu"  # on CUDA, NCCL rounds as it does


class Gloo(TorchDistributed):
    name = "gloo"
    backend = "gloo"

    def all_gather_uneven(self, case: Case, b: Buffers) -> Call:
        """gloo refuses unequal shares: what its users do is pad to the largest and cut."""
        shares = b.layout.out_splits
        padded = b.x.new_zeros(max(shares))
        gathered = b.x.new_empty(len(shares) * max(shares))
        filled = padded[: b.x.numel()]
        wanted = [
            part[:share] for part, share in zip(gathered.split(max(shares)), shares, strict=True)
        ]
        outputs = b.y_parts()

        def call() -> None:
            filled.copy_(b.x)
            all_gather_flat(gathered, padded, group=self.group)
            for output, part in zip(outputs, wanted, strict=True):
                output.copy_(part)

        return call

    def note(self, case: Case) -> str:
        if case.op == "all_gather_uneven":
            return "gloo has no uneven all_gather: padded to the largest share and cut"
        return ""


class Nccl(TorchDistributed):
    name = "nccl"
    backend = "nccl"
