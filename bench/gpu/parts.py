"""The parts of a run on an accelerator, most valuable first: what, how, how long at most, and why.

To add one: a `Part` here. A part that has a result writes JSON to the file named by the environment
variable BENCH_GPU_RESULT; what it prints is kept as well. Standard library only: the driver starts
before anything is built.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

PYTHON = sys.executable
# Eight minutes, less what the driver itself and a killed part need to end.
TOTAL_SECONDS = 465.0


@dataclass(frozen=True)
class Part:
    """`needs` names parts that must have ended well: without them this one is skipped.

    `architecture`: builds for the one that the part "machine" found.
    """

    name: str
    why: str
    command: tuple[str, ...]
    seconds: float
    needs: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    architecture: bool = False


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (PYTHON, "-m", name, *arguments)


PARTS = (
    Part(
        "machine",
        "which GPU, driver, compiler and packages the rest speaks of",
        _module("bench.gpu.facts"),
        40,
    ),
    Part(
        "build",
        "core, bindings and torch backend; the kernels for this GPU's architecture",
        (PYTHON, "setup.py", "--quiet", "build_ext", "--inplace"),
        200,
        environment={"PYPARALLEL_CUDA": "1", "PYPARALLEL_TORCH": "1"},
        architecture=True,
    ),
    Part(
        "kernel_tests",
        "the kernels are right on a GPU: values, bits, graphs, failures",
        _module("bench.gpu.tests", "tests/cuda/test_gpu.py"),
        90,
        needs=("build",),
    ),
    Part(
        "kernels",
        "every kernel, 4 KB to 4 MB, 2 to 8 ranks as streams, eager and captured",
        _module("bench.gpu.kernels"),
        100,
        needs=("build",),
    ),
    Part(
        "attention",
        "the attention kernels: right, how fast, and what a ring of eight costs beside transfers",
        _module("bench.gpu.attention"),
        90,
        needs=("build",),
    ),
    Part(
        "doctor",
        "what the library says of this machine",
        _module("pyparallel", "doctor", "--json"),
        30,
        needs=("build",),
    ),
    Part(
        "nccl_ranks",
        "our NCCL binding, two processes on one GPU (NCCL 2.30 and later)",
        _module("bench.gpu.nccl_ranks"),
        60,
        needs=("build",),
        environment={"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "8"},
    ),
    Part(
        "static",
        "registers, residency and loads under way of the compiled kernels",
        _module("bench.static.cuda_kernels", "--arch", "90a"),
        40,
    ),
)
