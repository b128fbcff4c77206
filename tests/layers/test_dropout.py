"""Dropout and its random streams.

Layers of proof: 3 processes on a CPU. Masks are equal, or differ, where they must; streams go on
from a saved state; recomputed activations see the masks of the first pass. Runs in CI.
"""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.launch import run_ranks

P = 0.3


def masks(rank):
    from pyparallel.comm import Communicator
    from pyparallel.layers import Dropout, RandomStreams

    torch.manual_seed(rank.rank)  # torch's own stream has no part in it
    with Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size) as group:
        streams = RandomStreams(5, group)
        alike, apart = Dropout(P, streams, sharded=False), Dropout(P, streams, sharded=True)
        x = torch.ones(64, 64)
        first = [alike(x), apart(x), alike(x), apart(x)]
        state = streams.state_dict()
        then = [alike(x), apart(x)]
        streams.load_state_dict(state)
        again = [alike(x), apart(x)]
        assert all(map(torch.equal, then, again))

        with pytest.raises(ValueError, match=f"but this is rank {rank.rank} of 3"):
            streams.load_state_dict({**state, "rank": rank.rank + 1})

        # a mask is the same for any strides, and is what backward uses
        streams.load_state_dict(state)
        strided = torch.ones(64, 128)[:, ::2].requires_grad_()
        y = alike(strided)
        y.sum().backward()
        assert torch.equal(y, then[0])
        assert torch.equal(strided.grad, then[0])

        # recomputed in backward, twice, with other draws in between
        model = nn.Sequential(nn.Linear(8, 8), copy.deepcopy(alike), nn.Linear(8, 8), apart)
        z = torch.randn(5, 8)
        streams.load_state_dict(state)
        expected = model(z)
        expected.square().sum().backward()
        grads = [p.grad.clone() for p in model.parameters()]
        end = streams.state_dict()
        model.zero_grad()
        streams.load_state_dict(state)
        y = checkpoint(model, z, use_reentrant=False, context_fn=streams.recompute)
        y.square().sum().backward()
        assert torch.equal(y, expected)
        assert all(map(torch.equal, [p.grad for p in model.parameters()], grads))
        after = streams.state_dict()
        assert torch.equal(after["own"], end["own"])
        assert torch.equal(after["shared"], end["shared"])

        assert torch.equal(Dropout(1.0, streams, sharded=True)(x), torch.zeros(64, 64))
        assert Dropout(0.0, streams, sharded=True)(x) is x
        assert alike.eval()(x) is x
        for wrong in (-0.1, 1.5):
            with pytest.raises(ValueError, match="expected a probability"):
                Dropout(wrong, streams, sharded=True)
        with pytest.raises(ValueError, match="seed is 1.5"):
            RandomStreams(1.5, group)
        other = Dropout(P, RandomStreams(6, group), sharded=False)(x)
    return first, other


def test_masks_agree_where_tensors_do():
    ranks = run_ranks(masks, 3)
    (alike, _, alike2, _), other = ranks[0]
    drawn = [alike, alike2, other]
    for first, _ in ranks:
        assert torch.equal(first[0], alike)
        assert torch.equal(first[2], alike2)
        drawn += [first[1], first[3]]
    n = alike.numel()
    sigma = (P * (1 - P) / n) ** 0.5
    for i, x in enumerate(drawn):
        assert set(x.unique().tolist()) == {0.0, torch.tensor(1.0).div(1 - P).item()}
        assert abs((x == 0).double().mean() - P) < 5 * sigma
        for y in drawn[:i]:  # unrelated: both zero in p^2 of the places
            both = ((x == 0) & (y == 0)).double().mean()
            assert abs(both - P * P) < 5 * (P * P * (1 - P * P) / n) ** 0.5
