"""A small causal language model twice: whole, of torch's own modules, and of this library's layers.

Sizes divide by nothing: 53 tokens, 6 query heads on 2 kv heads, 29 features in the middle, 7 or 11
positions. Both are built from the same float64 values, so that a rank may compare its shards with
the whole's.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MIDDLE = 53, 20, 6, 2, 4, 29
IGNORED = -100


def attend(q: Tensor, k: Tensor, v: Tensor, head_dim: int) -> Tensor:
    """Causal grouped-query attention of [batch, sequence, heads * head_dim]."""
    batch, length = q.shape[:2]
    q, k, v = (x.view(batch, length, -1, head_dim).transpose(1, 2) for x in (q, k, v))
    if k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / head_dim**0.5
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    out = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
    return out.transpose(1, 2).reshape(batch, length, -1)


class WholeMLP(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, MIDDLE, bias=bias)
        self.up_proj = nn.Linear(HIDDEN, MIDDLE, bias=bias)
        self.down_proj = nn.Linear(MIDDLE, HIDDEN, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Whole(nn.Module):
    """The unsharded model."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.norm1 = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN)
        self.norm2 = nn.LayerNorm(HIDDEN)
        self.mlp = WholeMLP()
        self.norm3 = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        y = self.norm1(x)
        x = x + self.o_proj(attend(self.q_proj(y), self.k_proj(y), self.v_proj(y), HEAD_DIM))
        x = x + self.mlp(self.norm2(x))
        return self.head(self.norm3(x))


def loss_of(logits: Tensor, target: Tensor, smoothing: float, z: float) -> Tensor:
    flat, labels = logits.flatten(0, -2), target.flatten()
    if flat.dtype in (torch.float16, torch.bfloat16):
        flat = flat.float()
    loss = functional.cross_entropy(flat, labels, ignore_index=IGNORED, label_smoothing=smoothing)
    counted = labels != IGNORED
    return loss + z * (flat.logsumexp(-1).square() * counted).sum() / counted.sum()


class Sharded(nn.Module):
    """One rank's part of the model; batch first, sequence along dim 1."""

    def __init__(self, whole: Whole, group: Any, *, parallel: bool, multiple_of: int = 1) -> None:
        from pyparallel import layers

        super().__init__()
        sequence = layers.SequenceSharding(dim=1) if parallel else False
        both = {"sequence_parallel": sequence}
        self.embed = layers.VocabParallelEmbedding.from_embedding(
            whole.embed, group, multiple_of=multiple_of, **both
        )
        self.norm1 = layers.RMSNorm.from_norm(whole.norm1, group, **both)
        self.qkv = layers.QKVParallelLinear.from_linears(
            whole.q_proj, whole.k_proj, whole.v_proj, group, num_heads=HEADS, **both
        )
        self.o_proj = layers.RowParallelLinear.from_linear(
            whole.o_proj, group, partition=self.qkv.heads.query, **both
        )
        self.norm2 = layers.LayerNorm.from_norm(whole.norm2, group, **both)
        mlp = whole.mlp
        self.mlp = layers.GatedMLP.from_linears(
            mlp.gate_proj, mlp.up_proj, mlp.down_proj, group, multiple_of=multiple_of, **both
        )
        self.norm3 = layers.RMSNorm.from_norm(whole.norm3, group, **both)
        self.head = layers.ColumnParallelLinear.from_linear(
            whole.head, group, multiple_of=multiple_of, **both
        )
        if whole.head.weight is whole.embed.weight:
            layers.tie(self.embed, self.head)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.o_proj(attend(*self.qkv(self.norm1(x)), HEAD_DIM))
        x = x + self.mlp(self.norm2(x))
        return self.head(self.norm3(x))

    def loss(self, logits: Tensor, target: Tensor, smoothing: float, z: float) -> Tensor:
        loss_of = self.loss_of(smoothing, z)
        return loss_of(logits, target)

    def loss_of(self, smoothing: float, z: float) -> nn.Module:
        from pyparallel.layers import VocabParallelCrossEntropy

        return VocabParallelCrossEntropy(
            self.head.partition,
            self.embed.place.group,
            ignore_index=IGNORED,
            label_smoothing=smoothing,
            z_loss=z,
        )


@dataclass
class Batch:
    ids: Tensor
    target: Tensor


def batch_of(seed: int, size: int = 2, length: int = 7) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids, target = torch.randint(VOCAB, (2, size, length), generator=generator)
    target[0, 1] = IGNORED
    return Batch(ids, target)


def whole_model(seed: int, dtype: torch.dtype, tied: bool = False) -> Whole:
    torch.manual_seed(seed)
    model = Whole(tied).double()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases that do something
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.to(dtype)
