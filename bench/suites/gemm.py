"""Suite `gemm`: a matmul with its communication, ours in one call against stock PyTorch's two.

Shapes are those of layers that peers report, whole: (N, K) of a first linear layer, and transposed
for the second, whose sums are scattered or reduced. On CPU they are scaled to N, K <= 4096.
Beside both sides each row has stock's matmul alone, its collective alone, their sum, and `exposed`:
what our call takes beyond the matmul, in percent of stock's collective. 100 hides nothing, more
loses; of what is less a part is hidden, and a part may be a faster collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from torch import device

from bench.call_contest import CallContest
from bench.case import LONG
from bench.gemm_case import GATHER, OPS, REDUCE, GemmCase
from bench.options import Options
from bench.page import Page
from bench.providers.base import Provider

TITLE = "Matmul with its communication"
CUDA_SHAPES = ((11008, 4096), (14336, 4096), (28672, 8192), (49152, 12288), (53248, 16384))
CUDA_ROWS = (1, 4, 16, 64, 256, 1024, 4096, 8192, 16384, 32768)
CPU_SHAPES = ((1024, 1024), (2752, 1024), (3584, 1024), (2048, 2048), (4096, 2048), (4096, 4096))
CPU_ROWS = (1, 4, 16, 128, 256, 512)
QUICK_SHAPES = ((1024, 1024), (3584, 1024), (4096, 4096))
QUICK_ROWS = (1, 16, 128, 512)
QUICK_LARGEST = 1.9e9  # multiplications of all ranks
PARTS = ("gemm", "collective")


def cases(options: Options, world: int) -> list[GemmCase]:
    """Largest first: what they take beyond their share of the time is then known early."""
    found = []
    for op in [o for o in OPS if not options.ops or o in options.ops]:
        for m, n, k in options.shapes or _shapes(options, op):
            if op != REDUCE:
                m = ceil(m / world) * world  # stock knows no uneven shares
            found += [
                GemmCase(op, m, n, k, dtype, world, options.seed)
                for dtype in options.dtypes or LONG.values()
            ]
    return sorted(dict.fromkeys(found), key=lambda case: -case.flops)


def _shapes(options: Options, op: str) -> list[tuple[int, int, int]]:
    cuda, quick = options.device == "cuda", options.quick
    shapes = CUDA_SHAPES if cuda else QUICK_SHAPES if quick else CPU_SHAPES
    rows = CUDA_ROWS if cuda else QUICK_ROWS if quick else CPU_ROWS
    found = []
    for n, k in shapes if op == GATHER else [(k, n) for n, k in shapes]:
        for m in rows:
            short = quick and not cuda
            if short and op != REDUCE and m < 128:
                continue  # what decoding needs is the all-reduce
            if not short or m * n * k <= QUICK_LARGEST:
                found.append((m, n, k))
    return found


def pairs(options: Options) -> list[tuple[str, str]]:
    """(ours, peer) for each row of a case."""
    peers = ("stock_gemm", "symm_mem") if options.device == "cuda" else ("stock_gemm",)
    return [("ops", peer) for peer in peers]


def parts(options: Options) -> tuple[str, ...]:
    """Providers that are timed beside the pairs."""
    return PARTS


def figures(medians: Mapping[str, float]) -> dict[str, float]:
    """The columns between shape and times, from the medians in microseconds."""
    found = {name: medians[name] for name in PARTS if name in medians}
    if len(found) == len(PARTS):
        found["sum"] = found["gemm"] + found["collective"]
        if "ours" in medians and found["collective"] > 0:
            beyond = medians["ours"] - found["gemm"]
            found["exposed %"] = max(0.0, 100 * beyond / found["collective"])
    return found


def contest(
    page: Page, found: Mapping[str, Provider], device: device, suite: str, options: Options
) -> CallContest:
    return CallContest(page, found, device, suite, options.busy, PARTS, figures)
