"""Activations computed again: nothing changes but the memory.

Layers: one process (values, names, random numbers, the bytes that are kept); tensor parallel ranks
(test_step_on_ranks.py). Peak memory beside the planner's formula: test_step_memory.py.
"""

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from pyparallel.layers import SequenceSharding, parallelize
from pyparallel.training import (
    HostOffload,
    ParallelConfig,
    RandomStreams,
    apply_recompute,
    build_mesh,
    place_dropouts,
)
from pyparallel.training.recompute import layers_of
from tests.layers.plain_model import SEQUENCE, batch_of, plain

MODES = [
    ("full", {}, ["blocks.0", "blocks.1"]),
    ("full", {"every": 2}, ["blocks.0"]),
    ("selective", {}, ["blocks.0.attention", "blocks.1.attention"]),
    ("selective", {"modules": ["blocks.*.mlp"]}, ["blocks.0.mlp", "blocks.1.mlp"]),
    ("none", {}, []),
]


def passes(model, ids, streams=None, generator=None):
    """Logits and gradients of two microbatches, whose backwards come after both forwards."""
    model.zero_grad()
    outputs = []
    for number, half in enumerate(ids.chunk(2)):
        if streams is None:
            outputs.append(model(half))
        else:
            with streams.at(step=3, samples=[number], positions=range(ids.shape[1])):
                outputs.append(model(half))
    for y in outputs:
        y.square().mean().backward()
    return outputs, [p.grad for p in model.parameters()]


@pytest.mark.parametrize(("mode", "options", "names"), MODES)
def test_dropout_is_that_of_the_first_time(mode, options, names):
    """p = 0.5: torch's own dropout, which draws in turn, and placed dropout."""
    ids = batch_of(0)[0]
    model = plain(0, p=0.5)
    again = copy.deepcopy(model)
    torch.manual_seed(1)
    outputs, grads = passes(model, ids)
    state = torch.get_rng_state()
    assert apply_recompute(again, mode, **options) == names
    torch.manual_seed(1)
    found, found_grads = passes(again, ids)
    assert all(map(torch.equal, found, outputs))
    assert all(map(torch.equal, found_grads, grads)), "bit for bit"
    assert torch.equal(torch.get_rng_state(), state), "what comes after draws as without"

    streams = RandomStreams(2)
    place_dropouts(model, streams)
    outputs, grads = passes(model, ids, streams)
    twin = copy.deepcopy(model)
    apply_recompute(twin, mode, contexts=[streams.recompute], **options)
    found, found_grads = passes(twin, ids, streams)
    assert all(map(torch.equal, found, outputs))
    assert all(map(torch.equal, found_grads, grads))


def test_without_the_streams_it_would_be_seen():
    """Control: the place is gone in backward, and placed dropout says so."""
    model = plain(0, p=0.5)
    streams = RandomStreams(2)
    place_dropouts(model, streams)
    apply_recompute(model, "full")
    with pytest.raises(RuntimeError, match="nothing passes"):
        passes(model, batch_of(0)[0], streams)


def test_names_classes_and_state_stay():
    model = plain(0)
    before = [(n, type(m)) for n, m in model.named_modules()]
    state = list(model.state_dict())
    apply_recompute(model, "full")
    assert [n for n, _ in before] == [n for n, _ in model.named_modules()]
    assert all(isinstance(m, k) for (_, k), m in zip(before, model.modules(), strict=True))
    assert list(model.state_dict()) == state
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.head.weight.zero_()
        assert not twin(batch_of(0)[0]).any(), "a copy runs its own layers, also without gradients"
    assert layers_of(nn.Sequential(nn.Linear(1, 1), nn.ReLU())) == ["0", "1"]


def test_what_has_no_effect_is_told():
    model = plain(0)
    for options, text in (
        ({"mode": "half"}, "recompute is 'half'; expected one of none, full, selective"),
        ({"every": 0}, "every is 0; expected 1 or more"),
        ({"mode": "selective", "every": 2}, "every=2 has no effect with recompute 'selective'"),
        ({"mode": "full", "modules": ["x"]}, "modules has no effect with recompute 'full'"),
        ({"mode": "selective", "modules": ["x.*"]}, r"no module is called \['x.\*'\]"),
    ):
        with pytest.raises(ValueError, match=text):
            apply_recompute(model, **options)
    with pytest.raises(ValueError, match="Linear has no list of layers"):
        apply_recompute(nn.Linear(1, 1), "full")
    with pytest.raises(ValueError, match="Linear has no module whose class is called Attention"):
        apply_recompute(nn.Linear(1, 1), "selective")
    apply_recompute(model, "full")
    with pytest.raises(ValueError, match=r"blocks.0 and 1 more are recomputed already"):
        apply_recompute(model, "full")


class _Away(HostOffload):
    """Another host's memory: as on a device, each tensor that goes is a copy that comes back."""

    def __init__(self, least_bytes):
        super().__init__("cuda", least_bytes=least_bytes)
        self._kind = "cpu"


def test_offload_moves_activations_and_not_weights():
    """Its hooks, with the CPU in the device's part: same bits; bytes are those that were saved."""
    ids = batch_of(0)[0]
    model = plain(0)
    saved, weights = [], {p.data_ptr() for p in model.parameters()}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            saved.append(tensor.nbytes)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids).square().mean().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    for mode in ("none", "full"):
        model.zero_grad()
        away = _Away(least_bytes=1)
        apply_recompute(model, mode)
        with away:
            y = model(ids)
            loss = y.square().mean()
        loss.backward()
        assert all(map(torch.equal, [p.grad for p in model.parameters()], wanted))
        if mode == "none":
            assert away.moved == sum(saved)
        else:
            inputs = 2 * ids.numel() * model.embed.embedding_dim * 8
            assert inputs <= away.moved < sum(saved) / 2, "the layers' inputs went, and the ends'"
    with pytest.raises(ValueError, match="in host memory already"):
        HostOffload("cpu")


def tensor_parallel():
    """Collectives run again too; sequences of other lengths pass in between."""
    mesh = build_mesh(ParallelConfig(tp=2, dp=2))
    batches = [batch_of(0)[0], batch_of(1, length=6)[0]]
    grads = []
    for mode in ("none", "full", "selective"):
        model, streams = plain(0, p=0.5), RandomStreams(1, mesh)
        sequence = SequenceSharding(dim=1)
        parallelize(model, mesh.group("tp"), SEQUENCE, sequence)
        place_dropouts(model, streams)
        apply_recompute(model, mode, contexts=[streams.recompute, sequence.recompute])
        outputs = []
        for ids in batches:
            with streams.at(step=0, samples=[0, 1], positions=range(ids.shape[1])):
                outputs.append(model(ids))
        for y in outputs:
            y.square().mean().backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, grads[0], grads[1])), "bit for bit"
    assert all(map(torch.equal, grads[0], grads[2])), "bit for bit"
