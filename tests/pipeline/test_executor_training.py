"""Training with the executor, ranks in processes: what goes on around a step.

Layers: norms, tied parameters and profiles on two ranks; replicas and tensor parallel stages on
four; each against one process.
"""

import copy
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyparallel.layers import ColumnParallelLinear, RowParallelLinear
from pyparallel.pipeline import (
    PipelineExecutor,
    clip_gradient_norm_,
    gradient_norm,
    partition_model,
    profile,
    sum_tied_gradients,
)
from pyparallel.schedule import auto_schedule, with_steps
from tests.launch import run_ranks
from tests.pipeline.executor_models import (
    WIDTH,
    data,
    errors,
    given,
    loss_fn,
    model,
    own,
    plan_of,
    reference,
    several,
    stages,
    start,
)


def norms(rank):
    """The norm over all stages is that of one process, copies counted once."""
    group = start(rank, "pyparallel")
    for name in ("1f1b", "zb-v", "dualpipe"):
        plan = with_steps(plan_of(name, 2, 2))
        whole = model(plan.stages)
        inputs, targets = data(2)
        _, gradients = reference(whole, inputs, targets)
        wanted = sum(float(g.square().sum()) for g in gradients.values()) ** 0.5
        executor = PipelineExecutor(own(plan, rank.rank, whole), loss_fn, group=group)
        executor.step(plan, *given(plan, rank.rank, inputs, targets))
        assert abs(gradient_norm(executor) - wanted) < 1e-12
        assert clip_gradient_norm_(executor, wanted * 2) == gradient_norm(executor)
        clip_gradient_norm_(executor, wanted / 4)
        assert abs(gradient_norm(executor) - wanted / 4) < 1e-6
        with pytest.raises(ValueError, match="max_norm is 0"):
            clip_gradient_norm_(executor, 0)
    for parameter in executor.stages[0].parameters():
        parameter.grad.fill_(float("inf"))
    assert clip_gradient_norm_(executor, 1.0) == float("inf")
    assert all(p.grad.isnan().all() for p in executor.stages[0].parameters())


class Tied(nn.Sequential):
    """Embedding and output layer are one parameter, on the first and the last stage."""

    def __init__(self):
        torch.manual_seed(2)
        embedding, head = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 9, bias=False)
        head.weight = embedding.weight
        super().__init__(embedding, nn.Linear(WIDTH, WIDTH), head)
        self.double()


def tied(rank, name):
    """Three steps of training, clipped: as one process, and the copies equal to the bit."""
    group = start(rank, "pyparallel")
    plan = plan_of(name, 2, 3)
    single, whole = Tied(), Tied()
    torch.manual_seed(6)
    ids = list(torch.randint(9, (3, 5)))
    loss = nn.functional.cross_entropy
    partition = partition_model(whole, counts=[1, 2])
    stage = copy.deepcopy(partition.stage(rank.rank))
    executor = PipelineExecutor({rank.rank: stage}, loss, group=group)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (stage, single)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        executor.step(plan, ids, ids)
        sum_tied_gradients(
            stage, rank.rank, partition.tied, lambda t, _: dist.all_reduce(t, group=group)
        )
        ours = clip_gradient_norm_(executor, 0.1, partition.tied)
        (sum(loss(single(x), x) for x in ids) / 3).backward()
        theirs = nn.utils.clip_grad_norm_(single.parameters(), 0.1)
        assert abs(ours - theirs) < 1e-12
        for optimizer in optimizers:
            optimizer.step()
    names = dict(single.named_parameters(remove_duplicate=False))
    for n, p in stage.named_parameters():
        assert (p - names[n]).abs().max() < 1e-9, n  # AdamW divides by roots of small numbers
    weight = dict(stage.named_parameters())["0.weight" if rank.rank == 0 else "2.weight"].detach()
    return weight.clone()


def profiled(rank, name):
    """Its costs are those of the passes, and lead the simulator near the measured step. How near is
    a matter of the machine's other work."""
    group = start(rank, "pyparallel")
    plan, slow = plan_of(name, 2, 6), 0.01
    whole = model(2)
    inputs, targets = data(6)
    whole[0].register_forward_pre_hook(lambda *_: time.sleep(slow))
    executor = PipelineExecutor(own(plan, rank.rank, whole), loss_fn, group=group)
    result = profile(executor, plan, lambda: executor.step(plan, inputs, targets), steps=3)
    assert result.costs.forward[0] >= slow > result.costs.forward[1]
    assert result.step_time >= 6 * slow
    assert 6 * slow <= result.simulated <= 3 * result.step_time
    assert f"simulated / measured {result.ratio:.2f}" in str(result)
    auto_schedule(2, 6, result.costs)
    with pytest.raises(ValueError, match="steps is 0"):
        profile(executor, plan, lambda: None, steps=0)
    with pytest.raises(ValueError, match="pass it a group"):
        profile(PipelineExecutor(stages(whole, 2)), plan, lambda: None)
    return result.costs, result.step_time


def with_replicas(rank, name):
    """Two pipelines of two ranks: each chunk's gradients are reduced once, after its last
    microbatch, while messages of the other groups go on; means, not sums."""
    start(rank, "pyparallel")
    pipe = [dist.new_group([2 * d, 2 * d + 1]) for d in range(2)][rank.rank // 2]
    replicas = [dist.new_group([s, s + 2]) for s in range(2)][rank.rank % 2]
    plan = with_steps(plan_of(name, 2, 3))
    whole = model(plan.stages)
    inputs, targets = data(6)
    loss, gradients = reference(whole, inputs, targets)
    mine = slice(3 * (rank.rank // 2), 3 * (rank.rank // 2) + 3)
    parts = own(plan, rank.rank % 2, whole)
    reduced = []

    def reduce(stage):
        reduced.append(stage)
        for parameter in parts[stage].parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG, group=replicas)

    executor = PipelineExecutor(parts, loss_fn, group=pipe, reduce=reduce)
    result = executor.step(plan, inputs[mine], targets[mine])
    assert sorted(reduced) == sorted(parts)
    assert errors(plan, rank.rank % 2, whole, gradients) < 1e-12
    both = torch.tensor(result.loss, dtype=torch.float64)
    dist.all_reduce(both, op=dist.ReduceOp.AVG, group=replicas)
    assert abs(both - loss) < 1e-12


class Sharded(nn.Module):
    """Two products, the first split by columns, the second by rows."""

    def __init__(self, group, up, down):
        super().__init__()
        self.up = ColumnParallelLinear(WIDTH, 8, group=group, bias=False, dtype=torch.float64)
        self.down = RowParallelLinear(8, WIDTH, group=group, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.up.weight.copy_(up.weight.chunk(2, 0)[group.rank()])
            self.down.weight.copy_(down.weight.chunk(2, 1)[group.rank()])

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Unsharded(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 8, bias=False)
        self.down = nn.Linear(8, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def with_tensor_parallel_stages(rank, name):
    """Two stages, each sharded over two ranks: both halves of a backward communicate inside."""
    start(rank, "pyparallel")
    pipe = [dist.new_group([t, t + 2]) for t in range(2)][rank.rank % 2]
    shards = [dist.new_group([2 * s, 2 * s + 1]) for s in range(2)][rank.rank // 2]
    torch.manual_seed(4)
    whole = nn.Sequential(Unsharded(), Unsharded()).double()
    inputs, targets = data(4)
    loss, gradients = reference(whole, inputs, targets)
    stage = rank.rank // 2
    mine = Sharded(shards, whole[stage].up, whole[stage].down)
    executor = PipelineExecutor({stage: mine}, loss_fn, group=pipe)
    result = executor.step(plan_of(name, 2, 4), inputs, targets)
    assert abs(result.loss - loss) < 1e-12
    for part, dim in (("up", 0), ("down", 1)):
        wanted = gradients[f"{stage}.{part}.weight"].chunk(2, dim)[shards.rank()]
        assert (getattr(mine, part).weight.grad - wanted).abs().max() < 1e-12


def test_norms_tied_parameters_and_profiles():
    names = ("1f1b", "zb-h1")
    jobs = [(norms,), *((tied, name) for name in names), *((profiled, name) for name in names)]
    first, second = run_ranks(several, 2, *jobs, timeout=100)
    assert all(map(torch.equal, first[1:3], second[1:3]))
    assert first[3:] == second[3:]


def test_replicas_and_tensor_parallel_stages():
    run_ranks(
        several,
        4,
        *((with_replicas, name) for name in ("1f1b", "zb-v", "dualpipe")),
        *((with_tensor_parallel_stages, name) for name in ("1f1b", "zb-h1")),
        timeout=100,
    )
