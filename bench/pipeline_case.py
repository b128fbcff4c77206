"""A training step of a pipeline as a case: a GPT, its microbatches, the float64 check.

A pre-norm GPT (LayerNorm, causal attention of heads of 64, an MLP of four widths, GELU), learned
positions, cross entropy over a small vocabulary, so that most work is in the layers. Layers are cut
evenly; the first stage has the embedding, the last one the final norm and the output layer.

    step   the loss, where the last stage is, and the gradients of a rank's stages

The whole model in float64 on one process is the reference. A result passes whose error from it, in
the root mean square of each tensor, is at most twice that of the whole model in float32 on one
process, plus a rounding of float32: the microbatches' gradients are the same numbers, added in
another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from bench.block_case import EPS32, rms
from bench.reference import Verdict

VOCABULARY, HEAD = 512, 64
CHUNKS = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved-1f1b": 2,
    "looped-bfs": 2,
    "zb-v": 2,
    "dualpipev": 2,
}
SCHEDULES = tuple(CHUNKS)
STEP = "gpt_step"
TOO_MANY_BYTES = 1 << 40  # one set of inputs: the reference of each takes seconds


@dataclass(frozen=True)
class Sizes:
    """A model and its microbatches."""

    hidden: int
    layers: int
    batch: int  # sequences of a microbatch
    tokens: int  # of a sequence
    microbatches: int

    def __str__(self) -> str:
        return (
            f"{self.layers} x {self.hidden}, {self.microbatches} x {self.batch * self.tokens} tok"
        )


@dataclass(frozen=True)
class Reference:
    """Tensors by name: the loss, and the gradients of every parameter."""

    exact: dict[str, Tensor]
    limits: dict[str, float]  # on the root mean square of the error


@dataclass(frozen=True)
class PipelineCase:
    """One schedule on one model."""

    op: str  # the schedule
    sizes: Sizes
    world: int
    seed: int = 0
    dtype: str = "float32"

    @property
    def stages(self) -> int:
        return self.world * CHUNKS[self.op]

    @property
    def size(self) -> str:
        return str(self.sizes)

    @property
    def label(self) -> str:
        return f"{self.op} {self.size} x{self.world}"

    @property
    def shape(self) -> list[int]:
        s = self.sizes
        return [s.layers, s.hidden, s.microbatches, s.batch, s.tokens]

    @property
    def nbytes(self) -> int:
        """Of the activations that one microbatch sends over one boundary."""
        return self.sizes.batch * self.sizes.tokens * self.sizes.hidden * 4

    @property
    def input_bytes(self) -> int:
        return TOO_MANY_BYTES

    @property
    def flops(self) -> int:
        """Of one rank's layers."""
        s = self.sizes
        weights = 12 * s.hidden * s.hidden * s.layers // self.world
        return 6 * weights * s.microbatches * s.batch * s.tokens

    @property
    def same_everywhere(self) -> bool:
        return False

    def counts(self) -> list[int]:
        """Parts of each stage: embedding, layers, output."""
        each, more = divmod(self.sizes.layers, self.stages)
        counts = [each + (stage < more) for stage in range(self.stages)]
        counts[0] += 1
        counts[-1] += 1
        return counts

    def whole(self) -> nn.Sequential:
        """The model; a copy of its own for whoever asks."""
        return gpt(self.sizes, self.seed)

    def inputs(self, rank: int, variant: int, device: torch.device | str = "cpu") -> Tensor:
        """Token ids [microbatches x batch, tokens + 1]: inputs, and one further on the targets."""
        generator = torch.Generator().manual_seed(self.seed * 1009 + variant)
        s = self.sizes
        shape = (s.microbatches * s.batch, s.tokens + 1)
        return torch.randint(VOCABULARY, shape, generator=generator).to(device)

    def reference(self, rank: int, variant: int) -> Reference:
        return _reference(self.sizes, self.seed, self.inputs(0, variant))

    def check(self, reference: Reference, output: dict[str, Tensor], stock: bool) -> Verdict:
        """Compares what a rank got, by name."""
        worst = Verdict(0.0, 1.0, 0)
        if not output:
            return Verdict(float("inf"), 1.0, 0, "no results")
        for name, got in output.items():
            exact = reference.exact[name]
            if got.shape != exact.shape:
                where = f"{name}: shape {tuple(got.shape)}, want {tuple(exact.shape)}"
                return Verdict(float("inf"), 1.0, 0, where)
            error = float(rms(got.detach().cpu().double() - exact)) / reference.limits[name]
            if not error <= worst.error:
                error = error if error == error else float("inf")
                worst = Verdict(error, 1.0, 0, f"{name}, root mean square")
        return worst


class Embedding(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, sizes.hidden)
        self.positions = nn.Embedding(sizes.tokens, sizes.hidden)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.tokens(ids) + self.positions.weight
        return y


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(gelu(self.up(self.second_norm(x))))
        return y


def gpt(sizes: Sizes, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    head = nn.Sequential(nn.LayerNorm(sizes.hidden), nn.Linear(sizes.hidden, VOCABULARY))
    blocks = (Block(sizes.hidden) for _ in range(sizes.layers))
    return nn.Sequential(Embedding(sizes), *blocks, head)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


@lru_cache(maxsize=2)
def _answers_cached(sizes: Sizes, seed: int, ids: tuple[int, ...]) -> Reference:
    data = torch.tensor(ids).view(-1, sizes.tokens + 1)
    # Microbatches are equal: the mean over all tokens is the mean of theirs, and takes a third of
    # the time.
    exact = _answers(gpt(sizes, seed).double(), [data])
    stock = _answers(gpt(sizes, seed), data.split(sizes.batch))
    limits = {
        name: float(2 * rms(stock[name].double() - e) + EPS32 * rms(e)) for name, e in exact.items()
    }
    return Reference(exact, limits)


def _reference(sizes: Sizes, seed: int, ids: Tensor) -> Reference:
    return _answers_cached(sizes, seed, tuple(ids.flatten().tolist()))


def _answers(model: nn.Module, data: Sequence[Tensor]) -> dict[str, Tensor]:
    """The mean loss over the microbatches, and its gradients."""
    total = 0.0
    for ids in data:
        loss = loss_fn(model(ids[:, :-1]), ids[:, 1:]) / len(data)
        loss.backward()
        total = total + loss.detach()
    found: dict[str, Any] = {n: p.grad for n, p in model.named_parameters()}
    return {"loss": torch.as_tensor(total), **found}
