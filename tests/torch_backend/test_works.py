"""Asynchronous calls, futures, messages and batches of calls.

Layers: processes as ranks (tests/launch.py), results against values known in each process. All of
it runs in CI.
"""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pyparallel.comm import InvalidArgument, Mismatch, Timeout
from pyparallel.comm.torch_backend import communicator_of
from tests.comm.reference import assert_same_bits, data, poisoned
from tests.launch import Rank, run_ranks
from tests.torch_backend.groups import process_group


def asynchronous(rank: Rank) -> None:
    me, world = rank.rank, rank.world_size
    with process_group(rank):
        # In order, on one tensor, without waiting between: each call sees the one before.
        x = torch.tensor([float(me + 1)])
        first = dist.all_reduce(x, async_op=True)
        second = dist.all_reduce(x, dist.ReduceOp.PRODUCT, async_op=True)
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        sequence = backend._get_sequence_number_for_group()
        y = torch.ones(1)
        dist.all_reduce(y)  # a synchronous call waits for those that are queued
        assert first.is_completed()
        assert second.is_completed()
        assert x.item() == (world * (world + 1) / 2) ** world
        assert sequence <= 2
        assert backend._get_sequence_number_for_group() == 3
        for work in (first, second):
            assert work.wait()
            assert work.is_success()

        lists = [torch.empty(3) for _ in range(world)]
        results = {
            "all_reduce": (dist.all_reduce(x, async_op=True), 1),
            "broadcast": (dist.broadcast(x, 0, async_op=True), 1),
            "all_gather": (dist.all_gather(lists, torch.ones(3), async_op=True), world),
            "barrier": (dist.barrier(async_op=True), 0),
        }
        for name, (work, outputs) in results.items():
            value = work.get_future().wait()
            assert len(value) == outputs, (name, value)
        assert results["all_reduce"][0].result()[0].data_ptr() == x.data_ptr()

        gate = torch.zeros(1)
        if me == 0:
            time.sleep(0.2)  # the others' future exists before the call has run
        future = dist.all_reduce(gate, async_op=True).get_future()
        assert future.then(lambda f: f.value()[0] + 5).wait().item() == 5


def test_asynchronous_calls_run_in_order_and_have_futures():
    run_ranks(asynchronous, 2)


def errors(rank: Rank) -> None:
    """An error of an asynchronous call comes with wait() and with the future, on every rank."""
    me = rank.rank
    with process_group(rank):
        work = dist.all_reduce(torch.zeros(3 + me), async_op=True)
        future = work.get_future()
        with pytest.raises(Mismatch):
            work.wait()
        assert work.is_completed()
        assert not work.is_success()
        with pytest.raises(RuntimeError, match="all_reduce"):
            future.wait()

        # Checked when it is called: this rank at once, the others through their own call.
        tensors = [torch.zeros(2), torch.zeros(3)] if me == 0 else [torch.zeros(2)]
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        with pytest.raises(InvalidArgument if me == 0 else Mismatch, match="expected one"):
            backend.broadcast(tensors, dist.BroadcastOptions()).wait()

        if me == 1:
            work = dist.barrier(async_op=True)
            with pytest.raises(Timeout, match="0.05 s after wait"):
                work.wait(timedelta(seconds=0.05))
            assert not work.is_completed()
            dist.send(torch.zeros(1), 0)
            assert work.wait()  # that wait ended, the call went on
        else:
            dist.recv(torch.zeros(1), 1)
            dist.barrier()


def test_errors_of_asynchronous_calls():
    run_ranks(errors, 2)


def messages(rank: Rank) -> None:
    me = rank.rank
    peer = 1 - me
    with process_group(rank):
        for n in (0, 3, 2_000_000):  # both send first, then both receive
            x = torch.arange(float(n)) + me
            got = torch.full((n,), -1.0)
            sent = dist.isend(x, peer)
            received = dist.irecv(got, peer)
            assert received.wait()
            assert sent.wait()
            assert received.is_completed()
            assert torch.equal(got, torch.arange(float(n)) + peer)

        wide = torch.zeros(4, 6)
        dist.isend(torch.arange(12.0).view(4, 3) + me, peer, tag=7)
        dist.recv(wide[:, ::2], peer, tag=7)
        assert torch.equal(wide[:, ::2], torch.arange(12.0).view(4, 3) + peer)
        assert bool((wide[:, 1::2] == 0).all())
        dist.isend(torch.arange(6.0).view(2, 3).t() + me, peer)
        got = torch.empty(3, 2)
        dist.recv(got, peer)
        assert torch.equal(got, torch.arange(6.0).view(2, 3).t() + peer)

        for tag in (5, 4):
            dist.isend(torch.tensor([tag]), peer, tag=tag)
        for tag in (4, 5):
            got = torch.tensor([0])
            dist.recv(got, peer, tag=tag)
            assert got.item() == tag

        if me == 0:
            got = torch.empty(2)
            assert dist.recv(got) == 1
            assert got.tolist() == [1, 2]
            pending = dist.irecv(torch.empty(1), 1, tag=99)
            dist.send(torch.zeros(1), 1)
            assert pending.wait()
            assert len(pending.get_future().wait()) == 1
        else:
            dist.send(torch.tensor([1.0, 2.0]), 0)
            dist.recv(torch.empty(1), 0)
            dist.send(torch.ones(1), 0, tag=99)


def test_messages():
    run_ranks(messages, 2)


def forgotten(rank: Rank) -> None:
    """A Work may be dropped: the message arrives all the same, the memory stays."""
    with process_group(rank):
        if rank.rank == 0:
            got = torch.zeros(500_000)
            dist.irecv(got, 1)
            for _ in range(20):
                torch.full((500_000,), 3.0)  # memory that a freed buffer would share
            dist.barrier()
            for _ in range(500):
                if got[-1] == 1:
                    break
                time.sleep(0.01)
            assert bool((got == 1).all())
        else:
            dist.barrier()
            dist.isend(torch.ones(500_000), 0)
        dist.barrier()


def test_forgotten_works():
    run_ranks(forgotten, 2)


def ring(rank: Rank) -> None:
    """Both neighbours are the same rank when there are two: messages must not be swapped."""
    me, world = rank.rank, rank.world_size
    with process_group(rank):
        after, before = (me + 1) % world, (me - 1) % world
        for n in (1, 100_000):
            to_after, to_before = data((n,), torch.float32, me, "a"), data((n,), torch.float32, me)
            from_before, from_after = poisoned((n,), torch.float32), poisoned((n,), torch.float32)
            ops = [
                dist.P2POp(dist.isend, to_after, after),
                dist.P2POp(dist.irecv, from_before, before),
                dist.P2POp(dist.isend, to_before, before, tag=1),
                dist.P2POp(dist.irecv, from_after, after, tag=1),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            assert_same_bits(from_before, data((n,), torch.float32, before, "a"), "from before")
            assert_same_bits(from_after, data((n,), torch.float32, after), "from after")
        if me == 0:  # one side batches two, the other one
            got = torch.empty(1)
            ops = [dist.P2POp(dist.isend, torch.ones(1), 1), dist.P2POp(dist.irecv, got, world - 1)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            assert got.item() == 2
        if me == 1:
            for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.empty(1), 0)]):
                work.wait()
        if me == world - 1:
            dist.send(torch.tensor([2.0]), 0)


@pytest.mark.parametrize("world", [2, 3])
def test_batches_of_messages(world):
    run_ranks(ring, world)


def futures(rank: Rank) -> None:
    """Of messages and batches that are not done yet: completed by nobody's wait."""
    me, world = rank.rank, rank.world_size
    after, before = (me + 1) % world, (me - 1) % world
    with process_group(rank):
        wide = torch.zeros(2, 6)
        received = dist.irecv(wide[:, ::2], before).get_future()
        chained = received.then(lambda f: f.value()[0].sum().item())
        got = [torch.zeros(3), torch.zeros(1)]
        ops = [dist.P2POp(dist.irecv, x, before, tag=1 + i) for i, x in enumerate(got)]
        whole = [work.get_future() for work in dist.batch_isend_irecv(ops)]
        dist.barrier()
        assert not received.done()
        assert not whole[0].done()
        dist.barrier()  # none sends before all have looked
        dist.send(torch.full((2, 3), float(me)), after)
        assert chained.wait() == 6 * before
        assert bool((wide[:, ::2] == before).all())
        sent = [dist.isend(torch.full_like(x, me), after, tag=1 + i) for i, x in enumerate(got)]
        for future in whole + [work.get_future() for work in sent]:
            future.wait()
        assert got[0].tolist() == [before] * 3
        assert got[1].tolist() == [before]
    if me != 0:
        return
    with process_group(Rank(0, 1, rank.rendezvous + "alone", 60), timeout=0.5):
        future = dist.irecv(torch.zeros(1), 0, tag=5).get_future()
        with pytest.raises(RuntimeError, match=r"recv.*within 0\.5 s"):
            future.wait()


def test_futures_of_unfinished_messages():
    run_ranks(futures, 2)


def profiled(rank: Rank) -> list[str]:
    with process_group(rank), torch.profiler.profile() as profile:
        communicator = communicator_of(dist.group.WORLD)
        dist.all_reduce(torch.ones(3))
        dist.broadcast(torch.ones(3), 0, async_op=True).wait()
        communicator.all_gather(torch.ones(3, 2), dim=1)
    return [event.name for event in profile.events()]


def test_profiler_titles():
    for names in run_ranks(profiled, 2):
        for op in ("all_reduce", "broadcast", "all_gather"):
            title = f"pyparallel:{op}, group world"
            assert names.count(title) == 1, (title, names)
