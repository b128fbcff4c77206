"""The model of the CPU path: what a GEMM and the shared-memory collective of a few ranks take.

The three algorithms differ in what moves between the GEMM and the reduction:

    plain      GEMM into memory of its own; the collective stages it in shared memory, in chunks
    symmetric  GEMM straight into symmetric memory, where the collective reads it: no staging copy
    chunked    as symmetric, rows in chunks: a chunk is reduced while it is in cache

Constants are of one machine and say so; a machine of yours is measured by `python -m pyparallel
calibrate`. Only the standard library is used here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from pyparallel.ops.model import Problem

__all__ = ["ALGORITHMS", "HOST", "Host", "HostPrediction", "predict_host"]

ALGORITHMS = {
    "plain": "GEMM, then the collective of its result (or the gather, then the GEMM)",
    "symmetric": "GEMM to or from symmetric memory, which the collective works on without a copy",
    "chunked": "as symmetric, in chunks of rows that stay in cache between GEMM and reduction",
}


@dataclass(frozen=True)
class Host:
    """Rates of one core and of memory that ranks share."""

    gflops: Mapping[str, float]  # of one rank's GEMM, by dtype
    gemm_us: float  # of any GEMM call, its Python included
    weight_gbps: float  # reading the weight, which binds when there are few rows
    call_us: float  # of a collective, however small
    staged_gbps: float  # of the array, through staging slots
    direct_gbps: float  # of the array, where it lies in symmetric memory
    symmetric_us: float  # finding the workspace, a view of it, the result copied out
    chunk_bytes: int  # of the shared array, in one chunk
    chunk_us: float  # one more GEMM call and one more meeting
    chunk_share: float  # of the GEMM's rate that is left when it runs in chunks of rows
    source: str


HOST = Host(
    gflops={"fp64": 45.0, "fp32": 95.0, "bf16": 205.0, "fp16": 95.0},
    gemm_us=4.0,
    weight_gbps=14.0,
    call_us=3.0,
    staged_gbps=9.0,
    direct_gbps=10.0,
    symmetric_us=35.0,
    chunk_bytes=512 << 10,
    chunk_us=8.0,
    chunk_share=0.85,
    source="two virtual cores of an AMD EPYC, two ranks, python -m pyparallel calibrate: plain was "
    "as fast as the others or faster at 72 of 80 shapes",
)


@dataclass(frozen=True)
class HostPrediction:
    """Predicted microseconds of one algorithm: us = gemm_us + transfer_us + extra_us."""

    algorithm: str
    us: float
    gemm_us: float
    transfer_us: float
    extra_us: float


def predict_host(problem: Problem, algorithm: str, host: Host = HOST) -> HostPrediction:
    """The time of one call on CPU. Raises ValueError for an algorithm that is none of ours."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm {algorithm!r} is not one of {', '.join(ALGORITHMS)}")
    rate = host.gflops.get(problem.dtype, host.gflops["fp32"]) * 1e3
    weight = problem.n * problem.k * problem.item / (host.weight_gbps * 1e3)
    gemm = host.gemm_us + max(problem.flops / rate, weight)
    if problem.world == 1:
        return HostPrediction(algorithm, gemm, gemm, 0.0, 0.0)
    rounds = 1.0 if problem.op != "matmul_all_reduce" else 2.0
    moved = rounds * problem.moved_bytes * (problem.world - 1) / problem.world
    if algorithm == "plain":
        transfer, extra = moved / (host.staged_gbps * 1e3), 0.0
    else:
        transfer, extra = moved / (host.direct_gbps * 1e3), host.symmetric_us
    chunks = ceil(problem.moved_bytes / host.chunk_bytes)
    if algorithm == "chunked" and chunks > 1:
        extra += (chunks - 1) * host.chunk_us
        gemm /= host.chunk_share
    transfer += host.call_us
    return HostPrediction(algorithm, gemm + transfer + extra, gemm, transfer, extra)
