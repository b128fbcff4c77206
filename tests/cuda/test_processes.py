"""The kernels between processes: SymmetricMemory on the CPU, kernels as host threads of each rank.

What a group of GPUs does, but for the GPUs: workspaces cut from shared memory, one seat per
process, flags across processes; a rank that is killed in the middle is named by the others.
"""

import ctypes
import os

import pytest
import torch

from bench.gpu.virtual_ranks import rank_order_sum
from tests.cuda import programs
from tests.cuda.test_python import STAND_IN
from tests.launch import Rank, run_ranks, spawn_ranks

# The first test of a run compiles: minutes on a busy machine.
pytestmark = pytest.mark.timeout(600)

GRID = (2, 4)
STREAM = 1


def _seat(rank: Rank, **more):
    from pyparallel.comm import Communicator
    from pyparallel.comm.cuda_kernels import CudaCollectives
    from pyparallel.comm.symmetric_memory import SymmetricMemory

    group = Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size, timeout=30)
    memory = SymmetricMemory(group, 1 << 20)
    seat = CudaCollectives.over(memory, max_blocks=2, signals=2, slot_bytes=512, **more)
    library = ctypes.CDLL(os.environ["PYPARALLEL_CUDA_LIB"])

    def finish() -> None:
        library.stand_in_synchronize(ctypes.c_void_p(STREAM))
        seat.check()

    return seat, finish, memory, group


def _inputs(world: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Every rank's, on every rank."""
    return [
        torch.randn(count, generator=torch.Generator().manual_seed(r + 17)).to(dtype)
        for r in range(world)
    ]


def _all_collectives(rank: Rank) -> None:
    seat, finish, _memory, group = _seat(rank)
    me, world = rank.rank, rank.world_size
    for dtype in (torch.float32, torch.bfloat16):
        for count in (1, 77, 700):
            x = _inputs(world, count, dtype)
            wide = _inputs(world, count * world, dtype)
            one, two = torch.empty_like(x[me]), torch.empty_like(x[me])
            gathered, share = torch.empty_like(wide[me]), torch.empty_like(x[me])
            for algorithm, out in (("one_shot", one), ("two_shot", two)):
                seat.all_reduce(x[me], out=out, algorithm=algorithm, grid=GRID, stream=STREAM)
            seat.all_gather(x[me], out=gathered, grid=GRID, stream=STREAM)
            seat.reduce_scatter(wide[me], out=share, grid=GRID, stream=STREAM)
            seat.put_signal((me + 1) % world, 1, stream=STREAM)
            seat.wait_signal(1, stream=STREAM)
            seat.barrier(stream=STREAM)
            finish()
            assert torch.equal(one, rank_order_sum(x))
            assert torch.equal(two, one)
            assert torch.equal(gathered, torch.cat(x))
            mine = [w[me * count : (me + 1) * count] for w in wide]
            assert torch.equal(share, rank_order_sum(mine))
    group.barrier()  # no rank's memory goes before the others have finished


def _other_layouts(rank: Rank) -> str:
    from pyparallel.comm import CommError, Communicator
    from pyparallel.comm.cuda_kernels import CudaCollectives
    from pyparallel.comm.symmetric_memory import SymmetricMemory

    group = Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size, timeout=30)
    memory = SymmetricMemory(group, 1 << 20)
    try:
        CudaCollectives.over(memory, slot_bytes=512 * (1 + rank.rank), max_blocks=2)
    except CommError as error:
        return type(error).__name__
    return "nothing raised"


def _killed_in_the_middle(rank: Rank) -> str:
    from pyparallel.errors import Timeout

    seat, finish, _memory, _group = _seat(rank, timeout=4.0)
    x = torch.randn(100)
    seat.all_reduce(x, algorithm="one_shot", grid=GRID, stream=STREAM)
    finish()
    rank.report("first call done")
    if rank.rank == 1:
        rank.report("waiting to be killed")
        import time

        time.sleep(50)
    try:
        for _ in range(2):
            seat.all_reduce(x, algorithm="two_shot", grid=GRID, stream=STREAM)
            finish()
    except Timeout as error:
        return str(error)
    return "nothing raised"


@pytest.fixture(scope="module")
def stand_in() -> dict[str, str]:
    return {"PYPARALLEL_CUDA_LIB": str(programs.shared_object(STAND_IN))}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_collectives(stand_in, world):
    run_ranks(_all_collectives, world, env=stand_in, timeout=120)


def test_other_layouts_raise_on_all_ranks(stand_in):
    assert run_ranks(_other_layouts, 2, env=stand_in) == ["Mismatch", "Mismatch"]


def test_a_killed_rank_is_named(stand_in):
    with spawn_ranks(_killed_in_the_middle, 3, env=stand_in) as ranks:
        for rank in range(3):
            assert ranks.next_report(rank) == "first call done"
        assert ranks.next_report(1) == "waiting to be killed"
        ranks.kill(1)
        for outcome in ranks.wait([0, 2]):
            assert "all_reduce (two-shot) #2" in outcome.value
            assert "rank 1 absent after 4" in outcome.value
