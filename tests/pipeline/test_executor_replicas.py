"""Two replicas of a pipeline of two stages, one of which fails: who is told, when, and of what."""

import os
import time

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pyparallel.pipeline import PipelineError, PipelineExecutor
from tests.launch import spawn_ranks
from tests.pipeline.executor_models import data, given, loss_fn, model, own, plan_of, start
from tests.pipeline.test_executor_wrapped import groups

FAILING = 1  # the last stage of the first replica


class Faulty(nn.Sequential):
    def forward(self, value):
        raise OverflowError("a fault of this stage")


def fails_in_one_replica(rank):
    """As under torchrun, a process whose step failed ends, and does not leave its groups first."""
    start(rank, "pyparallel")
    pipe, replicas = groups(rank)
    plan = plan_of("1f1b", 2, 3)
    index = rank.rank % 2
    stage = (Faulty if rank.rank == FAILING else nn.Sequential)(own(plan, index, model(2))[index])
    stage = DistributedDataParallel(stage, process_group=replicas)
    executor = PipelineExecutor({index: stage}, loss_fn, group=pipe, dry_run=False)
    with pytest.raises(PipelineError) as raised:
        executor.step(plan, *given(plan, index, *data(3)))
    rank.report(str(raised.value))
    if rank.rank < 2:
        os._exit(1)


def test_a_fault_is_raised_in_its_replica_and_its_end_in_the_other():
    """The replica of the fault does not wait for the other, which waits in the reduction of the
    failed stage, and raises when the failed processes have ended."""
    with spawn_ranks(fails_in_one_replica, 4, timeout=60) as ranks:
        for r in (0, 1):
            assert ranks.next_report(r) == "1f1b: rank 1: 1F0 of (float64[2, 6]): " + (
                "OverflowError: a fault of this stage"
            )
        ranks.wait([0, 1])
        left = time.monotonic()
        for r in (2, 3):
            text = ranks.next_report(r)
            assert text.startswith("1f1b: rank 1: the reduction after 1B2: "), text
            assert "global ranks 1, 3" in text, text
            assert "died" in text, text
        assert time.monotonic() - left < 10
