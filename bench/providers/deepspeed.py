"""Contestant: DeepSpeed's all-reduce over shared memory (its op builder ShareMemCommBuilder).

It reduces float32 and 16-bit floats in place and has no other op. It names its shared memory after
MASTER_ADDR and MASTER_PORT and would take an object left over under that name for its own, so the
run gives it a name of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from bench.case import Case
from bench.providers.base import Buffers, Provider, Setup


class DeepSpeed(Provider):
    name = "deepspeed"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        os.environ.update(
            LOCAL_SIZE=str(setup.world), MASTER_ADDR="bench", MASTER_PORT=setup.scratch.name
        )
        from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

        module = ShareMemCommBuilder().load(verbose=False)  # compiles it at the first use
        if module.vector_kernel_level() < 2:
            raise RuntimeError("DeepSpeed's all-reduce needs AVX-512 (bw) here")
        module.initialize(setup.world, setup.rank)

    def all_reduce(self, case: Case, b: Buffers) -> Callable[[], object]:
        op = torch.ops.deepspeed.inference_all_reduce_
        return lambda: op(b.x)

    def close(self) -> None:
        """It leaves its shared memory behind; the names are this run's own."""
        for left in Path("/dev/shm").glob(f"deepspeed_*_bench_{self.setup.scratch.name}_*"):
            left.unlink(missing_ok=True)

    def note(self, case: Case) -> str:
        return "DeepSpeed's shared-memory kernel, called as torch.ops.deepspeed"
