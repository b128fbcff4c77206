"""A GEMM with its communication as a case: shapes of each rank, inputs, the float64 check.

Sizes are those of the whole op: x [M, K], weight [N, K]. all_gather_matmul: rank r holds its rows
of x and its rows of the weight. The others: it holds its columns of both.

A result passes where, elementwise, |ours - ref| <= |stock - ref| + sqrt(K) eps32 (|A| |B|): ref in
float64, stock being torch's matmul on each rank in the dtype, its parts added in rank order in
float32 and rounded once. PyTorch's own collective, which adds 16-bit parts in 16 bits, passes
within (W + 1) u (|A| |B|) beyond that. All rows are checked where there are few, else ROWS of each
output, first and last among them; where ranks hold the same, all of it must be the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch.nn.functional import linear

from bench.case import ITEM_SIZE, SHORT
from bench.reference import UNIT_ROUNDOFF, Verdict, checksum

ROWS = 32
EPS32 = 2.0**-23
GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
OPS = (GATHER, SCATTER, REDUCE)


@dataclass(frozen=True)
class GemmInputs:
    """One rank's arguments."""

    x: torch.Tensor  # [M_r, K] or [M, K_r]
    weight: torch.Tensor  # [N_r, K] or [N, K_r]


@dataclass(frozen=True)
class Reference:
    """The float64 answer on some rows of one rank's output."""

    count: int  # rows of the whole output
    rows: torch.Tensor  # those that are compared
    exact: torch.Tensor  # [len(rows), columns], float64
    limit: torch.Tensor  # on the error, elementwise
    size: torch.Tensor  # |A| |B|


def share(total: int, world: int, rank: int) -> tuple[int, int]:
    """Begin and end of a rank's part: sizes differ by at most one, the first ranks have more."""
    base, more = divmod(total, world)
    begin = rank * base + min(rank, more)
    return begin, begin + base + (rank < more)


@dataclass(frozen=True)
class GemmCase:
    """One op at one shape, on `world` ranks."""

    op: str
    m: int
    n: int
    k: int
    dtype: str
    world: int
    seed: int = 0

    @property
    def size(self) -> str:
        return f"{self.m} x {self.n} x {self.k}"

    @property
    def label(self) -> str:
        return f"{self.op} {self.size} {SHORT[self.dtype]} x{self.world}"

    @property
    def decode(self) -> bool:
        return self.m <= 16

    @property
    def shape(self) -> list[int]:
        return [self.m, self.n, self.k]

    @property
    def nbytes(self) -> int:
        """Of the array that is gathered or reduced."""
        return self.m * (self.k if self.op == GATHER else self.n) * ITEM_SIZE[self.dtype]

    @property
    def flops(self) -> int:
        """Of one rank."""
        return 2 * self.m * self.n * self.k // self.world

    @property
    def input_bytes(self) -> int:
        held = self.n * self.k // self.world + self.m * self.k
        return held * ITEM_SIZE[self.dtype]

    @property
    def same_everywhere(self) -> bool:
        return self.op == REDUCE

    @property
    def row_shares(self) -> list[int]:
        """Rows of x (all_gather_matmul) or of the product (matmul_reduce_scatter) on each rank."""
        return [e - b for b, e in (share(self.m, self.world, r) for r in range(self.world))]

    def inputs(self, rank: int, variant: int, device: torch.device | str = "cpu") -> GemmInputs:
        """What a rank passes; any rank can draw any other's."""
        seed = (self.seed * 1009 + rank) * 1013 + variant
        generator = torch.Generator().manual_seed(seed)
        x_shape, w_shape = self._shapes(rank)
        dtype = getattr(torch, self.dtype)
        x, weight = (
            torch.randn(shape, generator=generator).to(dtype).to(device)
            for shape in (x_shape, w_shape)
        )
        return GemmInputs(x, weight)

    def _shapes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        if self.op == GATHER:
            begin, end = share(self.n, self.world, rank)
            return (self.row_shares[rank], self.k), (end - begin, self.k)
        begin, end = share(self.k, self.world, rank)
        return (self.m, end - begin), (self.n, end - begin)

    def reference(self, rank: int, variant: int) -> Reference:
        """What this rank should get, on the rows that are compared."""
        held = [self.inputs(r, variant) for r in range(self.world)]
        if self.op == GATHER:
            pairs = [(torch.cat([h.x for h in held]), held[rank].weight)]
        else:
            pairs = [(h.x, h.weight) for h in held]
        begin, end = share(self.m, self.world, rank) if self.op == SCATTER else (0, self.m)
        rows = torch.tensor(_rows(end - begin, self.seed), dtype=torch.long)
        # The product is made whole, as the contestants make it: fewer rows may take another path.
        parts = [linear(a, b)[begin:end][rows].float() for a, b in pairs]
        same = torch.stack(parts).sum(0).to(pairs[0][0].dtype).double()
        cut = [(a[begin:end][rows], b) for a, b in pairs]
        exact = torch.stack([linear(a.double(), b.double()) for a, b in cut]).sum(0)
        size = torch.stack([linear(a.float().abs(), b.float().abs()) for a, b in cut]).sum(0)
        limit = (same - exact).abs() + sqrt(self.k) * EPS32 * size.double()
        return Reference(end - begin, rows, exact, limit, size.double())

    def check(self, reference: Reference, output: torch.Tensor, stock: bool) -> Verdict:
        """Compares a rank's output; `stock`: of PyTorch's own collective."""
        limit = reference.limit
        if stock:
            unit = UNIT_ROUNDOFF[getattr(torch, self.dtype)]
            limit = limit + (self.world + 1) * unit * reference.size
        return _verdict(output, reference, limit)


def _rows(count: int, seed: int) -> list[int]:
    if count <= ROWS:
        return list(range(count))
    some = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[: ROWS - 2]
    return sorted({0, count - 1, *some.tolist()})


def _verdict(output: torch.Tensor, wanted: Reference, limit: torch.Tensor) -> Verdict:
    shape = (wanted.count, wanted.exact.shape[1])
    if tuple(output.shape) != shape:
        return Verdict(float("inf"), 1.0, 0, f"shape {tuple(output.shape)}, want {shape}")
    got = output.detach().cpu()
    if not torch.isfinite(got).all():  # also in rows that are not compared
        return Verdict(float("inf"), 1.0, checksum(got), "not all finite")
    if not wanted.exact.numel():
        return Verdict(0.0, 1.0, checksum(got))
    error = (got[wanted.rows].double() - wanted.exact).abs()
    part = error / limit.clamp_min(torch.finfo(torch.double).tiny)
    worst = int(part.argmax())
    row, column = divmod(worst, shape[1])
    place = int(wanted.rows[row])
    where = f"row {place}, column {column}: {got[place, column].item()!r}"
    return Verdict(float(part.flatten()[worst]), 1.0, checksum(got), where)
