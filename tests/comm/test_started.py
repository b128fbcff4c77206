"""Started calls (async_op=True): their order, their tensors' lives, waiting, errors."""

import gc
import time

import pytest
import torch

from pyparallel.comm import Communicator, InvalidArgument, Mismatch, Timeout, Work
from tests.comm.reference import LAYOUTS, assert_same_bits, data, exact
from tests.comm.threads import run_threads


def test_a_chain_on_one_tensor_happens_in_order():
    """x <- sum of x, twenty times, then other calls that read it: each sees what the last wrote."""

    def body(comm: Communicator) -> None:
        for layout in LAYOUTS.values():
            x = layout(torch.ones(6, 5, dtype=torch.float64))
            works = [comm.all_reduce(x, async_op=True) for _ in range(20)]
            gathered = comm.all_gather(x, async_op=True)
            scattered = comm.reduce_scatter(x, dim=1, sizes=[2, 3], async_op=True)
            assert gathered.wait()[0, 0].item() == 2.0**20
            assert scattered.wait()[0, 0].item() == 2.0**21
            assert all(work.done() for work in works)
            assert works[7].wait() is x

    run_threads(2, body)


def test_every_collective_can_be_started():
    def body(comm: Communicator) -> None:
        me, world = comm.rank, comm.world_size
        inputs = [data((6, 4), torch.bfloat16, r) for r in range(world)]
        total = exact(inputs, "sum")
        mine = inputs[me]
        works: dict[str, Work] = {
            "all_reduce": comm.all_reduce(mine.clone(), async_op=True),
            "reduce": comm.reduce(mine.clone(), root=1, async_op=True),
            "broadcast": comm.broadcast(mine.clone(), 2, async_op=True),
            "all_gather": comm.all_gather(mine, dim=1, async_op=True),
            "gather": comm.gather(mine, root=2, async_op=True),
            "reduce_scatter": comm.reduce_scatter(mine, async_op=True),
            "all_to_all": comm.all_to_all(mine, async_op=True),
            "scatter": comm.scatter(
                mine if me == 0 else None, torch.empty(2, 4).bfloat16(), async_op=True
            ),
            "barrier": comm.barrier(async_op=True),
        }
        got = {name: work.wait(20) for name, work in works.items()}
        assert_same_bits(got["all_reduce"], total, "all_reduce")
        assert_same_bits(got["reduce"], total if me == 1 else mine, "reduce")
        assert_same_bits(got["broadcast"], inputs[2], "broadcast")
        assert_same_bits(got["all_gather"], torch.cat(inputs, 1), "all_gather")
        assert got["gather"].shape == ((18, 4) if me == 2 else (0, 4))
        assert_same_bits(got["reduce_scatter"], total.split(2)[me], "reduce_scatter")
        expected = torch.cat([x.split(2)[me] for x in inputs])
        assert_same_bits(got["all_to_all"], expected, "all_to_all")
        assert_same_bits(got["scatter"], inputs[0].split(2)[me], "scatter")
        assert got["barrier"] is None

    run_threads(3, body)


def test_a_call_waits_for_started_ones():
    """A call that is not started runs after all that was: the same order on every rank."""

    def body(comm: Communicator) -> None:
        x = torch.ones(1000)
        for _ in range(30):
            comm.all_reduce(x, "avg", async_op=True)
            comm.all_reduce(x, "max")
        assert x.tolist() == [1.0] * 1000

    run_threads(3, body)


def test_tensors_live_until_the_call_is_over():
    """Nobody keeps the work or the tensors; memory that is freed too early would be reused."""

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            time.sleep(0.2)  # the other ranks' calls are still waiting when their tensors go
        for _ in range(20):
            comm.all_reduce(torch.ones(50_000), async_op=True)
            comm.all_gather(torch.ones(20_000), async_op=True)
        gc.collect()
        junk = [torch.full((50_000,), 9.0) for _ in range(20)]
        assert comm.all_reduce(torch.ones(5)).tolist() == [2.0] * 5
        assert all(bool((x == 9.0).all()) for x in junk)  # no late write into reused memory

    run_threads(2, body)


def test_wait_ends_at_its_own_timeout_and_can_be_called_again():
    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            time.sleep(0.5)
            comm.all_reduce(torch.ones(3))
            return
        work = comm.all_reduce(torch.ones(3), async_op=True)
        assert not work.done()
        start = time.monotonic()
        with pytest.raises(Timeout):
            work.wait(0.05)
        assert time.monotonic() - start < 0.4
        assert work.wait().tolist() == [2.0] * 3
        assert work.wait().tolist() == [2.0] * 3
        assert work.exception() is None

    run_threads(2, body)


def test_the_calls_own_error_comes_from_wait_each_time():
    def body(comm: Communicator) -> None:
        work = comm.all_reduce(torch.ones(3 + comm.rank), async_op=True)
        staged = comm.all_reduce(torch.ones(3 + comm.rank, 2).t(), async_op=True)
        for failed in (work, staged):
            for _ in range(2):
                with pytest.raises(Mismatch, match="all_reduce"):
                    failed.wait()
            assert isinstance(failed.exception(), Mismatch)
            assert failed.done()
        assert comm.all_reduce(torch.ones(1)).item() == 2.0

    run_threads(2, body)


def test_a_bad_wait_timeout_is_named():
    def body(comm: Communicator) -> None:
        with pytest.raises(InvalidArgument, match="timeout is -1"):
            comm.barrier(async_op=True).wait(-1)

    run_threads(1, body)
