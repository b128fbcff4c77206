"""Fewer features, heads and tokens than ranks: some ranks hold nothing, and still take part.

Layers of proof: 4 processes on a CPU, with and without sequence parallelism; output and gradients
equal the unsharded layers' in float64. Runs in CI.
"""

import torch
from torch import nn

from tests.launch import run_ranks
from tests.layers.whole import attend
from tests.ops.reference import assert_close64, draw


def whole_parts():
    torch.manual_seed(4)
    embed, head = nn.Embedding(3, 5), nn.Linear(5, 3)
    q, k, v, o = nn.Linear(5, 4), nn.Linear(5, 2), nn.Linear(5, 2), nn.Linear(4, 5)
    first, second = nn.Linear(5, 2), nn.Linear(2, 5)
    return nn.ModuleDict(
        {"embed": embed, "q": q, "k": k, "v": v, "o": o, "first": first, "second": second}
        | {"head": head}
    ).double()


def fewer(rank):
    from pyparallel import layers
    from pyparallel.comm import Communicator
    from tests.layers.test_model import gradients

    me, world = rank.rank, rank.world_size
    ids = torch.tensor([[0, 2, 1, 1, 0]])
    dy = draw(1, [(1, 5, 3)], torch.float64)[0]
    whole = whole_parts()
    x = whole["embed"](ids)
    x = x + whole["o"](attend(whole["q"](x), whole["k"](x), whole["v"](x), 2))
    x = x + whole["second"](whole["first"](x).sigmoid())
    expected = whole["head"](x)
    expected.backward(dy)
    with Communicator.from_file(rank.rendezvous, me, world) as group:
        for parallel in (False, True):
            whole2 = whole_parts()
            both = {"sequence_parallel": layers.SequenceSharding(1) if parallel else False}
            column = layers.ColumnParallelLinear.from_linear
            row = layers.RowParallelLinear.from_linear
            embed = layers.VocabParallelEmbedding.from_embedding(whole2["embed"], group, **both)
            qkv = layers.QKVParallelLinear.from_linears(
                whole2["q"], whole2["k"], whole2["v"], group, num_heads=2, names="qkv", **both
            )
            o = row(whole2["o"], group, partition=qkv.heads.query, **both)
            first = column(whole2["first"], group, **both)
            second = row(whole2["second"], group, **both)
            head = column(whole2["head"], group, gather_output=True, **both)
            if me == world - 1:
                assert qkv.num_heads == embed.weight.shape[0] == first.weight.shape[0] == 0
            x = embed(ids)
            x = x + o(attend(*qkv(x), 2))
            x = x + second(first(x).sigmoid())
            logits = head(x)
            logits.backward(dy)
            assert_close64(logits.detach(), expected.detach(), "logits")
            model = nn.ModuleDict({"embed": embed, "qkv": qkv, "o": o, "first": first})
            model.update({"second": second, "head": head})
            grads = gradients(model)
            assert set(grads) == {n for n, _ in whole.named_parameters()}
            for name, parameter in whole.named_parameters():
                assert_close64(grads[name], parameter.grad, name)
    return True


def test_fewer_than_ranks():
    run_ranks(fewer, 4)
