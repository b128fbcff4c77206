"""`Communicator.note`: what a library on top says of its call is compared, and shown.

Layers of proof: processes on a CPU, on one host, and on two hosts that are one in disguise.
"""

import os

import pytest
import torch

from tests.launch import run_ranks


def differ(rank, hosts):
    if hosts == 2:
        os.environ["PYPARALLEL_HOST_ID"] = f"host-{rank.rank % 2}"
    try:
        from pyparallel.comm import Communicator, Mismatch

        with Communicator.from_store(rank.store(), rank.rank, rank.world_size) as comm:
            x = torch.ones(4)

            def calls():
                comm.all_reduce(x)
                comm.all_gather(x)
                comm.reduce_scatter(torch.ones(6), sizes=[6] + [0] * (rank.world_size - 1))
                comm.all_to_all(torch.ones(rank.world_size))
                comm.broadcast(x)
                comm.barrier()

            comm.note("the same")
            calls()  # the note is for the first only
            for mine in (f"rank {rank.rank} has M = {rank.rank}", "M = 1" if rank.rank else ""):
                if mine:
                    comm.note(mine)
                with pytest.raises(Mismatch) as caught:
                    comm.all_reduce(x)
                # Across hosts the first two that differ are shown.
                assert ("M = 1" if hosts == 1 else "M = ") in str(caught.value), caught.value
                if hosts == 1:
                    missing = "called for itself" if mine in ("", "M = 1") else "rank 0 has M = 0"
                    assert missing in str(caught.value), caught.value
                calls()
            comm.note("x" * 1000 + str(rank.rank % 2))  # cut in the message, compared in full
            with pytest.raises(Mismatch):
                comm.barrier()
            calls()
            return str(caught.value)
    finally:
        os.environ.pop("PYPARALLEL_HOST_ID", None)


@pytest.mark.parametrize(("world", "hosts"), [(2, 1), (3, 1), (3, 2)])
def test_notes_that_differ_raise_on_all(world, hosts):
    texts = run_ranks(differ, world, hosts)
    assert len(set(texts)) == 1, "all ranks read the same"
