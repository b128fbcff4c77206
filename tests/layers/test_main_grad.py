"""Layers whose weights have a `main_grad`: the gradient is there, whole, and `.grad` stays None.

Layers of proof: N processes on a CPU, float32, against the same layers without it. kv heads that
are copied, features that are padded and sequence parallelism included; a second pass accumulates.
"""

import copy

import pytest
import torch

from tests.launch import run_ranks
from tests.ops.seats import make_groups

HIDDEN, HEADS, KV, MIDDLE = 12, 6, 2, 11


class Block(torch.nn.Module):
    def __init__(self, group, sequence):
        from pyparallel import layers

        super().__init__()
        self.qkv = layers.QKVParallelLinear(
            HIDDEN, HEADS, group, num_kv_heads=KV, sequence_parallel=sequence
        )
        self.out = layers.RowParallelLinear(
            HIDDEN, HIDDEN, group, sequence_parallel=sequence, partition=self.qkv.heads.query
        )
        self.mlp = layers.GatedMLP(HIDDEN, MIDDLE, group, multiple_of=4, sequence_parallel=sequence)

    def forward(self, x):
        q, k, v = self.qkv(x)
        q = q * (1 + k.sum(-1, keepdim=True)) * (1 + v.square().sum(-1, keepdim=True))
        return self.mlp(self.out(q))


def blocks(rank):
    from pyparallel import layers

    torch.set_num_threads(1)
    (group,) = make_groups(rank, ("pyparallel",)).values()
    for sequence in (False, layers.SequenceSharding(dim=0, length=2 * rank.world_size + 1)):
        torch.manual_seed(3)
        plain = Block(group, sequence)
        ours = Block(group, sequence)
        ours.load_state_dict(copy.deepcopy(plain.state_dict()))
        weights = [(n, p) for n, p in ours.named_parameters() if p.dim() == 2]
        for _, p in weights:
            p.main_grad = torch.zeros_like(p)
        rows = 2 + (rank.rank == 0) if sequence else 5
        torch.manual_seed(rank.rank if sequence else 0)
        x = torch.randn(rows, HIDDEN)
        for model in (plain, ours):
            for _ in range(2):
                model(x).square().sum().backward()
        expected = dict(plain.named_parameters())
        for name, p in weights:
            assert p.grad is None, name
            close(p.main_grad, expected[name].grad, name)
        for name, p in ours.named_parameters():
            if p.dim() == 1:
                close(p.grad, expected[name].grad, name)
        norms = layers.gradient_norm(ours), layers.gradient_norm(plain)
        assert abs(norms[0] - norms[1]) <= 1e-5 * norms[1]
        layers.clip_gradient_norm_(ours, 0.5)
        assert abs(layers.gradient_norm(ours) - 0.5) < 1e-4


def close(got, want, name):
    if want.numel():
        assert (got - want).abs().max() <= 1e-5 * want.abs().max().clamp_min(1e-3), name


class PlainMLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = torch.nn.Linear(HIDDEN, MIDDLE)
        self.up_proj = torch.nn.Linear(HIDDEN, MIDDLE)
        self.down_proj = torch.nn.Linear(MIDDLE, HIDDEN)

    def forward(self, x):
        return self.down_proj(self.gate_proj(x).relu() * self.up_proj(x))


def parallelized(rank):
    """Columns of a block, whose input comes once: with few rows, which take another product."""
    from pyparallel import layers

    torch.set_num_threads(1)
    (group,) = make_groups(rank, ("pyparallel",)).values()
    torch.manual_seed(5)
    whole = PlainMLP()
    ours = copy.deepcopy(whole)
    plan = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
    layers.parallelize(ours, group, plan)
    x = torch.randn(3, HIDDEN)
    with torch.no_grad():
        close(ours(x), whole(x), "y")
    weights = {n: p for n, p in ours.named_parameters() if p.dim() == 2}
    for p in weights.values():
        p.main_grad = torch.zeros_like(p)
    for model in (whole, ours):
        model(x).square().sum().backward()
    counts = [MIDDLE // rank.world_size + (r < MIDDLE % rank.world_size) for r in range(4)]
    mine = slice(sum(counts[: rank.rank]), sum(counts[: rank.rank + 1]))
    for name, p in weights.items():
        assert p.grad is None, name
        want = dict(whole.named_parameters())[name].grad
        close(p.main_grad, want[:, mine] if name.startswith("down") else want[mine], name)


def test_main_grad_of_a_parallelized_block():
    run_ranks(parallelized, 2)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_main_grad_of_layers(world):
    run_ranks(blocks, world)
