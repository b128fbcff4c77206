"""Contestants of suite `gemm`: our ops, stock PyTorch's matmul and collective, and its halves.

Stock is what a user writes without us: torch.nn.functional.linear, then the collective of gloo
(NCCL on CUDA) through torch.distributed, or the gather first. Its outputs are allocated anew in
each call, as ours are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import linear

from bench.gemm_case import GemmCase, GemmInputs
from bench.providers.base import Provider, Setup, Unsupported
from bench.providers.torch_distributed import (
    Ours,
    TorchDistributed,
    all_gather_flat,
    reduce_scatter_flat,
)

Call = Callable[[], torch.Tensor]


class Ops(Provider):
    """pyparallel.ops, each op as one call on a group of ours."""

    name = "ops"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        from pyparallel import ops
        from pyparallel.comm import Communicator

        self._ops = ops
        self._inner: Any = None
        if setup.device.type == "cuda":
            self._inner = Ours(setup)
            self._group: Any = self._inner.group
        else:
            self._inner = self._group = Communicator.from_file(
                setup.scratch / "ops",
                setup.rank,
                setup.world,
                name="bench",
                timeout=setup.timeout,
            )

    def all_gather_matmul(self, case: GemmCase, i: GemmInputs) -> Call:
        return lambda: self._ops.all_gather_matmul(i.x, i.weight, self._group)

    def matmul_reduce_scatter(self, case: GemmCase, i: GemmInputs) -> Call:
        return lambda: self._ops.matmul_reduce_scatter(i.x, i.weight, self._group)

    def matmul_all_reduce(self, case: GemmCase, i: GemmInputs) -> Call:
        return lambda: self._ops.matmul_all_reduce(i.x, i.weight, self._group)

    def close(self) -> None:
        self._inner.close()


class Stock(TorchDistributed):
    """matmul + collective; the subclasses leave one of them out."""

    stock = True

    def __init__(self, setup: Setup) -> None:
        self.backend = "nccl" if setup.device.type == "cuda" else "gloo"
        if not self.name:
            self.name = f"matmul+{self.backend}"
        super().__init__(setup)

    def all_gather_matmul(self, case: GemmCase, i: GemmInputs) -> Call:
        return lambda: linear(self._gather(case, i.x), i.weight)

    def matmul_reduce_scatter(self, case: GemmCase, i: GemmInputs) -> Call:
        return lambda: self._scatter(case, linear(i.x, i.weight))

    def matmul_all_reduce(self, case: GemmCase, i: GemmInputs) -> Call:
        return lambda: self._reduce(linear(i.x, i.weight))

    def _gather(self, case: GemmCase, x: torch.Tensor) -> torch.Tensor:
        whole = x.new_empty((case.m, case.k))
        all_gather_flat(whole, x, group=self.group)
        return whole

    def _scatter(self, case: GemmCase, y: torch.Tensor) -> torch.Tensor:
        part = y.new_empty((case.m // case.world, case.n))
        reduce_scatter_flat(part, y, group=self.group)
        return part

    def _reduce(self, y: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(y, group=self.group)
        return y


class GemmAlone(Stock):
    """torch's matmul of the shape, without communication."""

    name = "gemm"

    def all_gather_matmul(self, case: GemmCase, i: GemmInputs) -> Call:
        whole = torch.cat([case.inputs(r, 0).x for r in range(case.world)]).to(i.x.device)
        return lambda: linear(whole, i.weight)

    def matmul_reduce_scatter(self, case: GemmCase, i: GemmInputs) -> Call:
        return lambda: linear(i.x, i.weight)

    matmul_all_reduce = matmul_reduce_scatter


class CollectiveAlone(Stock):
    """Stock's collective on an array of the shape. Zeros, so that sums in place stay finite."""

    name = "collective"

    def all_gather_matmul(self, case: GemmCase, i: GemmInputs) -> Call:
        return lambda: self._gather(case, i.x)

    def matmul_reduce_scatter(self, case: GemmCase, i: GemmInputs) -> Call:
        y = i.x.new_zeros((case.m, case.n))
        return lambda: self._scatter(case, y)

    def matmul_all_reduce(self, case: GemmCase, i: GemmInputs) -> Call:
        y = i.x.new_zeros((case.m, case.n))
        return lambda: self._reduce(y)


class SymmMem(Stock):
    """torch's fused ops over its symmetric memory (CUDA only)."""

    name = "symm_mem"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        import torch.distributed._symmetric_memory as symmetric

        symmetric.enable_symm_mem_for_group(self.group.group_name)

    def all_gather_matmul(self, case: GemmCase, i: GemmInputs) -> Call:
        fused = torch.ops.symm_mem.fused_all_gather_matmul
        name = self.group.group_name
        return lambda: fused(i.x, [i.weight.t()], 0, name)[1][0]

    def matmul_reduce_scatter(self, case: GemmCase, i: GemmInputs) -> Call:
        fused = torch.ops.symm_mem.fused_matmul_reduce_scatter
        name = self.group.group_name
        return lambda: fused(i.x, i.weight.t(), "sum", 0, name)

    def matmul_all_reduce(self, case: GemmCase, i: GemmInputs) -> Call:
        raise Unsupported("torch's symmetric memory has no fused matmul and all-reduce")
