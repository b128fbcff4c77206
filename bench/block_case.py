"""A block of a transformer as a case: its whole weights, inputs, the float64 check.

The blocks are those of Llama-3-8B (arXiv 2407.21783, table 3: hidden 4096, 32 query and 8 kv heads
of 128, 14336 features between); on CPU of an eighth of its width, with as many query heads to a kv
head, so that the weights which a decoding step reads lie in caches. Rotary embedding is left out,
the same local arithmetic on all sides. Decoding is one new token for each of M sequences against
CACHE cached ones, prefill is one causal sequence of M tokens.

    forward   y [M, hidden], replicated
    train     y, then dx and every weight's gradient from a given dy
    sequence  x, y and their gradients are cut along the tokens: sequence parallelism

The whole block in float64, of the values rounded to the dtype, is the reference. A result passes
whose error from it, in the root mean square of each tensor, is at most twice that of the whole
block in the dtype on one process: sums over W ranks round each rank's part once more, and parts are
sqrt(W) smaller than the sum, so that an error of e becomes at most sqrt(2) e. PyTorch's DTensor
adds 16-bit parts in 16 bits, and passes within 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from bench.case import ITEM_SIZE, SHORT
from bench.reference import Verdict, checksum

FORWARD, TRAIN = "forward", "train"
MLP, ATTENTION = "mlp", "attention"
SEQUENCE = "sequence"  # between block and direction
OPS = tuple(
    f"{block}_{what}"
    for block in (MLP, ATTENTION)
    for what in (FORWARD, TRAIN, f"{SEQUENCE}_{FORWARD}", f"{SEQUENCE}_{TRAIN}")
)
CACHE, DECODE_ROWS = 256, 16
EPS32 = 2.0**-23


@dataclass(frozen=True)
class Sizes:
    """A model's widths."""

    hidden: int
    middle: int
    heads: int
    kv_heads: int
    head_dim: int


LLAMA_3_8B = Sizes(4096, 14336, 32, 8, 128)
EIGHTH = Sizes(512, 1792, 8, 2, 64)


@dataclass(frozen=True)
class BlockInputs:
    """What every rank passes. `variant` also names the attention's cache."""

    x: Tensor  # [sequences, tokens, hidden], replicated, or this rank's tokens
    dy: Tensor  # alike
    variant: int


@dataclass(frozen=True)
class Reference:
    exact: list[Tensor]  # float64: y, and for training dx and this rank's weight gradients
    limits: list[float]  # on the root mean square of the error


@dataclass(frozen=True)
class BlockCase:
    """One block, one direction, on M tokens."""

    op: str
    m: int
    dtype: str
    world: int
    sizes: Sizes = EIGHTH
    seed: int = 0

    @property
    def block(self) -> str:
        return self.op.split("_")[0]

    @property
    def train(self) -> bool:
        return self.op.endswith(TRAIN)

    @property
    def sequence(self) -> bool:
        """Whether the tokens are cut between blocks."""
        return SEQUENCE in self.op.split("_")

    @property
    def decode(self) -> bool:
        return self.m <= DECODE_ROWS and not self.sequence

    @property
    def size(self) -> str:
        return f"{self.m} x {self.sizes.hidden}"

    @property
    def label(self) -> str:
        return f"{self.op} {self.size} {SHORT[self.dtype]} x{self.world}"

    @property
    def shape(self) -> list[int]:
        return [self.m, self.sizes.hidden]

    @property
    def nbytes(self) -> int:
        """Of the activations that are reduced."""
        return self.m * self.sizes.hidden * ITEM_SIZE[self.dtype]

    @property
    def input_bytes(self) -> int:
        return self.nbytes

    @property
    def flops(self) -> int:
        """Of one rank's projections."""
        s = self.sizes
        columns = 3 * s.middle
        if self.block == ATTENTION:
            columns = 2 * (s.heads + s.kv_heads) * s.head_dim
        return 2 * self.m * s.hidden * columns // self.world * (3 if self.train else 1)

    @property
    def same_everywhere(self) -> bool:
        return not self.sequence

    def inputs(self, rank: int, variant: int, device: torch.device | str = "cpu") -> BlockInputs:
        whole = self.whole_inputs(variant, device)
        x, dy = (share_of(self, rank, name, t) for name, t in (("dx", whole.x), ("y", whole.dy)))
        return BlockInputs(x, dy, variant)

    def whole_inputs(self, variant: int, device: torch.device | str = "cpu") -> BlockInputs:
        """All tokens'."""
        generator = torch.Generator().manual_seed(self.seed * 1009 + variant)
        tokens = (self.m, 1) if self.decode else (1, self.m)
        x, dy = (
            torch.randn((*tokens, self.sizes.hidden), generator=generator)
            .to(getattr(torch, self.dtype))
            .to(device)
            for _ in range(2)
        )
        return BlockInputs(x, dy, variant)

    def cache(self, variant: int, kv_heads: slice) -> tuple[Tensor, Tensor] | None:
        """Cached keys and values [M, kv heads, CACHE, head_dim] of some heads; None in prefill."""
        if self.block != ATTENTION or not self.decode:
            return None
        generator = torch.Generator().manual_seed(self.seed * 1013 + variant + 7)
        shape = (self.m, self.sizes.kv_heads, CACHE, self.sizes.head_dim)
        k, v = (
            torch.randn(shape, generator=generator).to(getattr(torch, self.dtype)) for _ in "kv"
        )
        return k[:, kv_heads].contiguous(), v[:, kv_heads].contiguous()

    def whole(self) -> nn.Module:
        """The unsharded block."""
        return _whole(self.block, self.dtype, self.sizes, self.seed)

    def reference(self, rank: int, variant: int) -> Reference:
        """This rank's results, and how far off they may be."""
        exact, stock = (
            [share_of(self, rank, name, t) for name, t in found.items()]
            for found in (_answers(self, variant, torch.float64), _answers(self, variant, None))
        )
        limits = [
            float(2 * rms(s.double() - e) + EPS32 * rms(e))
            for s, e in zip(stock, exact, strict=True)
        ]
        return Reference(exact, limits)

    def check(self, reference: Reference, output: Any, stock: bool) -> Verdict:
        """Compares what a rank got: y, or (y, dx, weight gradients)."""
        found = [output] if isinstance(output, Tensor) else list(output)
        if len(found) != len(reference.exact):
            return Verdict(float("inf"), 1.0, 0, f"{len(found)} results")
        worst = Verdict(0.0, 1.0, checksum(found[0]))
        for i, (got, exact, limit) in enumerate(
            zip(found, reference.exact, reference.limits, strict=True)
        ):
            if got.shape != exact.shape:
                where = f"result {i}: shape {tuple(got.shape)}, want {tuple(exact.shape)}"
                return Verdict(float("inf"), 1.0, worst.checksum, where)
            error = float(rms(got.detach().cpu().double() - exact)) / limit
            error = error / 2 if stock else error
            if not error <= worst.error:
                error = error if error == error else float("inf")
                worst = Verdict(error, 1.0, worst.checksum, f"result {i}, root mean square")
        return worst


class WholeMLP(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden, sizes.middle, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, sizes.middle, bias=False)
        self.down_proj = nn.Linear(sizes.middle, sizes.hidden, bias=False)

    def forward(self, x: Tensor, cache: None = None) -> Tensor:
        y: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class WholeAttention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        self.q_proj = nn.Linear(sizes.hidden, sizes.heads * sizes.head_dim, bias=False)
        self.k_proj = nn.Linear(sizes.hidden, sizes.kv_heads * sizes.head_dim, bias=False)
        self.v_proj = nn.Linear(sizes.hidden, sizes.kv_heads * sizes.head_dim, bias=False)
        self.o_proj = nn.Linear(sizes.heads * sizes.head_dim, sizes.hidden, bias=False)

    def forward(self, x: Tensor, cache: tuple[Tensor, Tensor] | None) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        y: Tensor = self.o_proj(attend(q, k, v, cache, self.head_dim))
        return y


def attend(
    q: Tensor, k: Tensor, v: Tensor, cache: tuple[Tensor, Tensor] | None, head_dim: int
) -> Tensor:
    """Attention of [sequences, tokens, heads * head_dim]: causal, or of one token and a cache."""
    sequences, tokens = q.shape[:2]
    q, k, v = (x.view(sequences, tokens, -1, head_dim).transpose(1, 2) for x in (q, k, v))
    if cache is not None:
        k, v = (torch.cat((old, new), 2) for old, new in zip(cache, (k, v), strict=True))
    y = scaled_dot_product_attention(q, k, v, is_causal=cache is None, enable_gqa=True)
    return y.transpose(1, 2).reshape(sequences, tokens, -1)


def share_of(case: BlockCase, rank: int, name: str, tensor: Tensor) -> Tensor:
    """This rank's part of a whole result: rows of first layers, columns of second ones; tokens."""
    if case.world == 1:
        return tensor
    if name in ("y", "dx"):
        return tensor.tensor_split(case.world, 1)[rank] if case.sequence else tensor
    dim = 1 if name in ("down_proj", "o_proj") else 0
    return tensor.chunk(case.world, dim)[rank]


def rms(x: Tensor) -> Tensor:
    return x.double().square().mean().sqrt()


@lru_cache(maxsize=4)
def _whole(block: str, dtype: str, sizes: Sizes, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return (WholeMLP if block == MLP else WholeAttention)(sizes).to(getattr(torch, dtype))


@lru_cache(maxsize=2)
def _whole_double(block: str, dtype: str, sizes: Sizes, seed: int) -> nn.Module:
    module = (WholeMLP if block == MLP else WholeAttention)(sizes).double()
    module.load_state_dict(_whole(block, dtype, sizes, seed).state_dict())
    return module


def _answers(case: BlockCase, variant: int, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The whole block's results, in the case's dtype (None) or float64, by name."""
    make = _whole if dtype is None else _whole_double
    module = make(case.block, case.dtype, case.sizes, case.seed)
    inputs = case.whole_inputs(variant)
    cache = case.cache(variant, slice(None))
    x, dy = inputs.x, inputs.dy
    if dtype is not None:
        x, dy = x.to(dtype), dy.to(dtype)
        cache = None if cache is None else (cache[0].to(dtype), cache[1].to(dtype))
    if not case.train:
        with torch.no_grad():
            return {"y": module(x, cache)}
    x.requires_grad_()
    module.zero_grad()
    y = module(x, cache)
    y.backward(dy)
    assert x.grad is not None
    found = {"y": y.detach(), "dx": x.grad}
    for name, layer in module.named_children():
        found[name] = layer.weight.grad
    module.zero_grad()
    return found
