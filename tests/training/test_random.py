"""Streams that are alike or apart along axes; dropout that every layout drops alike.

Layers: one process, all coordinates of a layout played; tensor parallel ranks
(test_step_on_ranks.py).
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pyparallel.layers import SequenceSharding, parallelize
from pyparallel.training import (
    ParallelConfig,
    PlacedDropout,
    RandomStreams,
    build_mesh,
    place_dropouts,
)
from tests.layers.plain_model import PLAN, SEQUENCE, batch_of, plain

P = 0.3


def seat(config, rank):
    """What RandomStreams needs of a mesh."""
    return SimpleNamespace(coordinates=config.coordinates(rank), size=config.size)


def test_streams_are_alike_or_apart_along_axes():
    config = ParallelConfig(dp=2, tp=2, sp=2, pp=2)
    kinds = [(), ("dp",), ("dp", "sp"), ("tp", "sp", "pp", "dp")]
    drawn = {kind: {} for kind in kinds}
    for rank in range(config.world_size):
        streams = RandomStreams(5, seat(config, rank))
        for kind in kinds:
            numbers = torch.rand(8, generator=streams.stream(f"{kind}", apart=kind))
            at = tuple(getattr(config.coordinates(rank), axis) for axis in kind)
            drawn[kind].setdefault(at, numbers)
            assert torch.equal(drawn[kind][at], numbers), "alike over the other axes"
    every = [numbers for kind in kinds for numbers in drawn[kind].values()]
    assert len(every) == 1 + 2 + 4 + 16
    assert len({tuple(numbers.tolist()) for numbers in every}) == len(every), "apart along these"
    other = RandomStreams(6).stream("()")
    assert not torch.equal(torch.rand(8, generator=other), drawn[()][()])


def test_a_run_that_resumes_draws_what_the_straight_run_draws():
    """At any step, on every rank; a state of another rank is refused (not: continued wrongly)."""
    config = ParallelConfig(dp=2, tp=2)

    def steps(streams, first, last):
        found = []
        for step in range(first, last):
            found.append(torch.rand(3, generator=streams.stream("data", apart=("dp",))))
            found.append(torch.rand(3, generator=streams.stream("all")))
            with streams.at(step=step, samples=[0, 1], positions=range(3)):
                found.append(PlacedDropout(P, streams, "layer")(torch.ones(2, 3, 4)))
        return found

    states = {}
    for rank in range(4):
        straight = RandomStreams(3, seat(config, rank))
        steps(straight, 0, 4)
        states[rank] = copy.deepcopy(straight.state_dict())
        wanted = steps(straight, 4, 7)
        resumed = RandomStreams(99, seat(config, rank))
        resumed.load_state_dict(states[rank])
        assert all(map(torch.equal, steps(resumed, 4, 7), wanted))
    streams = RandomStreams(3, seat(config, 3))
    at = r"'data' is of the rank at \{'dp': 0\}, this one is at \{'dp': 1\}"
    with pytest.raises(ValueError, match=at):
        streams.load_state_dict(states[0])
    wide = RandomStreams(3, seat(ParallelConfig(dp=4), 3))
    with pytest.raises(ValueError, match=r"layout with \{'dp': 2\}, this one has \{'dp': 4\}"):
        wide.load_state_dict(states[0])
    wide.load_state_dict(states[0], other_layout=True)
    shared = RandomStreams(3, seat(config, 0))
    shared.load_state_dict(states[0])
    draws = [torch.rand(3, generator=s.stream("all")) for s in (wide, shared)]
    assert torch.equal(*draws), "what is alike everywhere goes on at another layout"


def test_misuse_is_told():
    streams = RandomStreams(1)
    streams.stream("a", apart=("dp",))
    with pytest.raises(
        ValueError, match=r"apart along \('dp',\), and was asked for apart along no"
    ):
        streams.stream("a")
    with pytest.raises(ValueError, match=r"apart has \['cp'\]; the axes are"):
        streams.stream("b", apart=("cp",))
    with pytest.raises(ValueError, match="stream 'a' exists"):
        streams.adopt("a", torch.Generator())
    with pytest.raises(ValueError, match="seed is True"):
        RandomStreams(True)
    with pytest.raises(ValueError, match="p is 1.5"):
        PlacedDropout(1.5, streams, "x")
    layer = PlacedDropout(P, streams, "x")
    with pytest.raises(RuntimeError, match="nothing passes: run the forward within"):
        layer(torch.ones(1, 1, 1))
    with streams.at(step=0, samples=[0, 1], positions=[0, 1, 2]):
        with pytest.raises(ValueError, match=r"expected is \[2, rows, features\]"):
            layer(torch.ones(3, 3, 4))
        with pytest.raises(ValueError, match="got 4 rows, and 3 positions pass"):
            layer(torch.ones(2, 4, 4))
        assert torch.equal(
            PlacedDropout(1.0, streams, "x")(torch.ones(2, 3, 4)), torch.zeros(2, 3, 4)
        )
        x = torch.ones(2, 3, 4)
        assert PlacedDropout(0.0, streams, "x")(x) is x
        assert layer.eval()(x) is x


def test_adopted_generators_are_saved_with_the_others():
    own = torch.Generator()
    streams = RandomStreams(4)
    streams.adopt("theirs", own)
    state = streams.state_dict()
    first = torch.rand(3, generator=own)
    streams.load_state_dict(state)
    assert torch.equal(torch.rand(3, generator=own), first)
    with streams.at(step=1, samples=[4], positions=[0]):
        keys = [streams.key("attention"), streams.key("attention"), streams.key("other")]
    with RandomStreams(4).at(step=1, samples=[4], positions=[0, 5]):
        pass
    assert len(set(keys)) == 3
    assert all(0 <= key < 2**63 for key in keys)


def test_a_mask_is_a_function_of_the_place():
    """What one process drops of a batch is what its parts drop, cut any way; other steps, layers,
    uses and seeds are unrelated; the rate is p."""
    streams = RandomStreams(7)
    layer = PlacedDropout(P, streams, "layers.3.dropout")
    x = torch.ones(6, 40, 32)

    def drawn(samples, positions, *, step=2, layer=layer, uses=1):
        with layer.streams.at(step=step, samples=samples, positions=positions):
            return [layer(torch.ones(len(samples), len(positions), 32)) for _ in range(uses)][-1]

    whole = drawn(range(6), range(40))
    assert set(whole.unique().tolist()) == {0.0, torch.tensor(1.0).div(1 - P).item()}
    rows = [0, 1, 2, 37, 38, 39]  # zigzag
    assert torch.equal(drawn([4, 2], rows), whole[[4, 2]][:, rows])
    others = [
        drawn(range(6), range(40), step=3),
        drawn(range(6), range(40), uses=2),
        drawn(range(6), range(40), layer=PlacedDropout(P, streams, "layers.2.dropout")),
        drawn(range(6), range(40), layer=PlacedDropout(P, RandomStreams(8), "layers.3.dropout")),
        whole.flip(0),
        whole.flip(1),
        whole.flip(2),
    ]
    n = x.numel()
    sigma = (P * (1 - P) / n) ** 0.5
    assert abs((whole == 0).double().mean() - P) < 5 * sigma
    for other in others:  # both zero in p^2 of the places
        both = ((whole == 0) & (other == 0)).double().mean()
        # A flip meets each pair of places twice.
        assert abs(both - P * P) < 5 * (2 * P * P * (1 - P * P) / n) ** 0.5


def masked(model, streams, ids):
    with streams.at(step=1, samples=range(10, 10 + len(ids)), positions=range(ids.shape[1])):
        return model(ids)


def one_process(batch):
    model = plain(1, p=P)
    streams = RandomStreams(5)
    assert place_dropouts(model, streams) == [f"blocks.{b}.mlp.{d}" for b in (0, 1) for d in (2, 4)]
    y = masked(model, streams, batch[0])
    nn.functional.cross_entropy(y.flatten(0, 1), batch[1].flatten()).backward()
    return y.detach(), {n: p.grad for n, p in model.named_parameters()}


def tensor_parallel():
    """Dropout on features of which each rank has some, and on parts of the sequence, uneven."""
    mesh = build_mesh(ParallelConfig(tp=4))
    batch = batch_of(2)
    wanted, gradients = one_process(batch)
    for sequence in (False, SequenceSharding(dim=1)):
        model = plain(1, p=P)
        parallelize(model, mesh.group("tp"), SEQUENCE if sequence else PLAN, sequence)
        streams = RandomStreams(5, mesh)
        assert len(place_dropouts(model, streams)) == 4
        y = masked(model, streams, batch[0])
        torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)
        nn.functional.cross_entropy(y.flatten(0, 1), batch[1].flatten()).backward()
        for name in ("blocks.0.norm1.weight", "blocks.1.norm2.weight", "norm.bias"):
            grad = model.get_parameter(name).grad
            torch.testing.assert_close(grad, gradients[name], rtol=1e-11, atol=1e-12)
