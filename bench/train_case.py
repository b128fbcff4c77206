"""A training step of a small Llama as a case: a layout, the model, its batch, the float64 check.

The model is examples/llama.py: RMSNorm, rotary positions, grouped heads, a gated MLP. A step is
forward and backward of all microbatches, gradients joined over the ranks that share parameters,
and AdamW with a learning rate of 0: all its work, and the same weights afterwards, so that every
call can be checked.

    step   the loss, and the gradients of the parameters that a rank's stage has, whole

The whole model in float64 on one process is the reference. A result passes whose error from it, in
the root mean square of each tensor, is at most twice that of the whole model in float32 on one
process, plus eight roundings of float32: sums over ranks are taken in other orders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bench.block_case import EPS32, rms
from bench.pipeline_case import Reference
from bench.reference import Verdict
from examples.llama import Llama, LlamaConfig

VOCABULARY, HEAD = 256, 32
AXES = ("dp", "tp", "sp", "pp")
# name: sizes of the axes, ZeRO
LAYOUTS: dict[str, tuple[dict[str, int], int]] = {
    **{f"{axis}2": ({axis: 2}, 0) for axis in AXES},
    "zero3": ({"dp": 2}, 3),
    "dp2-tp2": ({"dp": 2, "tp": 2}, 0),
    "dp2-sp2": ({"dp": 2, "sp": 2}, 0),
    "dp2-pp2": ({"dp": 2, "pp": 2}, 0),
    "tp2-sp2": ({"tp": 2, "sp": 2}, 0),
    "tp2-pp2": ({"tp": 2, "pp": 2}, 0),
}
_TOO_MANY_BYTES = 1 << 40  # one set of inputs: the reference of each takes seconds


@dataclass(frozen=True)
class Sizes:
    """A model and its global batch."""

    hidden: int
    layers: int
    samples: int
    rows: int
    microbatches: int  # with a pipeline

    def __str__(self) -> str:
        return f"{self.layers} x {self.hidden}, {self.samples} x {self.rows} tok"


@dataclass
class Output:
    """What a step left on a rank; gradients are made whole when they are asked for, by all."""

    loss: float
    gradients: Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True)
class TrainCase:
    """One layout of one model."""

    op: str  # the layout
    sizes: Sizes
    world: int
    seed: int = 0
    dtype: str = "float32"

    @property
    def axes(self) -> dict[str, int]:
        return LAYOUTS[self.op][0]

    @property
    def zero(self) -> int:
        return LAYOUTS[self.op][1]

    def axis(self, name: str) -> int:
        return self.axes.get(name, 1)

    @property
    def microbatches(self) -> int:
        return self.sizes.microbatches if self.axis("pp") > 1 else 1

    @property
    def size(self) -> str:
        return str(self.sizes)

    @property
    def label(self) -> str:
        return f"{self.op} {self.size} x{self.world}"

    @property
    def shape(self) -> list[int]:
        s = self.sizes
        return [s.layers, s.hidden, s.samples, s.rows]

    @property
    def tokens(self) -> int:
        return self.sizes.samples * self.sizes.rows

    @property
    def nbytes(self) -> int:
        """Of a rank's activations between two layers."""
        shared = self.axis("dp") * self.axis("sp") * self.microbatches
        return self.tokens * self.sizes.hidden * 4 // shared

    @property
    def input_bytes(self) -> int:
        return _TOO_MANY_BYTES

    @property
    def flops(self) -> int:
        """Of one rank: 6 per weight of a matrix and token."""
        s, config = self.sizes, config_of(self.sizes)
        attention = s.hidden * (2 * s.hidden + 2 * config.num_key_value_heads * HEAD)
        layer = attention + 3 * s.hidden * config.intermediate_size
        return 6 * self.tokens * (s.layers * layer + s.hidden * VOCABULARY) // self.world

    @property
    def same_everywhere(self) -> bool:
        return False

    def whole(self) -> Llama:
        """The model; a copy of its own for whoever asks."""
        return llama(self.sizes, self.seed)

    def inputs(self, rank: int, variant: int, device: torch.device | str = "cpu") -> Tensor:
        """Token ids [samples, rows + 1]: inputs, and one further on the labels."""
        generator = torch.Generator().manual_seed(self.seed * 1009 + variant)
        shape = (self.sizes.samples, self.sizes.rows + 1)
        return torch.randint(VOCABULARY, shape, generator=generator).to(device)

    def reference(self, rank: int, variant: int) -> Reference:
        return _reference(self.sizes, self.seed, tuple(self.inputs(0, variant).flatten().tolist()))

    def check(self, reference: Reference, output: Output, stock: bool) -> Verdict:
        """Compares what a rank got, by name. Collective: the gradients come from all ranks."""
        found = {"loss": torch.tensor(output.loss, dtype=torch.float64), **output.gradients()}
        worst = Verdict(0.0, 1.0, 0)
        for name, got in found.items():
            exact = reference.exact[name]
            if got.shape != exact.shape:
                where = f"{name}: shape {tuple(got.shape)}, want {tuple(exact.shape)}"
                return Verdict(float("inf"), 1.0, 0, where)
            error = float(rms(got.detach().cpu().double() - exact)) / reference.limits[name]
            if not error <= worst.error:
                error = error if error == error else float("inf")
                worst = Verdict(error, 1.0, 0, f"{name}, root mean square")
        return worst


def config_of(sizes: Sizes) -> LlamaConfig:
    heads = sizes.hidden // HEAD
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=sizes.hidden,
        intermediate_size=32 * round(sizes.hidden / 12),  # 8/3, divisible by every layout
        num_hidden_layers=sizes.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
    )


def llama(sizes: Sizes, seed: int) -> Llama:
    torch.manual_seed(seed)
    return Llama(config_of(sizes))


@lru_cache(maxsize=2)
def _reference(sizes: Sizes, seed: int, ids: tuple[int, ...]) -> Reference:
    data = torch.tensor(ids).view(-1, sizes.rows + 1)
    exact = _answers(llama(sizes, seed).double(), data)
    stock = _answers(llama(sizes, seed), data)
    limits = {
        name: float(2 * rms(stock[name].double() - e) + 8 * EPS32 * rms(e))
        for name, e in exact.items()
    }
    return Reference(exact, limits)


def _answers(model: Llama, ids: Tensor) -> dict[str, Tensor]:
    """The mean loss over all tokens, and its gradients."""
    loss = cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}
