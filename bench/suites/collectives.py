"""Suite `collectives`: every op of the communicator against stock PyTorch, at every size.

Ours runs twice, called directly (pyparallel.comm) and as torch.distributed's backend "pyparallel";
stock PyTorch (gloo on CPU, NCCL on CUDA) once, through torch.distributed. All are timed in the same
processes and the same rounds; each of ours makes a row. Sizes are those of the whole buffer.
"""

from __future__ import annotations

from bench.case import LONG, Case
from bench.ops import OPS
from bench.options import Options

TITLE = "Collectives and send/recv between the ranks of one machine"
KB, MB = 1 << 10, 1 << 20
SIZES = (4 * KB, 32 * KB, 256 * KB, MB, 8 * MB, 64 * MB)
QUICK_SIZES = (4 * KB, 256 * KB, 8 * MB)
QUICK_ALL_REDUCE_SIZES = (4 * KB, 256 * KB, 64 * MB)
P2P = ("send_recv", "exchange")


def cases(options: Options, world: int) -> list[Case]:
    """Largest first: what they take beyond their share of the time is then known early."""
    found = []
    for op in [o for o in OPS if not options.ops or o in options.ops]:
        if world < 2 and op in P2P:
            continue
        if op == "barrier":
            found.append(Case(op, 0, "float32", world))
            continue
        for dtype in options.dtypes or LONG.values():
            found += [Case(op, size, dtype, world) for size in _sizes(options, op, dtype)]
    return sorted(found, key=lambda case: -case.nbytes)


def _sizes(options: Options, op: str, dtype: str) -> tuple[int, ...]:
    if options.sizes:
        return options.sizes
    if not options.quick:
        return SIZES
    sizes = QUICK_ALL_REDUCE_SIZES if op == "all_reduce" else QUICK_SIZES
    return sizes if dtype == "float32" else sizes[::2]


def stock(options: Options) -> str:
    return "nccl" if options.device == "cuda" else "gloo"


def pairs(options: Options) -> list[tuple[str, str]]:
    """(ours, peer) for each row of a case."""
    direct = "direct_nccl" if options.device == "cuda" else "direct"
    found = [(direct, stock(options)), ("torch", stock(options))]
    return found + [(direct, peer) for peer in options.peers]
