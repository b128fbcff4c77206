"""Two replicas of a pipeline of two ranks, one of which fails: who is told, when, and of what."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pyparallel.pipeline import PipelineError, PipelineExecutor
from pyparallel.schedule import with_steps
from tests.launch import run_ranks, spawn_ranks
from tests.pipeline.executor_models import (
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
from tests.pipeline.test_executor_wrapped import MICROBATCHES, groups, halves

FAILING = 1  # this rank has the last stage of the first replica, or one of its stages


class Faulty(nn.Sequential):
    def forward(self, value):
        raise OverflowError("a fault of this stage")


def fails_in_one_replica(rank, name):
    """As under torchrun, a process whose step failed ends, and does not leave its groups first."""
    start(rank, "pyparallel")
    pipe, replicas = groups(rank)
    plan = plan_of(name, 2, 3)
    parts = own(plan, rank.rank % 2, model(plan.stages))
    last = max(parts)
    if rank.rank == FAILING:
        parts[last] = Faulty(parts[last])
    parts = {s: DistributedDataParallel(m, process_group=replicas) for s, m in parts.items()}
    executor = PipelineExecutor(parts, loss_fn, group=pipe, dry_run=False)
    with pytest.raises(PipelineError) as raised:
        executor.step(plan, *given(plan, rank.rank % 2, *data(3)))
    rank.report(str(raised.value))
    if rank.rank < 2:
        os._exit(1)


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b"])
def test_a_fault_is_raised_in_its_replica_and_its_end_in_the_other(name):
    """The replica of the fault does not wait for the other, which waits in the reduction of the
    failed replica's stages, and raises when the failed processes have ended."""
    stage = {"1f1b": 1, "interleaved-1f1b": 3}[name]
    with spawn_ranks(fails_in_one_replica, 4, name, timeout=60) as ranks:
        for r in (0, 1):
            assert ranks.next_report(r) == f"{name}: rank 1: {stage}F0 of (float64[2, 6]): " + (
                "OverflowError: a fault of this stage"
            )
        ranks.wait([0, 1])
        left = time.monotonic()
        for r in (2, 3):
            text = ranks.next_report(r)
            assert text.startswith(f"{name}: rank "), text
            for index in (0, 1):
                assert f"rank {index}: the reduction of stage {index}: RuntimeError: " in text, text
                assert f"global ranks {index}, {index + 2}" in text, text
            assert "died" in text, text
        assert time.monotonic() - left < 10


class FaultyOnce(nn.Module):
    """Fails at one of its passes, counted over forwards and backwards."""

    def __init__(self, module, at):
        super().__init__()
        self.inner, self.left = module, at
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self._count()
        y = self.inner(x)
        if y.requires_grad:
            y.register_hook(lambda _: self._count())
        return y

    def _count(self):
        self.left -= 1
        if self.left == 0:
            raise OverflowError("a fault of this stage")


def repeated(rank, name, way, at):
    """A replica that has caught the error and repeats its step meets the others, who have waited:
    they have reduced nothing of the step that failed, in whichever pass it did."""
    start(rank, "pyparallel")
    pipe, replicas = groups(rank)
    plan = plan_of(name, 2, MICROBATCHES)
    plan = with_steps(plan) if way == "callback" else plan
    whole = model(plan.stages)
    inputs, targets, own_inputs, own_targets = halves(rank)
    _, gradients = reference(whole, inputs, targets)
    parts = own(plan, rank.rank % 2, whole)
    made = {}
    for stage, module in parts.items():
        faulty = rank.rank == FAILING and stage == max(parts)
        made[stage] = FaultyOnce(module, at if faulty else -1)
        if way == "ddp":
            made[stage] = DistributedDataParallel(made[stage], process_group=replicas)
        elif way == "fsdp":
            fully_shard(made[stage], mesh=DeviceMesh.from_group(replicas, "cpu"))

    def reduce(stage):
        for parameter in parts[stage].parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG, group=replicas)

    executor = PipelineExecutor(made, loss_fn, group=pipe, dry_run=False, reduce=reduce)
    arguments = (plan, *given(plan, rank.rank % 2, own_inputs, own_targets))
    if rank.rank < 2:
        with pytest.raises(PipelineError, match="rank 1: .*OverflowError: a fault of this stage"):
            executor.step(*arguments)
        for module in made.values():
            module.zero_grad()
    executor.step(*arguments)
    found = {n: p.grad for n, p in whole.named_parameters() if int(n.split(".")[0]) in parts}
    for n, gradient in found.items():
        gradient = gradient.full_tensor() if way == "fsdp" else gradient
        assert (gradient - gradients[n]).abs().max() < 1e-12, (name, way, n)


def test_a_step_that_failed_can_be_repeated_beside_replicas():
    last = 2 * MICROBATCHES
    jobs = [(repeated, "1f1b", "ddp", at) for at in (1, last)]
    jobs += [(repeated, "interleaved-1f1b", "ddp", at) for at in (1, 2, last)]
    jobs += [(repeated, "zb-v", "callback", last), (repeated, "zb-v", "fsdp", last)]
    run_ranks(several, 4, *jobs, timeout=60)


def refuses(rank, phase):
    """What fails behind the passes is told to the whole pipeline as well."""
    group = start(rank, "pyparallel")
    plan = with_steps(plan_of("1f1b", 2, 3))

    def fail(stage):
        if stage == 1:
            raise OverflowError(f"no {phase}")

    executor = PipelineExecutor(
        own(plan, rank.rank, model(2)), loss_fn, group=group, **{phase: fail}
    )
    what = {"reduce": "reduction", "optimizer_step": "optimizer step"}[phase]
    with pytest.raises(PipelineError, match=f"rank 1: the {what} of stage 1: .*no {phase}"):
        executor.step(plan, *given(plan, rank.rank, *data(3)))


def test_faults_of_reductions_and_steps_are_raised_on_all_ranks():
    run_ranks(several, 2, (refuses, "reduce"), (refuses, "optimizer_step"), timeout=60)
