"""Norms of split sequences, and embeddings, each by itself.

Layers of proof: N processes on a CPU, world sizes 1 to 4, fp32 and bf16, two passes accumulated.
Exact: outputs and input gradients of norms (the same arithmetic on own rows), an embedding's output
and gradient. Close: a norm's weight gradient, a sum over all rows,
|ours - ref| <= |stock - ref| + sqrt(rows) eps32 sum |terms|. The control: a gradient that is not
reduced, or reduced once more, exceeds it. All of it runs in CI.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.launch import run_ranks
from tests.ops.reference import EPS32, assert_within, draw, sum_of

WORLDS = [1, 2, 3, 4]
ROWS, SIZE, VOCAB = 10, 24, 53
DTYPES = [torch.float32, torch.bfloat16]
PASSES = 2


def own(x, rank, world):
    from pyparallel.layers.partition import even_sizes

    return x.split(even_sizes(x.shape[0], world))[rank]


def whole_norms(dtype):
    """Norms with weights of their own, and inputs and gradients of each pass."""
    w, b, *data = draw(2, [(SIZE,), (SIZE,), *[(ROWS, 2, SIZE)] * (2 * PASSES)], dtype)
    norms = nn.RMSNorm(SIZE, eps=1e-6, dtype=dtype), nn.LayerNorm(SIZE, dtype=dtype)
    with torch.no_grad():
        norms[0].weight.copy_(w)
        norms[1].weight.copy_(w)
        norms[1].bias.copy_(b)
    return norms, list(zip(data[:PASSES], data[PASSES:], strict=True))


def run_norms(rank):
    from pyparallel import layers
    from pyparallel.comm import Communicator

    me, world = rank.rank, rank.world_size
    found = {}
    with Communicator.from_file(rank.rendezvous, me, world) as group:
        for dtype in DTYPES:
            norms, passes = whole_norms(dtype)
            for cls, norm in zip((layers.RMSNorm, layers.LayerNorm), norms, strict=True):
                layer = cls.from_norm(norm, group, sequence_parallel=True)
                unaware = cls.from_norm(norm, group)  # what is summed: each rank's own
                outputs, parts = [], []
                for x, dy in passes:
                    x = own(x, me, world).clone().requires_grad_()
                    y = layer(x)
                    y.backward(own(dy, me, world))
                    outputs += [y.detach(), x.grad]
                    unaware.zero_grad()
                    again = x.detach().requires_grad_()  # as above: torch has other kernels else
                    unaware(again).backward(own(dy, me, world))
                    parts.append([p.grad for p in unaware.parameters()])
                found[dtype, cls.__name__] = outputs, [p.grad for p in layer.parameters()], parts
    return found


def bounds_of(name, eps, passes, parts):
    """Reference and bound of the gradients of weight and bias; parts[rank][pass][parameter]."""
    norm = functional.layer_norm if name == "LayerNorm" else functional.rms_norm
    wide = [(x.double(), dy.double()) for x, dy in passes]
    terms = [torch.stack([dy * norm(x, (SIZE,), eps=eps) for x, dy in wide])]
    terms += [torch.stack([dy for _, dy in wide])] if name == "LayerNorm" else []
    found = []
    for i, term in enumerate(terms):
        stock = sum(sum_of([of_rank[n][i] for of_rank in parts]) for n in range(PASSES))
        ref, size = term.sum((0, 1, 2)), term.abs().sum((0, 1, 2))
        found.append(
            (ref, (stock.double() - ref).abs() + (2 * ROWS * PASSES) ** 0.5 * EPS32 * size)
        )
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_norms_under_sequence_parallelism(world):
    ranks = run_ranks(run_norms, world)
    for dtype in DTYPES:
        norms, passes = whole_norms(dtype)
        for name, norm in zip(("RMSNorm", "LayerNorm"), norms, strict=True):
            expected = []
            for x, dy in passes:
                x = x.clone().requires_grad_()
                y = norm(x)
                y.backward(dy)
                expected += [y.detach(), x.grad]
            parts = [found[dtype, name][2] for found in ranks]
            bounds = bounds_of(name, norm.eps, passes, parts)
            for rank, found in enumerate(ranks):
                outputs, grads, alone = found[dtype, name]
                for ours, whole in zip(outputs, expected, strict=True):
                    assert torch.equal(ours, own(whole, rank, world)), (dtype, name)
                for i, (grad, (ref, limit)) in enumerate(zip(grads, bounds, strict=True)):
                    assert_within(grad, ref, limit, f"{name}, {dtype}, rank {rank}")
                    assert torch.equal(grad, ranks[0][dtype, name][1][i])
                    if world > 1:
                        for wrong in (alone[0][i] + alone[1][i], grad * world):
                            assert ((wrong.double() - ref).abs() > limit).double().mean() > 0.8


def run_embeddings(rank):
    from pyparallel import layers
    from pyparallel.comm import Communicator

    me, world = rank.rank, rank.world_size
    ids = torch.randint(VOCAB, (ROWS, 2), generator=torch.Generator().manual_seed(1))
    found = []
    with Communicator.from_file(rank.rendezvous, me, world) as group:
        for dtype in DTYPES:
            table, dy = draw(3, [(VOCAB, 6), (ROWS, 2, 6)], dtype)
            whole = nn.Embedding(VOCAB, 6, padding_idx=int(ids[0, 0]), _weight=table)
            y = whole(ids)
            y.backward(dy)
            for parallel in (False, True):
                layer = layers.VocabParallelEmbedding.from_embedding(
                    whole, group, sequence_parallel=parallel, multiple_of=4
                )
                ours = layer(ids.int())
                ours.backward(own(dy, me, world) if parallel else dy)
                assert torch.equal(ours, own(y, me, world) if parallel else y)
                rows = layer.partition.contiguous(me)
                assert torch.equal(
                    layer.weight.grad[: len(rows)], whole.weight.grad[rows.start : rows.stop]
                )
                assert not layer.weight.grad[len(rows) :].any()
                found.append(ours.shape)
            assert layer.padding_idx == int(ids[0, 0])
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_embeddings_are_exact(world):
    run_ranks(run_embeddings, world)
