"""Attention over a sequence cut over ranks, as a case: its patterns, inputs, and float64 check.

Heads are those of Llama-3-8B (32 of queries, 8 of keys, 128 wide), on CPU a quarter of them.

    causal, full   one sequence
    documents      packed, of some 1024 rows each, causal within each
    window         causal, each query sees 512 keys before it

A call gives this rank's rows of the result, and in training the gradients of q, k and v too; which
rows those are is the contestant's own choice. They are compared on some rows and keys, spread over
the sequence, of the heads of one key head, with float64 by the definition, of the values rounded to
the dtype. A result passes whose root mean square error is at most 1e-5 of the root mean square of
what is wanted in float32; in bfloat16 7.2e-3: three times the 2.4e-3 that weights rounded to it,
each by 2^-9 at most, cost a gradient; sums that others round on the way may lose twice that.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from bench.case import ITEM_SIZE
from bench.reference import Verdict

FORWARD, TRAIN = "forward", "train"
PATTERNS = ("causal", "full", "documents", "window")
OPS = tuple(f"{pattern}_{what}" for pattern in PATTERNS for what in (FORWARD, TRAIN))
MEAN_DOCUMENT, WINDOW = 1024, 512
LIMITS = {"float32": 1e-5, "bfloat16": 7.2e-3}
_SAMPLE = 12  # rows of each rank's part, and keys, that are compared
_SLICE = 512  # query rows of the reference at a time


@dataclass(frozen=True)
class Sizes:
    """Of one sequence's operands."""

    rows: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Inputs:
    """The whole sequence's, alike on all ranks; contestants take their rows before they start."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


@dataclass(frozen=True)
class Output:
    """What a rank has: tensors of its rows, by name; `rows` says which of the whole they are."""

    rows: Tensor
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class AttentionCase:
    """One pattern, forward or with gradients."""

    op: str
    sizes: Sizes
    world: int
    seed: int = 0
    dtype: str = "float32"

    @property
    def pattern(self) -> str:
        return self.op.split("_")[0]

    @property
    def train(self) -> bool:
        return self.op.endswith(TRAIN)

    @property
    def causal(self) -> bool:
        return self.pattern != "full"

    @property
    def window(self) -> int:
        """-1: none."""
        return WINDOW if self.pattern == "window" else -1

    @property
    def size(self) -> str:
        s = self.sizes
        return f"{s.rows} x {s.heads}/{s.kv_heads} x {s.head_dim}"

    @property
    def label(self) -> str:
        return f"{self.op} {self.size} x{self.world}"

    @property
    def shape(self) -> list[int]:
        s = self.sizes
        return [s.rows, s.heads, s.kv_heads, s.head_dim]

    @property
    def nbytes(self) -> int:
        """Of one rank's keys and values."""
        s = self.sizes
        return 2 * s.rows // self.world * s.kv_heads * s.head_dim * ITEM_SIZE[self.dtype]

    @property
    def input_bytes(self) -> int:
        return 1 << 40  # one set: a reference takes seconds

    @property
    def borders(self) -> tuple[int, ...]:
        """Where documents begin, and the last ends."""
        if self.pattern != "documents":
            return 0, self.sizes.rows
        generator = torch.Generator().manual_seed(self.seed)
        borders = [0]
        while borders[-1] < self.sizes.rows:
            length = MEAN_DOCUMENT // 4 + int(
                torch.randint(3 * MEAN_DOCUMENT // 2, (), generator=generator)
            )
            borders.append(min(self.sizes.rows, borders[-1] + length))
        return tuple(borders)

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """bool [queries, keys], by their rows."""
        q, k = queries.unsqueeze(1), keys.unsqueeze(0)
        seen = torch.ones(q.shape[0], k.shape[1], dtype=torch.bool, device=q.device)
        if self.causal:
            seen &= k <= q
        if self.window >= 0:
            seen &= k >= q - self.window
        if self.pattern == "documents":
            borders = torch.tensor(self.borders, device=q.device)
            seen &= torch.bucketize(q, borders, right=True) == torch.bucketize(
                k, borders, right=True
            )
        return seen

    @property
    def pairs(self) -> int:
        """(Query, key) pairs that see each other."""
        rows = self.sizes.rows
        if self.pattern == "full":
            return rows * rows
        if self.pattern == "window":
            least = min(WINDOW, rows - 1)
            return least * (least + 1) // 2 + (rows - least) * (least + 1)
        lengths = [b - a for a, b in zip(self.borders, self.borders[1:], strict=False)]
        return sum(n * (n + 1) // 2 for n in lengths)

    @property
    def flops(self) -> int:
        """Of one rank: two products forward, five more in backward."""
        each = 2 * self.sizes.heads * self.sizes.head_dim * self.pairs // self.world
        return each * (7 if self.train else 2)

    @property
    def same_everywhere(self) -> bool:
        return False

    def inputs(self, rank: int, variant: int, device: torch.device | str = "cpu") -> Inputs:
        generator = torch.Generator().manual_seed(self.seed * 1009 + variant)
        s = self.sizes
        made = [
            torch.randn(1, s.rows, heads, s.head_dim, generator=generator)
            .to(getattr(torch, self.dtype))
            .to(device)
            for heads in (s.heads, s.kv_heads, s.kv_heads, s.heads)
        ]
        return Inputs(*made)

    def reference(self, rank: int, variant: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Of each tensor: rows of the whole, and what is wanted there of the first key head."""
        s = self.sizes
        return _reference(self, variant, s)

    def check(self, reference: Any, output: Output, stock: bool) -> Verdict:
        worst = Verdict(0.0, 1.0, 0)
        group = self.sizes.heads // self.sizes.kv_heads
        where = torch.full((self.sizes.rows,), -1)
        where[output.rows] = torch.arange(output.rows.numel())
        names = ("out", "dq", "dk", "dv") if self.train else ("out",)
        for name in names:
            got = output.tensors.get(name)
            rows, exact = reference[name]
            heads = group if name in ("out", "dq") else 1
            if got is None or got.shape[1] != output.rows.numel():
                return Verdict(float("inf"), 1.0, 0, f"{name} is missing or of other rows")
            held = where[rows] >= 0
            if not held.any():
                return Verdict(float("inf"), 1.0, 0, f"{name} has none of the rows {rows.tolist()}")
            mine = got[0, where[rows][held], :heads].detach().cpu().double()
            size = exact.square().mean().sqrt()
            error = float((mine - exact[held]).square().mean().sqrt() / size) / LIMITS[self.dtype]
            error = error / 2 if stock and self.dtype != "float32" else error
            if not error <= worst.error:
                worst = Verdict(
                    error if error == error else float("inf"), 1.0, 0, f"{name}, root mean square"
                )
        return worst


@lru_cache(maxsize=2)
def _reference(case: AttentionCase, variant: int, sizes: Sizes) -> dict[str, tuple[Tensor, Tensor]]:
    # Of 65536 rows it would take a CPU minutes.
    on_gpu = case.dtype == "bfloat16" and torch.cuda.is_available()
    there = torch.device("cuda" if on_gpu else "cpu")
    inputs = case.inputs(0, variant, there)
    group = sizes.heads // sizes.kv_heads
    q, dout = (x[0, :, :group].double().transpose(0, 1) for x in (inputs.q, inputs.dout))
    k, v = (x[0, :, 0].double() for x in (inputs.k, inputs.v))
    scale = sizes.head_dim**-0.5
    every = torch.arange(sizes.rows, device=there)
    # Some rows of the front and the back of each of 2P parts: whoever holds them, has some.
    count = max(2 * case.world, _SAMPLE)
    some = torch.unique(torch.linspace(0, sizes.rows - 1, 2 * count).round().long()).to(there)
    out = torch.zeros(group, sizes.rows, sizes.head_dim, dtype=torch.float64, device=there)
    lse = torch.zeros(group, sizes.rows, dtype=torch.float64, device=there)
    for rows in every.split(_SLICE) if case.train else [some]:
        low = max(0, int(rows[0]) - case.window) if case.window >= 0 else 0
        high = int(rows[-1]) + 1 if case.causal else sizes.rows
        keys = every[low:high]
        scores = (q[:, rows] @ k[keys].T) * scale
        scores.masked_fill_(~case.visible(rows, keys), -torch.inf)
        lse[:, rows] = torch.logsumexp(scores, -1)
        out[:, rows] = torch.exp(scores - lse[:, rows].unsqueeze(-1)) @ v[keys]
    found = {"out": (some, out[:, some].transpose(0, 1))}
    if case.train:
        delta = (dout * out).sum(-1)

        def weights(rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
            scores = (q[:, rows] @ k[keys].T) * scale
            scores.masked_fill_(~case.visible(rows, keys), -torch.inf)
            p = torch.exp(scores - lse[:, rows].unsqueeze(-1))
            dp = dout[:, rows] @ v[keys].T
            return p, p * (dp - delta[:, rows].unsqueeze(-1)) * scale

        _, ds = weights(some, every)
        found["dq"] = some, (ds @ k).transpose(0, 1)
        p, ds = weights(every, some)
        found["dk"] = some, (ds.mT @ q).sum(0).unsqueeze(1)
        found["dv"] = some, (p.mT @ dout).sum(0).unsqueeze(1)
    return {name: (rows.cpu(), exact.cpu()) for name, (rows, exact) in found.items()}
