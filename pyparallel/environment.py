"""Every environment variable of this project, in one table.

The native core reads its own in csrc/base/env.h; docs/environment.md is this table for people. A
test holds the three together.
"""

from dataclasses import dataclass

__all__ = ["VARIABLES", "Variable"]


@dataclass(frozen=True)
class Variable:
    """One variable: what it may be, what holds when it is unset, and what it does."""

    name: str
    values: str
    default: str
    effect: str


VARIABLES = tuple(
    Variable(*row)
    for row in (
        (
            "PYPARALLEL_ALGORITHM",
            "an algorithm, or OP=ALGORITHM with commas",
            "the fastest known (docs/explain.md)",
            "run: how the ops of a group compute, as rank 0 has it; explain() lists the names",
        ),
        (
            "PYPARALLEL_ATTENTION_ROLES",
            "0 or 1",
            "0",
            "run: 1 takes the attention forward with warp roles on sm_90, where it fits",
        ),
        (
            "PYPARALLEL_CUDA",
            "0, 1 or auto",
            "auto",
            "build: leave the CUDA kernels out, require them, or build them where nvcc is found",
        ),
        (
            "PYPARALLEL_CUDA_ARCHS",
            "numbers, as in 80;90a",
            "those of 80;90a;100a that nvcc knows",
            "build: architectures of the CUDA kernels",
        ),
        (
            "PYPARALLEL_CUDA_LIB",
            "path",
            "libpyparallel_cuda.so beside libpyparallel.so",
            "run: the library of CUDA kernels",
        ),
        (
            "PYPARALLEL_HOST_ID",
            "any text",
            "boot id and network namespace",
            "run: ranks with the same text are taken to share a host",
        ),
        (
            "PYPARALLEL_NCCL_LIB",
            "path",
            "the first found (docs/nccl.md)",
            "run: the NCCL library to load",
        ),
        (
            "PYPARALLEL_RULE",
            "path, or none",
            "pyparallel/rule.json in the user's cache folder",
            "run: the file of times measured on this machine, as rank 0 has it",
        ),
        (
            "PYPARALLEL_SHM_DIR",
            "folder of a tmpfs",
            "anonymous memory files",
            "run: where the memory that ranks share is taken from",
        ),
        (
            "PYPARALLEL_SIMD",
            "avx512, avx2 or portable",
            "the best this CPU has",
            "run: instruction set of CPU reductions, products and attention",
        ),
        (
            "PYPARALLEL_SPIN_US",
            "0 to 1000000",
            "chosen while waiting",
            "run: microseconds a waiter spins before it sleeps",
        ),
        (
            "PYPARALLEL_TORCH",
            "0, 1 or auto",
            "1",
            "build: leave the torch backend out, require it, or build it where torch is",
        ),
    )
)
