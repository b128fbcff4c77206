"""The norm of a composed model's gradient against torch's on the whole model in one process.

Layers: one process; four ranks (test_step_on_ranks.py), at layouts of every axis, fully sharded,
tied, with kv heads that are copied. A control: replicated weights counted on every rank are seen.
"""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from pyparallel.layers import SequenceSharding, parallelize
from pyparallel.pipeline import TiedParameter, partition_model
from pyparallel.training import ParallelConfig, build_mesh, clip_grad_norm_, global_grad_norm
from pyparallel.training.clipping import tied_copies
from tests.layers.plain_model import PLAN, SEQUENCE, Block, batch_of, plain

NORMS = (2.0, 1.0, 3.0, float("inf"))
# Sums of the same numbers in another order, in float64: hundreds of numbers, a few ulps.
CLOSE = {"rtol": 1e-13, "atol": 0.0}


def loss_of(model, batch):
    ids, target = batch
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), target.flatten())


def whole_of(batches, tied=True):
    """The model in one process, with the mean gradient of all batches."""
    model = plain(1, tied=tied)
    sum(loss_of(model, batch) for batch in batches).div(len(batches)).backward()
    return model


def torch_norms(model):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [float(torch.nn.utils.get_total_norm(grads, norm_type=n)) for n in NORMS]


def check(parts, mesh, whole, copies=()):
    """All norms, then clipping: gradients are those that torch's makes of the whole model."""
    expected = torch_norms(whole)
    for norm_type, wanted in zip(NORMS, expected, strict=True):
        found = global_grad_norm(parts, mesh, norm_type=norm_type, copies=copies)
        torch.testing.assert_close(float(found), wanted, **CLOSE)
    found = clip_grad_norm_(parts, 0.25 * expected[0], mesh, copies=copies)
    torch.testing.assert_close(float(found), expected[0], **CLOSE)
    after = float(global_grad_norm(parts, mesh, copies=copies))
    torch.testing.assert_close(after, 0.25 * expected[0], rtol=1e-5, atol=0.0)  # torch's 1e-6
    below = float(clip_grad_norm_(parts, 10.0, mesh, copies=copies))
    assert float(global_grad_norm(parts, mesh, copies=copies)) == below == after
    return found


def sharded(mesh, sequence):
    """Heads and features over tp; one kv head, which both ranks have; a tied vocabulary of 41."""
    model = plain(1, tied=True)
    parallelize(model, mesh.group("tp"), SEQUENCE if sequence else PLAN, sequence)
    return model


def tensor_parallel(mesh):
    """t=1 equals t=4, with norms' weights, which every rank has (and with parts of the sequence
    each rank uses on its part only)."""
    found = []
    for sequence in (False, SequenceSharding(dim=1)):
        model = sharded(mesh, sequence)
        loss_of(model, batch_of(0)).backward()
        found.append(check(model, mesh, whole_of([batch_of(0)])))
    replicated = [p for n, p in model.named_parameters() if "norm" in n]
    once = torch.nn.utils.get_total_norm([p.grad for p in replicated])
    total = global_grad_norm(model, mesh)
    assert (total.square() + 3 * once.square()).sqrt() > 1.001 * total, "four times would be seen"
    return found


def fully_sharded(mesh):
    """Shards over dp of shards over tp; dim 0 of both is cut, and rows do not divide."""
    model = sharded(mesh, False)
    data = mesh.data_mesh()
    for block in model.blocks:
        fully_shard(block, mesh=data)
    fully_shard(model, mesh=data)
    batches = [batch_of(n) for n in range(mesh.size("dp"))]
    loss_of(model, batches[mesh.coordinates.dp]).backward()
    return check(model, mesh, whole_of(batches))


def replicated(mesh):
    """dp and sp hold the same gradients: those of one process that has all batches."""
    model = whole_of([batch_of(0), batch_of(1)])
    return check(_twin(model), mesh, model)


class Listed(nn.Sequential):
    """The plain model's parts in a row; head and embedding are tied."""

    def __init__(self):
        torch.manual_seed(3)
        embed, head = nn.Embedding(41, 12), nn.Linear(12, 41, bias=False)
        head.weight = embed.weight
        super().__init__(embed, Block(0.0), Block(0.0), nn.Sequential(nn.LayerNorm(12), head))
        self.double()


def pipelined(mesh):
    """p=1 equals p=4; what the first and the last stage hold counts once."""
    whole = Listed()
    loss_of(whole, batch_of(0)).backward()
    partition = partition_model(copy.deepcopy(whole), counts=[1] * 4)
    index = mesh.coordinates.pp
    stage = partition.stage(index)
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        if name in (own := dict(stage.named_parameters(remove_duplicate=False))):
            own[name].grad = parameter.grad.clone()
    copies = tied_copies(stage, index, partition.tied)
    assert len(copies) == (index == 3)
    found = check(stage, mesh, whole, copies)
    for parameter in stage.parameters():
        parameter.grad = torch.full_like(parameter, float("nan") if index == 2 else 1.0)
    assert clip_grad_norm_(stage, 1.0, mesh, copies=copies).isnan()
    assert all(p.grad.isnan().all() for p in stage.parameters())
    return found


def both(mesh):
    """tp inside of pp: stages of shards."""
    model = Listed()
    plan = {
        "0": "vocab",
        "*.attention.[qkv]_proj": "colwise",
        "**.o_proj": "rowwise",
        "*.mlp.0": "colwise",
        "*.mlp.3": "rowwise",
        "3.1": "colwise_gather_output",
    }
    whole = copy.deepcopy(model)
    loss_of(whole, batch_of(0)).backward()
    parallelize(model, mesh.group("tp"), plan)
    loss_of(model, batch_of(0)).backward()
    partition = partition_model(model, counts=[2, 2])
    index = mesh.coordinates.pp
    stage = partition.stage(index)
    return check(stage, mesh, whole, tied_copies(stage, index, partition.tied))


def on_four():
    layouts = [
        (tensor_parallel, ParallelConfig(tp=4)),
        (fully_sharded, ParallelConfig(dp=4, zero=3)),
        (fully_sharded, ParallelConfig(dp=2, tp=2, zero=3)),
        (fully_sharded, ParallelConfig(dp=4, zero=3, replicas=2)),
        (replicated, ParallelConfig(dp=2, sp=2)),
        (pipelined, ParallelConfig(pp=4)),
        (both, ParallelConfig(tp=2, pp=2)),
    ]
    return [job(build_mesh(config)) for job, config in layouts]


def test_in_one_process_as_torch_does():
    model = whole_of([batch_of(0)])
    check(model, None, _twin(model))
    model.zero_grad()
    assert float(global_grad_norm(model)) == 0.0
    for wrong in (0.0, -1.0):
        with pytest.raises(ValueError, match=f"max_norm is {wrong}"):
            clip_grad_norm_(model, wrong)
        with pytest.raises(ValueError, match=f"norm_type is {wrong}"):
            global_grad_norm(model, norm_type=wrong)
    with pytest.raises(ValueError, match="stage 1 has no parameter absent"):
        tied_copies(model, 1, [TiedParameter(("embed.weight", "absent"), (0, 1))])


def _twin(model):
    twin = copy.deepcopy(model)
    for own, other in zip(twin.parameters(), model.parameters(), strict=True):
        own.grad = other.grad.clone()
    return twin
