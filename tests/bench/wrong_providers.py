"""Contestants that stand in for ours: right ones, and ones wrong in a way of its own.

The ranks of a run import them by name (Options.replace): no flag of the product is for tests.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from bench.case import Case
from bench.gemm_case import GemmCase, GemmInputs
from bench.providers.base import Buffers, Setup, Unsupported
from bench.providers.gemm import Stock
from bench.providers.torch_distributed import Gloo


class Right(Gloo):
    """gloo under another name."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.name = "right"


class OneElementOff(Gloo):
    """Adds one to the last element of the last rank: right everywhere else."""

    name = "off"

    def all_reduce(self, case: Case, b: Buffers) -> Callable[[], object]:
        inner = super().all_reduce(case, b)

        def call() -> None:
            inner()
            if self.setup.rank == self.setup.world - 1:
                b.y[-1] += 1.0

        return call


class OwnRounding(Gloo):
    """Within the bound everywhere, but the last rank's bits differ: not the same on all ranks."""

    name = "rounding"

    def all_reduce(self, case: Case, b: Buffers) -> Callable[[], object]:
        inner = super().all_reduce(case, b)

        def call() -> None:
            inner()
            if self.setup.rank == self.setup.world - 1:
                b.y.mul_(1.0 + 2.0**-23)

        return call


class DoesNothing(Gloo):
    """Leaves the output as it was."""

    name = "nothing"

    def all_gather(self, case: Case, b: Buffers) -> Callable[[], object]:
        return lambda: None


class SwapsBlocks(Gloo):
    """Right data at the wrong places, by whole blocks."""

    name = "swaps"

    def all_gather(self, case: Case, b: Buffers) -> Callable[[], object]:
        inner = super().all_gather(case, b)

        def call() -> None:
            inner()
            b.y.copy_(b.y.roll(b.x.numel()))

        return call


class Raises(Gloo):
    name = "raises"

    def all_reduce(self, case: Case, b: Buffers) -> Callable[[], object]:
        raise RuntimeError("out of order today")


class Lacks(Gloo):
    name = "lacks"

    def all_reduce(self, case: Case, b: Buffers) -> Callable[[], object]:
        raise Unsupported("has no such thing")


class Dies(Gloo):
    """Rank 1 goes away in the middle of the run."""

    name = "dies"

    def all_reduce(self, case: Case, b: Buffers) -> Callable[[], object]:
        if self.setup.rank == 1:
            os._exit(7)
        return super().all_reduce(case, b)


class Hangs(Gloo):
    """Rank 1 never calls."""

    name = "hangs"

    def all_reduce(self, case: Case, b: Buffers) -> Callable[[], object]:
        if self.setup.rank == 1:
            time.sleep(60)
        return super().all_reduce(case, b)


class AddsOnEachRank(Stock):
    """A bias that every rank adds to its part, as if there were one rank."""

    name = "adds"
    stock = False

    def matmul_all_reduce(self, case: GemmCase, i: GemmInputs) -> Callable[[], torch.Tensor]:
        inner = super().matmul_all_reduce(case, i)
        return lambda: inner() + self.setup.world


class OwnBits(Stock):
    """Right to the last bit but one, which is another on each rank."""

    name = "bits"
    stock = False

    def matmul_all_reduce(self, case: GemmCase, i: GemmInputs) -> Callable[[], torch.Tensor]:
        inner = super().matmul_all_reduce(case, i)
        return lambda: inner() * (1.0 + self.setup.rank * 2.0**-23)
