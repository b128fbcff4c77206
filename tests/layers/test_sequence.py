"""Recomputed activations of sequences whose lengths differ between microbatches.

Layers of proof: N processes on a CPU. With `context_fn=sequence.recompute` gradients are those
without recomputation, bit for bit; without it the layers raise on all ranks, and never use the
length of another microbatch.
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.launch import run_ranks
from tests.ops.seats import make_groups


def microbatches(rank):
    from pyparallel import layers

    torch.set_num_threads(1)
    (group,) = make_groups(rank, ("pyparallel",)).values()
    sequence = layers.SequenceSharding()
    torch.manual_seed(1)
    embedding = layers.VocabParallelEmbedding(7, 6, group, sequence_parallel=sequence)
    mlp = layers.GatedMLP(6, 8, group, sequence_parallel=sequence)
    world = rank.world_size
    batches = [torch.arange(n) % 7 for n in (2 * world + 1, 4 * world - 1)]

    def gradients(**options):
        for p in mlp.parameters():
            p.grad = None
        losses = []
        for ids in batches:
            x = embedding(ids)
            y = checkpoint(mlp, x, use_reentrant=False, **options) if options else mlp(x)
            losses.append(y.square().sum())
        for loss in losses:
            loss.backward()
        return [p.grad.clone() for p in mlp.parameters()]

    expected = gradients()
    for got, want in zip(gradients(context_fn=sequence.recompute), expected, strict=True):
        assert torch.equal(got, want)
    assert sequence.length == len(batches[-1])
    with pytest.raises(ValueError, match=r"shard_sizes|shards"):
        gradients(determinism_check="default")


@pytest.mark.parametrize("world", [2, 3])
def test_recomputation_of_other_lengths(world):
    run_ranks(microbatches, world)
