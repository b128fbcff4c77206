"""Pipelines whose stages are replicated or sharded, on four ranks: torch's wrappers for data
parallelism, tensor and sequence parallel stages, tied parameters under a sharded optimizer.

Layers: each against one process in float64; reductions counted; wrong options refused.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from pyparallel.layers import parallelize
from pyparallel.pipeline import (
    PipelineExecutor,
    partition_model,
    sum_tied_gradients,
)
from pyparallel.schedule import with_steps
from tests.launch import run_ranks
from tests.pipeline.executor_models import (
    WIDTH,
    Tied,
    data,
    given,
    loss_fn,
    model,
    own,
    plan_of,
    reference,
    several,
    start,
)

MICROBATCHES = 3


def groups(rank):
    """(pipeline group, group of the stage): ranks 0 1 and 2 3 are pipelines, stages go across."""
    pipe = [dist.new_group([2 * d, 2 * d + 1]) for d in range(2)][rank.rank // 2]
    across = [dist.new_group([s, s + 2]) for s in range(2)][rank.rank % 2]
    return pipe, across


def halves(rank):
    """Loss and gradients over both replicas' data, and this one's part of it."""
    inputs, targets = data(2 * MICROBATCHES)
    mine = slice(MICROBATCHES * (rank.rank // 2), MICROBATCHES * (rank.rank // 2 + 1))
    return inputs, targets, inputs[mine], targets[mine]


def data_parallel(rank, name, steps):
    """Gradients are reduced once per stage and step, whatever the number of microbatches; they are
    those of one process, at the second step too, in which nobody has zeroed them."""
    start(rank, "pyparallel")
    pipe, replicas = groups(rank)
    plan = plan_of(name, 2, MICROBATCHES)
    plan = with_steps(plan) if steps else plan
    whole = model(plan.stages)
    inputs, targets, own_inputs, own_targets = halves(rank)
    _, gradients = reference(whole, inputs, targets)
    reduced = []

    def counting(stage, bucket):
        reduced.append(stage)
        whole_bucket = bucket.buffer().div_(2)
        work = dist.all_reduce(whole_bucket, group=replicas, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    parts = {}
    for stage, module in own(plan, rank.rank % 2, whole).items():
        parts[stage] = DistributedDataParallel(module, process_group=replicas)
        parts[stage].register_comm_hook(stage, counting)
    executor = PipelineExecutor(parts, loss_fn, group=pipe)
    for step in (1, 2):
        if step == 2:  # averages of averages: what has been reduced stays as it is
            reduced.clear()
        executor.step(plan, *given(plan, rank.rank % 2, own_inputs, own_targets))
        assert sorted(reduced) == sorted(parts)
        for stage in parts:
            for n, p in whole[stage].named_parameters():
                error = (p.grad - step * gradients[f"{stage}.{n}"]).abs().max()
                assert error < 1e-12, (name, stage, n)
    executor.evaluate(plan, *given(plan, rank.rank % 2, own_inputs, own_targets))
    assert sorted(reduced) == sorted(parts), "evaluation reduces nothing"


def fully_sharded(rank, name, steps):
    """Each replica has half of every parameter, and of its gradient."""
    start(rank, "pyparallel")
    pipe, replicas = groups(rank)
    plan = plan_of(name, 2, MICROBATCHES)
    plan = with_steps(plan) if steps else plan
    whole, single = model(plan.stages), model(plan.stages)
    inputs, targets, own_inputs, own_targets = halves(rank)
    mesh = DeviceMesh.from_group(replicas, "cpu")
    parts = own(plan, rank.rank % 2, whole)
    for module in parts.values():
        fully_shard(module[0], mesh=mesh)  # a layer of its own, inside a stage that is one too
        fully_shard(module, mesh=mesh)
    executor = PipelineExecutor(parts, loss_fn, group=pipe)
    optimizers = [
        torch.optim.AdamW([p for m in modules for p in m.parameters()], lr=0.01)
        for modules in (parts.values(), [single])
    ]
    names = dict(single.named_parameters())
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(
            loss_fn(single(x), t) / len(inputs) for x, t in zip(inputs, targets, strict=True)
        ).backward()
        executor.step(plan, *given(plan, rank.rank % 2, own_inputs, own_targets))
        for stage, module in parts.items():
            for n, p in module.named_parameters():
                wanted = names[n]
                assert (p.grad.full_tensor() - wanted.grad).abs().max() < 1e-12, (name, stage, n)
        for optimizer in optimizers:
            optimizer.step()
        for stage, module in parts.items():
            for n, p in module.named_parameters():  # AdamW divides by roots of small numbers
                error = (p.full_tensor() - names[n]).abs().max()
                assert error < 1e-9, (name, stage, n)


def refused(rank):
    start(rank, "pyparallel")
    replicas = groups(rank)[1]
    whole = model(1)
    for option in ("find_unused_parameters", "static_graph"):
        wrapped = DistributedDataParallel(whole, process_group=replicas, **{option: True})
        with pytest.raises(ValueError, match=f"{option}=True has no effect in a pipeline"):
            PipelineExecutor({0: wrapped}, loss_fn)


def tied_and_sharded(rank, name):
    """training.md 6: two replicas of two stages that share a weight; each replica's optimizer has
    half of the states. After three steps all four copies have the same bytes."""
    start(rank, "pyparallel")
    pipe, replicas = groups(rank)
    plan = with_steps(plan_of(name, 2, MICROBATCHES))
    torch.manual_seed(6)
    ids = list(torch.randint(9, (2 * MICROBATCHES, 5)))
    mine = ids[MICROBATCHES * (rank.rank // 2) :][:MICROBATCHES]
    single, whole = Tied(), Tied()
    partition = partition_model(whole, counts=[1, 2])
    index = rank.rank % 2
    stage = copy.deepcopy(partition.stage(index))
    loss = nn.functional.cross_entropy
    wrapped = DistributedDataParallel(stage, process_group=replicas)
    executor = PipelineExecutor({index: wrapped}, loss, group=pipe)
    sharded = ZeroRedundancyOptimizer(
        stage.parameters(), torch.optim.AdamW, process_group=replicas, lr=0.1
    )
    plain = torch.optim.AdamW(single.parameters(), lr=0.1)
    for _ in range(3):
        sharded.zero_grad()
        plain.zero_grad()
        executor.step(plan, mine, mine)
        sum_tied_gradients(
            stage, index, partition.tied, lambda t, _: dist.all_reduce(t, group=pipe)
        )
        sharded.step()
        (sum(loss(single(x), x) for x in ids) / len(ids)).backward()
        plain.step()
    names = dict(single.named_parameters(remove_duplicate=False))
    for n, p in stage.named_parameters():
        assert (p - names[n]).abs().max() < 1e-9, n
    return dict(stage.named_parameters())["0.weight" if index == 0 else "2.weight"].detach().clone()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


STYLES = {"*.norm": "sequence", "*.up": "colwise", "*.down": "rowwise"}


def in_sequence(rank, name, split):
    """Tensor parallel stages, with activations split along the sequence between them: messages are
    as large as the part. The norms' gradients are of the whole sequence."""
    start(rank, "pyparallel")
    pipe, shards = groups(rank)
    pipe, shards = (
        [dist.new_group([t, t + 2]) for t in range(2)][rank.rank % 2],
        [dist.new_group([2 * s, 2 * s + 1]) for s in range(2)][rank.rank // 2],
    )
    torch.manual_seed(4)
    plan = plan_of(name, 2, 4)
    single = nn.Sequential(*(Block() for _ in range(plan.stages))).double()
    whole = copy.deepcopy(single)
    inputs = [torch.randn(6, WIDTH, dtype=torch.float64) for _ in range(4)]
    targets = [torch.randn(6, WIDTH, dtype=torch.float64) for _ in range(4)]

    def loss(y, t):
        return ((y - t) ** 2).sum()

    _, gradients = reference(single, inputs, targets, loss)
    styles = STYLES if split else {k: s for k, s in STYLES.items() if s != "sequence"}
    parallelize(whole, shards, styles, sequence_parallel=split)
    stages = partition_model(whole, counts=[1] * plan.stages)
    held = {s: stages.stage(s) for s in plan.held[pipe.rank()]}
    part = slice(3 * shards.rank(), 3 * shards.rank() + 3) if split else slice(None)
    executor = PipelineExecutor(held, loss, group=pipe)
    executor.step(plan, [x[part] for x in inputs], [t[part] for t in targets])
    for stage in held:
        for layer, names in (
            ("norm", "weight bias"),
            ("up", "weight bias"),
            ("down", "weight bias"),
        ):
            for n in names.split():
                wanted = gradients[f"{stage}.{layer}.{n}"]
                if layer == "up":
                    wanted = wanted.chunk(2, 0)[shards.rank()]
                if (layer, n) == ("down", "weight"):
                    wanted = wanted.chunk(2, 1)[shards.rank()]
                found = getattr(getattr(whole[stage], layer), n).grad
                assert (found - wanted).abs().max() < 1e-12, (name, stage, layer, n)


def test_stages_wrapped_for_data_parallelism():
    """Whole backwards and halves, one stage a rank and two, with REDUCE in the plan and without."""
    jobs = [(data_parallel, "1f1b", False), (data_parallel, "zb-v", True)]
    jobs += [(fully_sharded, "zb-h1", True), (fully_sharded, "interleaved-1f1b", False)]
    run_ranks(several, 4, *jobs, (refused,), timeout=100)


def test_sharded_stages_and_tied_parameters():
    jobs = [(in_sequence, name, split) for name in ("1f1b", "zb-v") for split in (True, False)]
    names = ("1f1b", "zb-h1")
    results = run_ranks(
        several, 4, *jobs, *((tied_and_sharded, name) for name in names), timeout=100
    )
    for number in range(len(names)):
        copies = [rank[len(jobs) + number] for rank in results]
        assert all(torch.equal(copies[0], other) for other in copies[1:])
