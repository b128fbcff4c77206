"""Which tiles a GEMM is cut into: pure functions of shape, dtype and chip, apart from the kernels.

    candidates(problem, chip)    every configuration there is, each with its predicted cycles or the
                                 reason for leaving it out
    choose(problem, chip)        the cheapest of them, or what was measured for this problem

A choice sees only values that all ranks share and no clock: two ranks must never cut differently.
Where a measured table is used (autotune.py), it is rank 0's, given to all by the caller.

The prediction is a bound made of the same parts as bench/static: cycles of the tensor cores, of
shared memory and of the way from L2, the longest of them, by tiles that one multiprocessor works
off in turn. It ranks configurations of one problem; it is no time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .gemm import TileConfig

__all__ = [
    "CHIPS",
    "ONE_SHOT",
    "Candidate",
    "Chip",
    "Choice",
    "Problem",
    "candidates",
    "chip_of",
    "choose",
    "key_of",
    "predict",
    "shared_bytes",
    "with_programs",
]

ONE_SHOT = "gemm_all_reduce one shot"  # Problem.op of the kernel that sends tiles to every rank
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
WARP = 32
REGISTERS = 65536  # of a multiprocessor
FILL_BYTES = 64  # per clock from L2 into one multiprocessor
SHARED_BYTES_PER_CLOCK = 128
TILE_LATENCY = 1500  # cycles from a tile's first load to its first product, and its last store
RESERVED_SHARED = 1024  # per program, taken by the driver


@dataclass(frozen=True)
class Chip:
    """What a choice needs to know of a GPU."""

    name: str
    arch: int  # 90 for sm_90; 0 for Triton's interpreter
    multiprocessors: int
    shared_bytes: int  # the most that one program may ask for


@dataclass(frozen=True)
class Problem:
    """y = x @ w.T with sizes that all ranks share.

    rows: the parts of M that no tile may cross: the shards of a scattered or gathered dimension, or
    M alone. k: the length of the sum on one rank. op: the kernel's name, for measured tables.
    descriptors: whether gemm.fits_descriptor() holds of both operands, on all ranks.
    """

    op: str
    rows: tuple[int, ...]
    n: int
    k: int
    dtype: str
    descriptors: bool = True

    @property
    def m(self) -> int:
        return sum(self.rows)


@dataclass(frozen=True)
class Candidate:
    """A configuration with its predicted cycles, or with the reason for leaving it out.

    Its number of programs is set by `choose`.
    """

    config: TileConfig
    cycles: float = float("inf")
    excluded: str = ""


@dataclass(frozen=True)
class Choice:
    """What a launcher is given, and why."""

    config: TileConfig
    reason: str


A100 = Chip("A100", 80, 108, 163 * 1024)
CHIPS = {
    chip.name: chip
    for chip in (
        A100,
        Chip("L20", 89, 92, 99 * 1024),
        Chip("H100 SXM", 90, 132, 227 * 1024),
        Chip("H100 PCIe", 90, 114, 227 * 1024),
        Chip("H20", 90, 78, 227 * 1024),
        Chip("B200", 100, 148, 227 * 1024),
        Chip("interpreter", 0, 4, 227 * 1024),
    )
}


@dataclass(frozen=True)
class _Family:
    """Chips that are compiled alike. tensor: 16-bit multiply-adds per clock; fma: 32-bit lanes."""

    name: str
    tensor: int
    fma: int
    configs: tuple[TileConfig, ...]
    has_fp8: bool


def _grid(descriptors: bool, *rows: tuple[int, int, int, int, int]) -> tuple[TileConfig, ...]:
    return tuple(
        TileConfig(m, n, k, num_warps=warps, num_stages=stages, programs=1, descriptors=descriptors)
        for m, n, k, warps, stages in rows
    )


def _in_halves(configs: tuple[TileConfig, ...]) -> tuple[TileConfig, ...]:
    """Those whose threads have 128 sums leave in halves (partial_sums.py says why)."""
    return tuple(
        replace(c, halves=c.block_m * c.block_n >= 128 * WARP * c.num_warps) for c in configs
    )


# fmt: off
_PLAIN = _grid(
    False,
    (128, 128, 32, 8, 4), (128, 128, 64, 8, 3), (128, 64, 64, 4, 3), (64, 64, 128, 4, 3),
    (64, 64, 64, 4, 4), (64, 32, 128, 4, 3), (32, 64, 128, 4, 3), (16, 64, 128, 4, 3),
    (64, 64, 32, 8, 2), (32, 32, 32, 4, 2),
)
_HOPPER = _grid(
    True,
    (128, 256, 64, 8, 3), (256, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 64, 64, 4, 4),
    (64, 256, 64, 4, 4), (64, 128, 64, 4, 4), (64, 64, 128, 4, 4), (64, 32, 128, 4, 5),
    (128, 256, 128, 8, 3), (128, 128, 128, 8, 4), (64, 128, 128, 4, 4), (64, 64, 32, 8, 3),
    (32, 32, 32, 4, 3),
)
_BLACKWELL = _in_halves(_grid(
    True,
    (128, 256, 64, 8, 3), (128, 128, 64, 4, 4), (128, 64, 64, 4, 4), (128, 64, 128, 4, 4),
    (128, 32, 128, 4, 3), (128, 256, 128, 8, 3), (128, 128, 128, 4, 4), (64, 64, 32, 8, 3),
    (32, 32, 32, 4, 3),
))
# fmt: on
_FAMILIES = {
    80: _Family("Ampere and Ada", 1024, 64, _PLAIN, has_fp8=False),
    90: _Family("Hopper", 2048, 128, _HOPPER, has_fp8=True),
    100: _Family("Blackwell", 4096, 128, _BLACKWELL, has_fp8=True),
}
# Compute capability -> the family it is compiled as; others take plain pointers, with a reason.
_FAMILY_OF = {80: 80, 86: 80, 87: 80, 89: 80, 90: 90, 100: 100, 103: 100, 0: 80}


def chip_of(device: int) -> Chip:
    """The chip of a CUDA device, from what torch says of it."""
    import torch

    facts = torch.cuda.get_device_properties(device)
    return Chip(
        facts.name,
        facts.major * 10 + facts.minor,
        facts.multi_processor_count,
        facts.shared_memory_per_block_optin,
    )


def candidates(problem: Problem, chip: Chip) -> list[Candidate]:
    """All configurations for the chip's family, in a fixed order.

    Raises:
        ValueError: the dtype is not one that the kernels multiply, with those that are.
    """
    _check(problem)
    family = _family(chip)
    return [
        Candidate(config, excluded=reason)
        if (reason := _excluded(config, problem, chip, family))
        else Candidate(config, predict(config, problem, chip))
        for config in _configs(problem, family)
    ]


def choose(
    problem: Problem, chip: Chip, measured: "Mapping[str, TileConfig] | None" = None
) -> Choice:
    """The configuration for a problem.

    Args:
        measured: what autotune.py found, by `key_of`. It must be the same on all ranks.

    Raises:
        ValueError: no configuration fits; the text has each one's reason.
    """
    every = candidates(problem, chip)
    fit = [candidate for candidate in every if not candidate.excluded]
    if not fit:
        reasons = "; ".join(f"{c.config}: {c.excluded}" for c in every)
        raise ValueError(f"{problem} on {chip.name} (sm_{chip.arch}): {reasons}")
    note = "" if chip.arch in _FAMILY_OF else f"sm_{chip.arch} is unknown, so plain pointers; "
    found = (measured or {}).get(key_of(problem, chip))
    if found is not None:
        if found in [candidate.config for candidate in fit]:
            return Choice(with_programs(found, problem, chip), f"{note}measured on {chip.name}")
        note += f"the measured {found} is no candidate any more; "
    best = min(fit, key=lambda candidate: candidate.cycles)
    reason = f"{note}least of {len(fit)} predictions, {best.cycles:.0f} cycles"
    return Choice(with_programs(best.config, problem, chip), reason)


def key_of(problem: Problem, chip: Chip) -> str:
    """Where a measured table has this problem: rows are counted in powers of two."""
    rows = "+".join(str(_power_of_two(part)) for part in (max(problem.rows), problem.m))
    return (
        f"{chip.name} sm_{chip.arch} x{chip.multiprocessors}: {problem.op} m{rows} "
        f"n{problem.n} k{problem.k} {problem.dtype}"
    )


def predict(config: TileConfig, problem: Problem, chip: Chip) -> float:
    """Cycles that the problem takes at least, by what one multiprocessor has to do in turn."""
    tiles = _tiles(config, problem)
    at_once = chip.multiprocessors * _resident(config, problem, chip)
    turns = -(-problem.k // config.block_k)
    per_turn = max(turn_cycles(config, problem, chip).values())
    in_turn = -(-tiles // chip.multiprocessors)
    return in_turn * turns * per_turn + -(-tiles // at_once) * TILE_LATENCY


def turn_cycles(config: TileConfig, problem: Problem, chip: Chip) -> dict[str, float]:
    """Cycles by unit of one turn of the main loop; bench/static counts them in compiled code."""
    family, item = _family(chip), ITEM_BYTES[problem.dtype]
    products = config.block_m * config.block_n * config.block_k
    operands = (config.block_m + config.block_n) * config.block_k * item
    if problem.dtype == "float32":
        multiply = products / family.fma
        read = products // 16 * item  # each value read is used by sixteen products of a thread
    else:
        multiply = products / (family.tensor * (2 if item == 1 else 1))
        read = _operand_reads(config, family) * config.block_k * item
    # Rows beyond M are not fetched; rows of the weight are, as far as N goes.
    fetched = (min(config.block_m, problem.m) + min(config.block_n, problem.n)) * config.block_k
    return {
        "tensor" if problem.dtype != "float32" else "fma": multiply,
        "shared": (operands + read) / SHARED_BYTES_PER_CLOCK,
        "fill": fetched * item / FILL_BYTES,
    }


def shared_bytes(config: TileConfig, problem: Problem, chip: Chip) -> int:
    """Shared memory of one program, at most: operands under way, or the tile as it is stored."""
    ampere = _family(chip).name == "Ampere and Ada"  # the stage in use lies in registers there
    stages = max(config.num_stages - 1, 1) if ampere else config.num_stages
    operands = (config.block_m + config.block_n) * config.block_k * ITEM_BYTES[problem.dtype]
    output = config.block_m * config.block_n * 4  # changes hands between threads, in fp32 at most
    return max(stages * operands, output) + RESERVED_SHARED


def with_programs(config: TileConfig, problem: Problem, chip: Chip) -> TileConfig:
    """With as many programs as run at once, and none without a tile; at least one, for signals."""
    at_once = chip.multiprocessors * _resident(config, problem, chip)
    return replace(config, programs=max(1, min(_tiles(config, problem), at_once)))


# --- inside


def _family(chip: Chip) -> _Family:
    return _FAMILIES[_FAMILY_OF.get(chip.arch, 80)]


def _configs(problem: Problem, family: _Family) -> tuple[TileConfig, ...]:
    if problem.descriptors:
        return family.configs
    return tuple(replace(config, descriptors=False) for config in family.configs)


def _check(problem: Problem) -> None:
    if problem.dtype not in ITEM_BYTES:
        raise ValueError(f"dtype {problem.dtype}; the kernels multiply {', '.join(ITEM_BYTES)}")
    if problem.n < 0 or problem.k < 0 or not problem.rows or min(problem.rows) < 0:
        raise ValueError(f"{problem}: sizes are not negative, and there is at least one part of M")


def _excluded(config: TileConfig, problem: Problem, chip: Chip, family: _Family) -> str:
    fp32, fp8 = problem.dtype == "float32", problem.dtype == "float8_e4m3fn"
    accumulators = config.block_m * config.block_n
    if fp8 and not family.has_fp8 and chip.arch:
        return f"sm_{chip.arch} multiplies no float8_e4m3fn"
    if fp32 and (accumulators > 64 * 64 or config.block_k > 32):
        return "float32 is multiplied lane by lane: more than 64x64x32 does not fit registers"
    if not fp32 and family.name != "Ampere and Ada" and config.block_k < 64:
        return "a tile for float32, too small for this chip's tensor cores"
    if not fp32 and config.num_warps == 8 and accumulators <= 64 * 64:
        return "eight warps for a tile of one warpgroup"
    if not config.descriptors and accumulators > 128 * 128:
        return "addresses of operands leave too few registers for so many accumulators"
    if fp8 and accumulators >= 128 * WARP * config.num_warps:
        return "128 sums of a thread and their scales do not fit its registers"
    if fp8 and config.block_k < 128:
        return "rows of 8-bit operands fill a line of 128 bytes with block_k 128"
    if problem.op == ONE_SHOT and accumulators > 128 * 64:
        return "a tile that goes to every rank stays in registers: more than 128x64 do not fit"
    need = shared_bytes(config, problem, chip)
    if need > chip.shared_bytes:
        return f"{need} bytes of shared memory, {chip.shared_bytes} are there"
    return ""


def _operand_reads(config: TileConfig, family: _Family) -> int:
    """Rows and columns of operands that the tensor cores read from shared memory in one turn."""
    if family.name == "Hopper":  # each warpgroup reads 64 rows and all columns
        return config.block_m + config.block_m // 64 * config.block_n
    if family.name == "Blackwell":  # one instruction reads both operands once
        return config.block_m + config.block_n
    down = (
        2 if config.block_m >= 32 and config.num_warps > 1 else 1
    )  # warps along M, the rest along N
    across = config.num_warps // down
    return config.block_m * across + config.block_n * down


def _tiles(config: TileConfig, problem: Problem) -> int:
    down = sum(-(-rows // config.block_m) for rows in problem.rows)
    return down * -(-problem.n // config.block_n)


def _resident(config: TileConfig, problem: Problem, chip: Chip) -> int:
    """Programs that a multiprocessor holds at once, by shared memory and accumulators."""
    by_shared = (chip.shared_bytes + RESERVED_SHARED) // shared_bytes(config, problem, chip)
    threads = config.num_warps * WARP
    registers = threads * (config.block_m * config.block_n // threads + 64)
    return max(1, min(by_shared, REGISTERS // registers, 4))


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
