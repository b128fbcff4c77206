"""Random inputs that any rank can regenerate, and the float64 check of a result.

Each rank's input is a window of one pool of random numbers, at an offset of its own. The pool's
length is a prime, so windows shifted by a chunk, a share or a rank never coincide and a block that
lands in the wrong place is seen. Outputs are filled with NaN before an op runs.

Bounds, relative to the sum of magnitudes |x_0| + .. + |x_{W-1}| of an element (u = unit roundoff):
adding W numbers in float32 in any order errs by at most (W - 1) u32; a 16-bit result adds one
rounding, u16; a contestant that adds in its own 16-bit type errs by (W - 1) u16. The factor 1.01
covers the products of these terms. Moved data must be equal bit for bit.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch

from bench.ops import Layout, Piece

POOL = 1_048_573  # prime
_CHUNK = 1 << 18
UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def bound(dtype: torch.dtype, world: int, wide_sum: bool) -> float:
    """`wide_sum`: 16-bit numbers are added up in float32 and rounded once."""
    unit = UNIT_ROUNDOFF[dtype]
    if world == 1:
        return 0.0
    if dtype == torch.float32 or not wide_sum:
        return 1.01 * (world - 1) * unit
    return 1.01 * ((world - 1) * UNIT_ROUNDOFF[torch.float32] + unit)


class Inputs:
    """The random inputs of all ranks for one dtype."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        # Normal, not uniform: torch.rand has few mantissa bits, so that its sums would be exact.
        self.pool = torch.randn(POOL, generator=generator).to(dtype)

    def window(self, rank: int, variant: int, start: int, count: int) -> torch.Tensor:
        """Elements [start, start + count) of a rank's input; `variant` tells buffers apart."""
        offset = (rank * 102_931 + variant * 15_485_863 + start) % POOL
        if offset + count <= POOL:
            return self.pool[offset : offset + count]
        parts = [self.pool[offset:]]
        left = count - (POOL - offset)
        while left > 0:
            parts.append(self.pool[: min(left, POOL)])
            left -= POOL
        return torch.cat(parts)

    def fill(self, out: torch.Tensor, rank: int, variant: int) -> None:
        for start in range(0, out.numel(), POOL):
            part = out[start : start + POOL]
            part.copy_(self.window(rank, variant, start, part.numel()))


@dataclass(frozen=True)
class Verdict:
    error: float  # largest, relative to the sum of magnitudes; infinite where moved data differ
    bound: float
    checksum: int  # of the whole output
    where: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= self.bound


def check(
    result: torch.Tensor,
    layout: Layout,
    inputs: Inputs,
    variant: int,
    limit: float,
) -> Verdict:
    """Compares one rank's output with float64; reads it all, in chunks that fit the cache."""
    worst, where = 0.0, ""
    for piece in layout.pieces:
        for begin in range(0, piece.count, _CHUNK):
            size = min(_CHUNK, piece.count - begin)
            got = result[piece.start + begin : piece.start + begin + size]
            error, index = _chunk_error(got.cpu(), piece, begin, inputs, variant)
            if error > worst:
                worst = error
                where = f"element {piece.start + begin + index}: {got[index].item()!r}"
    moved = all(len(piece.sources) == 1 for piece in layout.pieces)
    return Verdict(worst, 0.0 if moved else limit, checksum(result), where)


def _chunk_error(
    got: torch.Tensor, piece: Piece, begin: int, inputs: Inputs, variant: int
) -> tuple[float, int]:
    parts = [inputs.window(r, variant, o + begin, got.numel()) for r, o in piece.sources]
    if len(parts) == 1:
        if torch.equal(got, parts[0]):
            return 0.0, 0
        return math.inf, int((got != parts[0]).nonzero()[0])
    wide = [part.double() for part in parts]
    total, magnitude = wide[0].clone(), wide[0].abs()
    for part in wide[1:]:
        total += part
        magnitude += part.abs()
    error = (got.double() - total).abs_() / magnitude.clamp_min_(torch.finfo(torch.double).tiny)
    error.nan_to_num_(nan=math.inf)
    index = int(error.argmax())
    return float(error[index]), index


def checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
