"""Batches of calls, and what raises inside them.

Layers: processes as ranks, results against values known in each process. torch's own
`_coalescing_manager` has no `finally`: here every way out of it is tried, and after each the group
must do what it is asked. All of it runs in CI.
"""

import pytest
import torch
import torch.distributed as dist

from pyparallel.comm import InvalidArgument, Mismatch
from tests.launch import Rank, run_ranks
from tests.torch_backend.groups import process_group

CPU = torch.device("cpu")


def reduces(rank: Rank) -> None:
    """The group is as good as new: an all-reduce does something, a batch of messages arrives."""
    me, world = rank.rank, rank.world_size
    x = torch.full((3,), float(me + 1))
    assert dist.all_reduce(x) is None
    assert x.tolist() == [world * (world + 1) / 2] * 3
    got = torch.zeros(2)
    ops = [
        dist.P2POp(dist.isend, torch.full((2,), float(me)), (me + 1) % world),
        dist.P2POp(dist.irecv, got, (me - 1) % world),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert got.tolist() == [(me - 1) % world] * 2


def everything(rank: Rank) -> None:
    with process_group(rank) as group:
        for check in (
            both_kinds,
            a_message_raises,
            a_collective_raises,
            raises_before_torch_calls,
            waits_inside,
            never_ended,
        ):
            check(rank, group)
            reduces(rank)


def both_kinds(rank: Rank, group: dist.ProcessGroup) -> None:
    """Collectives and messages between start and end of coalescing: one Work for all."""
    me, world = rank.rank, rank.world_size
    x, y, got = torch.ones(4) * me, torch.ones(3), torch.empty(2)
    group._start_coalescing(CPU)
    group.allreduce([x], dist.AllreduceOptions())
    group.broadcast([y.mul_(me)], dist.BroadcastOptions())
    group.send([torch.full((2,), float(me))], (me + 1) % world, 0)
    group.recv([got], (me - 1) % world, 0)
    with pytest.raises(ValueError, match="twice without endCoalescing"):
        group._start_coalescing(CPU)
    work = group._end_coalescing(CPU)
    assert work.wait()
    assert x.tolist() == [world * (world - 1) / 2] * 4
    assert y.tolist() == [0, 0, 0]
    assert got.tolist() == [(me - 1) % world] * 2
    assert work.is_completed()
    with pytest.raises(ValueError, match="without startCoalescing"):
        group._end_coalescing(CPU)


def a_message_raises(rank: Rank, group: dist.ProcessGroup) -> None:
    me, world = rank.rank, rank.world_size
    ops = [
        dist.P2POp(dist.isend, torch.full((2,), float(me)), (me + 1) % world, tag=9),
        dist.P2POp(dist.irecv, torch.ones(2).to_sparse(), (me - 1) % world),
    ]
    with pytest.raises(NotImplementedError, match="Sparse"):  # torch's own
        dist.batch_isend_irecv(ops)
    reduces(rank)
    got = torch.zeros(2)
    dist.recv(got, (me - 1) % world, tag=9)  # what was begun went on
    assert got.tolist() == [(me - 1) % world] * 2


def a_collective_raises(rank: Rank, group: dist.ProcessGroup) -> None:
    """On one rank, the second of two calls: the first is made, the second is refused."""
    me = rank.rank
    first = torch.full((2,), float(me))
    second = torch.ones(2, dtype=torch.bool if me == 1 else torch.float32)
    with pytest.raises(InvalidArgument if me == 1 else Mismatch, match="avg is not"):  # noqa: PT012
        with dist._coalescing_manager(group, CPU, async_ops=True) as manager:
            works = [dist.broadcast(first, 0, async_op=True)]
            works.append(dist.reduce(second, 0, dist.ReduceOp.AVG, async_op=True))
        manager.wait()
    works[0].wait()
    assert first.tolist() == [0, 0]


def raises_before_torch_calls(rank: Rank, group: dist.ProcessGroup) -> None:
    """torch collects all_reduces and calls the backend at the end of the block: not reached."""
    x = torch.ones(2)
    if rank.rank == 0:
        with pytest.raises(KeyError, match="mine"), dist._coalescing_manager():  # noqa: PT012
            dist.all_reduce(x)
            raise KeyError("mine")
    else:
        told = r"rank 0.*all_reduce.*KeyError was raised inside a coalescing block: 'mine'"
        with pytest.raises(Mismatch, match=told), dist._coalescing_manager():
            dist.all_reduce(x)


def waits_inside(rank: Rank, group: dist.ProcessGroup) -> None:
    """A call that waits for its end gets it, also inside a block."""
    x = torch.full((2,), float(rank.rank))
    with dist._coalescing_manager(group, CPU):
        dist.broadcast(x, 1)
        assert x.tolist() == [1, 1]


def never_ended(rank: Rank, group: dist.ProcessGroup) -> None:
    world = rank.world_size
    group._start_coalescing(CPU)
    for wait in (lambda work: work.wait(), lambda work: work.get_future().wait()):
        x, y = torch.ones(2), torch.ones(2)
        works = [group.allreduce([t], dist.AllreduceOptions()) for t in (x, y)]
        wait(works[1])
        assert x.tolist() == y.tolist() == [world] * 2
    group._end_coalescing(CPU).wait()


@pytest.mark.parametrize("world", [2, 3])
def test_what_raises_inside_a_batch_leaves_the_group_usable(world: int) -> None:
    run_ranks(everything, world)
