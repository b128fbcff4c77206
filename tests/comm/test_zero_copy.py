"""Collectives on tensors in symmetric memory: read in place by the peers, with the same bits.

Layers: processes as ranks; each result against the same call on private memory, which
test_collectives.py checks against float64. Sizes on both sides of the border below which the
buffers are not used, more ranks than cores, unequal offsets, one rank with a private one.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from pyparallel.comm import Communicator
from pyparallel.comm.symmetric_memory import SymmetricMemory
from tests.launch import Rank, run_ranks

NUMEL = 40_003
DTYPES = [torch.float32, torch.bfloat16]


@contextmanager
def seat_and_memory(rank: Rank) -> Iterator[tuple[Communicator, SymmetricMemory]]:
    with (
        Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size, timeout=40) as comm,
        SymmetricMemory(comm, 16 << 20) as memory,
    ):
        yield comm, memory


def filled(shape, dtype, rank: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def same(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(ours, expected)


def in_place(rank: Rank) -> None:
    with seat_and_memory(rank) as (comm, memory):
        me, world = comm.rank, comm.world_size
        for dtype in DTYPES:
            for numel in (100, NUMEL):
                private = filled(numel, dtype, me)
                ours = memory.empty(numel, dtype=dtype)
                for op in ("sum", "avg", "max"):
                    ours.copy_(private)
                    same(comm.all_reduce(ours, op), comm.all_reduce(private.clone(), op))
                for root in range(world):
                    ours.copy_(private)
                    same(comm.broadcast(ours, root), comm.broadcast(private.clone(), root))
                ours.copy_(private)
                same(comm.all_gather(ours), comm.all_gather(private))
                blocks = memory.empty((world, numel), dtype=dtype)
                blocks.copy_(filled((world, numel), dtype, me))
                same(comm.reduce_scatter(blocks), comm.reduce_scatter(blocks.clone()))


def mixed(rank: Rank) -> None:
    """One rank's buffer is private: all must choose the other path."""
    with seat_and_memory(rank) as (comm, memory):
        private = filled(NUMEL, torch.float32, comm.rank)
        ours = memory.empty(NUMEL, dtype=torch.float32)
        ours.copy_(private)
        if comm.rank == 1:
            ours = private.clone()
        same(comm.all_reduce(ours), comm.all_reduce(private.clone()))
        ours.copy_(private)
        same(comm.broadcast(ours, 0), comm.broadcast(private.clone(), 0))


def unequal_offsets(rank: Rank) -> None:
    with seat_and_memory(rank) as (comm, memory):
        whole = memory.empty(NUMEL + 16, dtype=torch.float32)
        ours = whole[comm.rank : comm.rank + NUMEL]
        private = filled(NUMEL, torch.float32, comm.rank)
        ours.copy_(private)
        same(comm.all_gather(ours), comm.all_gather(private))
        same(comm.all_reduce(ours), comm.all_reduce(private.clone()))


def overwritten_at_once(rank: Rank) -> None:
    """A buffer may be changed as soon as the call has returned, while slow peers are behind."""
    with seat_and_memory(rank) as (comm, memory):
        ours = memory.empty(NUMEL, dtype=torch.float32)
        for turn in range(50):
            ours.fill_(turn * comm.world_size + comm.rank)
            gathered = comm.all_gather(ours)
            ours.fill_(-1)
            expected = turn * comm.world_size + torch.arange(comm.world_size)
            same(gathered.reshape(comm.world_size, -1)[:, -1], expected.float())


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    "case", [in_place, unequal_offsets, overwritten_at_once], ids=lambda f: f.__name__
)
def test_symmetric_buffers(case, world_size: int) -> None:
    run_ranks(case, world_size)


def test_one_private_buffer() -> None:
    run_ranks(mixed, 3)
