"""Cycles that the units of one multiprocessor need for one turn of a main loop: a bound.

Each unit is taken alone, at its full rate and with all warps of one program: the longest is what
the loop cannot be faster than. Latencies, dependences, waits and what lies behind the
multiprocessor (L2, memory) are left out: a loop may well be slower, and a few percent say nothing.

Rates per clock of a multiprocessor:
    tensor   dense multiply-adds in 16 bits: 1024 (sm_80), 2048 (sm_90), 4096 (sm_100): published
             peaks of A100, H100 SXM and B200 over multiprocessors and boost clock; half in tf32,
             twice in 8 bits
    fma      32-bit lanes of fused multiply-adds: 64 (sm_80), 128; integer multiply-adds 64
    mufu     16 lanes of exp2, reciprocal and their like
    shared   128 bytes, read or written, one port for both
    issue    4 instructions, one per scheduler
Lanes are those of the CUDA programming guide, table of the throughput of native arithmetic.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from bench.static.listing import Instruction

UNITS = ("tensor", "fma", "mufu", "shared", "issue")
LANES = 32
WARPGROUP = 4
SHARED_BYTES = 128
ISSUES = 4
MUFU_LANES = 16
INTEGER_LANES = 64


@dataclass(frozen=True)
class Rates:
    """What differs between architectures; `shared_bytes` is the most one program may ask for."""

    tensor: int
    fma_lanes: int
    shared_bytes: int
    registers: int = 255


RATES = {
    80: Rates(tensor=1024, fma_lanes=64, shared_bytes=163 * 1024),
    90: Rates(tensor=2048, fma_lanes=128, shared_bytes=227 * 1024),
    100: Rates(tensor=4096, fma_lanes=128, shared_bytes=227 * 1024),
}
TENSOR = ("HMMA", "IMMA", "QMMA", "HGMMA", "QGMMA", "IGMMA", "UTCHMMA", "UTCQMMA", "UTCIMMA")
BULK_LOADS = ("UTMALDG",)
ASYNC_LOADS = ("LDGSTS",)


@dataclass(frozen=True)
class Tile:
    """What the listing does not tell: the block of the output, and the bytes of one element."""

    block_m: int
    block_n: int
    block_k: int
    itemsize: int
    num_warps: int
    # What a turn loads into shared memory, where that is not both operands of each block_k.
    filled: "int | None" = None
    # Multiply-adds of a turn, where the block's instructions differ and name no shape (UTC*MMA).
    work: "int | None" = None


@dataclass(frozen=True)
class Turn:
    """One turn of a main loop: cycles by unit, and how many instructions each was made of."""

    cycles: dict[str, float]
    filled_bytes: int
    instructions: int
    multiply_adds: int

    @property
    def binding(self) -> str:
        """The unit that needs most cycles; the tensor cores where none needs more than they."""
        return max(UNITS, key=lambda unit: self.cycles[unit])

    @property
    def margin(self) -> float:
        """The tensor cores' cycles over the most that another unit needs."""
        others = max(self.cycles[unit] for unit in UNITS if unit != "tensor")
        return self.cycles["tensor"] / others if others else float("inf")


def turn(code: Iterable[Instruction], tile: Tile, arch: int) -> Turn:
    """The bound of one turn of this loop on sm_`arch`.

    Tiles that are loaded into shared memory while the tensor cores read others are counted as
    written bytes, two operands for each block_k that the loop multiplies. Waiting for a barrier in
    shared memory is counted as an instruction, not as bytes.
    """
    rates, code = RATES[arch], list(code)
    multiply_adds = 0
    tensor = fma = mufu = 0.0
    read = 0
    for one in code:
        per_program, operands = _tensor_work(one, tile)
        multiply_adds += per_program
        read += operands
        tensor += per_program / (rates.tensor * _speed(one))
        lanes = LANES * tile.num_warps
        if one.name in ("FFMA", "FMUL", "FADD", "HFMA2", "FFMA2"):
            fma += lanes * (2 if one.name == "FFMA2" else 1) / rates.fma_lanes
        elif one.name == "IMAD" and not re.search(r"\.(MOV|SHL|IADD)\b", one.opcode):
            fma += lanes / INTEGER_LANES
        elif one.name == "MUFU":
            mufu += lanes / MUFU_LANES
        elif one.name in ("LDS", "STS", "LDSM", "STSM"):
            read += lanes * _lane_bytes(one)
    if tile.work is not None and any(one.name.startswith("UTC") for one in code):
        multiply_adds, tensor = tile.work, tile.work / rates.tensor
    turns_of_k = multiply_adds / (tile.block_m * tile.block_n * tile.block_k)
    filled = 0
    if tile.filled is not None:
        filled = tile.filled
    elif any(one.name in BULK_LOADS + ASYNC_LOADS for one in code):
        filled = round(turns_of_k * (tile.block_m + tile.block_n) * tile.block_k * tile.itemsize)
    return Turn(
        {
            "tensor": tensor,
            "fma": fma,
            "mufu": mufu,
            "shared": (read + filled) / SHARED_BYTES,
            "issue": len(code) * tile.num_warps / ISSUES,
        },
        filled,
        len(code),
        multiply_adds,
    )


def shares(cycles: "dict[str, float]") -> tuple[float, float]:
    """(serial, overlapped): the share of its tensor peak that a loop cannot exceed.

    Serial: if tensor cores, FMA and MUFU lanes work one after the other, as those of one group of
    warps do that waits for each product; shared memory and issue serve them at the same time.
    Overlapped: if all units work at once, so that only the longest counts.
    """
    tensor = cycles.get("tensor", 0.0)
    serial = tensor + cycles.get("fma", 0.0) + cycles.get("mufu", 0.0)
    longest = max(cycles.values(), default=0.0)
    return (tensor / serial if serial else 0.0), (tensor / longest if longest else 0.0)


def _tensor_work(one: Instruction, tile: Tile) -> tuple[int, int]:
    """Multiply-adds of this instruction in the whole program, bytes it reads in shared memory."""
    if one.name not in TENSOR:
        return 0, 0
    if one.name.startswith(
        "UTC"
    ):  # one thread starts it for the whole block; 32 bytes of k at once
        depth = 32 // tile.itemsize
        work = tile.block_m * tile.block_n * depth
        return work, (tile.block_m + tile.block_n) * depth * tile.itemsize
    if shape := re.search(r"\.(\d+)x(\d+)x(\d+)\.", one.opcode):  # a warpgroup, as in 64x256x16
        m, n, k = (int(size) for size in shape.groups())
        groups = tile.num_warps // WARPGROUP
        in_shared = one.operands.count("gdesc")  # one descriptor names both operands
        size = 32 // k
        bytes_read = (n * k + (0 if re.search(r"^R\d+, R\d+", one.operands) else m * k)) * size
        return m * n * k * groups, bytes_read * groups if in_shared else 0
    shape = re.search(r"\.(16)(8)(\d+)\.", one.opcode)  # a warp, as in 16816
    if shape is None:
        raise ValueError(f"the shape of {one.opcode} is not known here")
    m, n, k = (int(size) for size in shape.groups())
    return m * n * k * tile.num_warps, 0


def _speed(one: Instruction) -> float:
    """Tensor rate over the 16-bit one."""
    if one.name in ("QMMA", "QGMMA", "UTCQMMA", "IMMA", "IGMMA", "UTCIMMA"):
        return 2.0
    return 0.5 if "TF32" in one.opcode else 1.0


def _lane_bytes(one: Instruction) -> int:
    """Bytes that a lane moves: `LDSM.16.M88.4` four 8x8 matrices in 16 bits, `LDS.128` sixteen."""
    if one.name in ("LDSM", "STSM"):
        matrices = re.search(r"M88\.(\d)", one.opcode)
        return 4 * (int(matrices[1]) if matrices else 1)
    width = re.search(r"\.(?:U|S)?(8|16|32|64|128)\b", one.opcode)
    return int(width[1]) // 8 if width else 4
