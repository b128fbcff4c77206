"""Groups that span hosts, through `from_store`: two host identities on one machine.

Layers: processes as ranks, ranks 0 and 1 on one host and the others on another as far as
PYPARALLEL_HOST_ID says; shared memory inside, gloo between. Whole numbers have exact references;
floats the float64 one with its bound, and the same bits on every rank. Real network name spaces
are in tests/hosts.
"""

import os
import re

import pytest
import torch

from pyparallel import _core
from pyparallel.comm import Communicator, InvalidArgument, Mismatch, Recv, Send
from tests.comm.reference import assert_same_bits, assert_within, data, digest, exact, float64
from tests.launch import Rank, run_ranks

ENV = {"GLOO_SOCKET_IFNAME": "lo"}


def joined(rank: Rank) -> Communicator:
    os.environ["PYPARALLEL_HOST_ID"] = f"host-{rank.rank // 2}"
    try:
        return Communicator.from_store(
            rank.store(), rank.rank, rank.world_size, name="wide", timeout=40
        )
    finally:
        del os.environ["PYPARALLEL_HOST_ID"]


def collectives(rank: Rank) -> list[int]:
    digests = []
    with joined(rank) as comm:
        me, world = comm.rank, comm.world_size
        for count in (0, 7, 50_001):
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                inputs = [data((count, 2), dtype, r, count) for r in range(world)]
                total = exact(inputs, "sum")
                x = inputs[me].t().contiguous().t()
                ours = comm.all_reduce(x)
                if dtype.is_floating_point:
                    assert_within(ours, *float64(inputs, "sum"), ("all_reduce", dtype, count))
                else:
                    assert_same_bits(ours, total, ("all_reduce", dtype, count))
                digests.append(digest(ours))
                # movements are exact
                sizes = [count if r == 1 else 0 for r in range(world)]
                mine = comm.reduce_scatter(inputs[me], "max", sizes=sizes)
                assert_same_bits(mine, exact(inputs, "max")[: len(mine)], "reduce_scatter")
                assert len(mine) == sizes[me]
                assert_same_bits(comm.all_gather(inputs[me]), torch.cat(inputs), "all_gather")
                x = inputs[me].clone()
                assert_same_bits(comm.broadcast(x, world - 1), inputs[-1], "broadcast")
                whole = comm.gather(inputs[me], root=1)
                if me == 1:
                    assert_same_bits(whole, torch.cat(inputs), "gather")
                out = torch.empty_like(inputs[me])
                comm.scatter(inputs if me == 2 else None, out, root=2)
                assert_same_bits(out, inputs[me], "scatter")
                wide = [data((world * 3, count), dtype, r, "to all") for r in range(world)]
                ours = comm.all_to_all(wide[me])
                expected = torch.cat([w.split(3)[me] for w in wide])
                assert_same_bits(ours, expected, "all_to_all")
        work = comm.all_reduce(torch.ones(5, dtype=torch.int32), async_op=True)
        comm.barrier()
        assert work.wait().tolist() == [world] * 5
    return digests


@pytest.mark.parametrize("world", [3, 4])
def test_collectives(world):
    results = run_ranks(collectives, world, env=ENV, timeout=100)
    assert all(digests == results[0] for digests in results)


def messages(rank: Rank) -> None:
    with joined(rank) as comm:
        me, world = comm.rank, comm.world_size
        right, left = (me + 1) % world, (me - 1) % world
        x = torch.zeros(30_000)
        works = comm.batch([Send(torch.full((30_000,), float(me)), right, 7), Recv(x, left, 7)])
        assert works[1].wait() == left
        works[0].wait()
        assert x.tolist() == [float(left)] * 30_000


def test_messages_cross_hosts():
    run_ranks(messages, 4, env=ENV, timeout=100)


def misfits(rank: Rank) -> None:
    with joined(rank) as comm:
        last = comm.rank == comm.world_size - 1
        with pytest.raises(Mismatch, match="8"):
            comm.all_reduce(torch.ones(8 if last else 4))
        with pytest.raises((InvalidArgument, Mismatch), match="unknown reduction 'no'"):
            comm.all_reduce(torch.ones(4), "no" if last else "sum")
        assert comm.all_reduce(torch.ones(2)).tolist() == [4.0, 4.0]


def test_misfits_raise_on_every_host():
    run_ranks(misfits, 4, env=ENV, timeout=100)


def test_the_identity_is_the_kernels_unless_overridden(monkeypatch):
    monkeypatch.delenv("PYPARALLEL_HOST_ID", raising=False)
    assert re.fullmatch(r"boot-[0-9a-f-]{36}-net-\d+", _core.host_identity())
    monkeypatch.setenv("PYPARALLEL_HOST_ID", "rack-7")
    assert _core.host_identity() == "rack-7"


def told_of_more(rank: Rank) -> None:
    """communication_and_gemm.md 54: how many ranks a host has is what their host identities say,
    never a launcher's number or a usual one."""
    os.environ.update(LOCAL_WORLD_SIZE="8", LOCAL_RANK="5", OMPI_COMM_WORLD_LOCAL_SIZE="8")
    with Communicator.from_store(rank.store(), rank.rank, 2, name="two", timeout=20) as comm:
        assert not comm.spans_hosts()
        assert comm.all_reduce(torch.ones(3)).tolist() == [2.0] * 3


def test_two_ranks_where_the_launcher_speaks_of_eight() -> None:
    run_ranks(told_of_more, 2)
