"""How long an op takes by each of its algorithms: a model of tiles, waves, links and pieces.

Nothing is measured here and no clock is read: equal arguments give equal predictions on every rank.
Only the standard library is used. The constants are in chips.py (machines) and designs.py
(algorithms). `python -m bench model` compares the model with published measurements.

    GEMM       launch + max(waves x time of a tile, bytes / memory rate), the best tile of TILES
    transfer   bytes that leave a rank / rate of the transport; a collective has a start-up time
    overlap    two stages, pieces in order: a piece enters the second stage when it has left the
               first and the second is free (a flow shop); own pieces need no transfer
    stall      where both share the SMs, a part of the shorter stage is not hidden
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

from pyparallel.ops.chips import Chip, Machine
from pyparallel.ops.designs import Design

__all__ = ["OPS", "Gemm", "Prediction", "Problem", "gemm_time", "predict"]

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
ITEM_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}

LAUNCH_US = 4.0  # assumed: one kernel, from an idle stream
TILE_US = 1.5  # assumed: of a tile outside of its main loop (fill the pipeline, store the result)
MEMORY_SHARE = 0.85  # assumed: of the memory rate, reached by a kernel that only moves bytes
# (rows, columns, share of the best rate): smaller tiles load more per product. Shares are assumed.
TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.93), (64, 256, 0.85), (64, 128, 0.7),
         (64, 64, 0.5))  # fmt: skip
SPLITS = (1, 2, 4, 8)  # of the inner dimension, where there are too few tiles
_LEAST_SPLIT = 512


@dataclass(frozen=True)
class Problem:
    """One call, by the GEMM that each rank runs: [m, k] x [n, k]^T -> [m, n].

    all_gather_matmul: m counts the gathered rows, n this rank's columns of the weight.
    matmul_reduce_scatter: k is this rank's part, m counts the rows before they are scattered.
    matmul_all_reduce: k is this rank's part.
    """

    op: str
    m: int
    n: int
    k: int
    dtype: str
    world: int

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ValueError(f"op {self.op!r} is not one of {', '.join(OPS)}")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(ITEM_BYTES)}")
        if min(self.m, self.n, self.k) < 0 or self.world < 1:
            raise ValueError(
                f"m, n, k = {self.m}, {self.n}, {self.k} on {self.world} ranks: want no negative "
                "size, and at least one rank"
            )

    @classmethod
    def of_whole(cls, op: str, m: int, n: int, k: int, dtype: str, world: int) -> "Problem":
        """From the sizes of the unsharded op, rounded up to the largest shard."""
        if op == "all_gather_matmul":
            n = ceil(n / world)
        else:
            k = ceil(k / world)
        return cls(op, m, n, k, dtype, world)

    @property
    def item(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def moved_bytes(self) -> int:
        """The array that the ranks share: all of x, or all of the product (16-bit for fp8)."""
        if self.op == "all_gather_matmul":
            return self.m * self.k * self.item
        return self.m * self.n * max(self.item, 2)


@dataclass(frozen=True)
class Gemm:
    """A predicted GEMM, with what it is made of."""

    us: float
    tile: tuple[int, int]
    tiles: int
    waves: int
    split: int
    bound: str  # "tensor cores" or "memory"


def gemm_time(
    chip: Chip, m: int, n: int, k: int, dtype: str, share: float = 1.0, taken_sms: int = 0
) -> Gemm:
    """The best tile and split for the shape; `share` of the vendor's rate, without `taken_sms`.

    fp64 and whatever the chip has no rate for is taken as fp32.
    """
    if 0 in (m, n, k):
        return Gemm(0.0, TILES[0][:2], 0, 0, 1, "memory")
    sms = max(1, chip.sms - taken_sms)
    rate = chip.dense_tflops.get(dtype, chip.dense_tflops["fp32"])
    per_sm = rate * 1e6 / chip.sms * chip.gemm_share * share  # flops per us
    item = ITEM_BYTES[dtype]
    moved = (m * k + n * k) * item + m * n * max(item, 2)
    memory = moved / (chip.memory_gbps * 1e3 * MEMORY_SHARE)
    best: Gemm | None = None
    for rows, columns, speed in TILES:
        tiles = ceil(m / rows) * ceil(n / columns)
        for split in SPLITS:
            if split > 1 and (k / split < _LEAST_SPLIT or tiles * split > sms):
                continue
            waves = ceil(tiles * split / sms)
            loop = 2.0 * rows * columns * ceil(k / split) / (per_sm * speed)
            extra = TILE_US if split == 1 else 2 * TILE_US  # the parts are added up
            compute = waves * (loop + extra)
            us = LAUNCH_US + max(compute, memory)
            if best is None or us < best.us:
                bound = "tensor cores" if compute >= memory else "memory"
                best = Gemm(us, (rows, columns), tiles, waves, split, bound)
    assert best is not None
    return best


@dataclass(frozen=True)
class Prediction:
    """Predicted microseconds of one algorithm, and their parts.

    us = gemm_us + transfer_us + pieces_us - hidden_us + reduce_us + fixed_us + waits_for_host_us
    """

    algorithm: str
    us: float
    gemm: Gemm = field(repr=False)
    gemm_us: float  # what the GEMM takes as this algorithm runs it
    transfer_us: float  # of the bytes alone
    pieces_us: float  # signals and issue of all pieces
    reduce_us: float  # a pass over what has arrived, after the last piece
    fixed_us: float  # launches and meetings
    hidden_us: float
    waits_for_host_us: float  # the device has nothing to do until the host has issued it

    @property
    def exposed_us(self) -> float:
        """What remains beside the GEMM."""
        return self.us - self.gemm_us


def predict(problem: Problem, design: Design, machine: Machine) -> Prediction:
    """The time of one call by one design.

    Raises ValueError where the design is none of the op's, or the link lacks its transport.
    """
    if problem.op not in design.ops:
        raise ValueError(f"{design.name} is no algorithm of {problem.op}, but of {design.ops}")
    gemm = gemm_time(
        machine.chip, problem.m, problem.n, problem.k, problem.dtype,
        design.gemm_share, design.taken_sms,
    )  # fmt: skip
    if problem.world == 1:
        return Prediction(design.name, gemm.us, gemm, gemm.us, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    transfer = _sent(problem, design) / machine.link.bytes_per_us(design.transport)
    fixed = design.fixed_us + design.meetings * machine.link.signal_us
    if design.transport == "collective":
        fixed += machine.link.collective_us
    reduce_us = _reduction(problem, design, machine.chip)
    pieces = _pieces(problem, design, gemm)
    staged, issue = _overlapped(problem, design, gemm.us, transfer, pieces)
    serial = gemm.us + transfer + issue
    staged += min(design.stall * min(gemm.us, transfer), serial - staged)
    device = staged + reduce_us + fixed
    host = design.host_us + design.host_rank_us * problem.world
    return Prediction(
        algorithm=design.name,
        us=max(device, host),
        gemm=gemm,
        gemm_us=gemm.us,
        transfer_us=transfer,
        pieces_us=issue,
        reduce_us=reduce_us,
        fixed_us=fixed,
        hidden_us=serial - staged,
        waits_for_host_us=max(0.0, host - device),
    )


def _sent(problem: Problem, design: Design) -> float:
    """Bytes that leave (or enter) one rank."""
    world, whole = problem.world, problem.moved_bytes
    if problem.op != "matmul_all_reduce":
        return whole * (world - 1) / world
    if design.shots == 1:
        return float(whole * (world - 1))
    if design.transport == "multimem":  # the switch adds: every byte leaves once, and 1 / W again
        return whole * (1 + 1 / world)
    return 2 * whole * (world - 1) / world


def _reduction(problem: Problem, design: Design, chip: Chip) -> float:
    """A kernel of its own that reads a slot per rank and writes their sum."""
    if not design.reduces_after:
        return 0.0
    own = problem.moved_bytes / (problem.world if design.shots != 1 else 1)
    moved = own * (problem.world + 1)
    return LAUNCH_US + moved / (chip.memory_gbps * 1e3 * MEMORY_SHARE)


def _pieces(problem: Problem, design: Design, gemm: Gemm) -> int:
    if design.pieces == "whole":
        return 1
    if design.pieces == "ranks":
        return problem.world
    if design.pieces == "waves":
        return max(1, gemm.waves)
    return int(design.pieces)


def _overlapped(
    problem: Problem, design: Design, gemm_us: float, transfer: float, pieces: int
) -> tuple[float, float]:
    """Time of both stages together, and the part of it that signals and issue add to transfers."""
    if pieces == 1 and design.pieces == "whole":
        return gemm_us + transfer + design.piece_us, design.piece_us
    compute = [gemm_us / pieces] * pieces
    own = 1 if design.pieces == "ranks" else 0  # this rank's own piece stays where it is
    remote = [transfer / (pieces - own) + design.piece_us] * (pieces - own)
    issue = design.piece_us * (pieces - own)
    if problem.op == "all_gather_matmul":
        return flow([0.0] * own + remote, compute), issue
    return flow(compute, remote + [0.0] * own), issue


def flow(first: Sequence[float], second: Sequence[float]) -> float:
    """When the last piece leaves the second of two stages that take pieces in order."""
    left_first = left_second = 0.0
    for a, b in zip(first, second, strict=True):
        left_first += a
        left_second = max(left_first, left_second) + b
    return left_second
