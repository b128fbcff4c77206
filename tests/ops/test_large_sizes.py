"""Sizes past 2^31 and ranks past 255: counts and offsets are whole numbers, never 32 or 8 bits.

Layers of proof: fake tensors of billions of elements in two processes; layouts of workspaces and
partitions as pure integers. A kernel's offsets past 2^31: tests/triton_kernels/test_gemm.py.
"""

import itertools
from dataclasses import fields

import pytest
import torch
from torch._subclasses import FakeTensorMode

from pyparallel.layers.partition import Partition
from pyparallel.ops import explain
from pyparallel.ops.checks import Misfits, own_sizes, sizes_of_whole
from pyparallel.triton_kernels.all_gather_plan import AllGatherLayout
from pyparallel.triton_kernels.slots import SlotLayout, even_sizes, tiles_of
from tests.launch import run_ranks
from tests.ops.seats import make_groups

M, K, N = 60_000, 50_000, 70_000  # 3e9, 3.5e9 and 4.2e9 elements


def fakes(rank):
    from pyparallel import ops

    (group,) = make_groups(rank, ("pyparallel",)).values()
    ops.all_reduce(torch.zeros(1), group)  # what a first call agrees on is no fake
    with FakeTensorMode():
        x, w = torch.empty(M, K, dtype=torch.bfloat16), torch.empty(N, K, dtype=torch.bfloat16)
        shapes = [
            ops.all_gather_matmul(x, w, group),
            ops.matmul_reduce_scatter(x, w, group),
            ops.matmul_all_reduce(x, w, group),
            ops.all_gather(x, group),
            ops.reduce_scatter(x, group, 1),
        ]
    assert [tuple(y.shape) for y in shapes] == [
        (2 * M, N), (M // 2, N), (M, N), (2 * M, K), (M, K // 2)
    ]  # fmt: skip


def test_fakes_of_billions_of_elements():
    run_ranks(fakes, 2)


def test_a_problem_past_2_31_is_explained():
    found = explain("matmul_reduce_scatter", ((M, K), (N, K)), 8, dtype=torch.bfloat16)
    assert found.problem.flops == 2 * M * N * K
    assert all(t.us is None or t.us > 0 for t in found.timings)


@pytest.mark.parametrize("world", [2, 300])
def test_regions_of_a_workspace_never_meet(world):
    rows, n, block = 3 * M, N, 128
    sizes = even_sizes(rows, world, block)
    assert sum(sizes) == rows
    tiles = max(tiles_of(size, n, block, block) for size in sizes)
    layout = SlotLayout(world, max(sizes), n, tiles, torch.float32, rows, torch.bfloat16)
    at = [layout.started, layout.pushed, layout.ready, layout.slots, layout.results, layout.nbytes]
    assert at == sorted(set(at))
    assert layout.slot_bytes >= max(sizes) * n * 4 > (2**31 if world == 2 else 0)
    assert layout.results - layout.slots == 2 * world * layout.slot_bytes
    assert layout.nbytes - layout.results >= 2 * rows * n * 2 > 2**35
    gather = AllGatherLayout(world, row_bytes=rows * K * 2, max_rows=rows)
    names = [f.name for f in fields(gather)]
    assert "world" in names
    assert gather.nbytes > 2 * rows * K * 2 > 2**34


def test_ranks_past_255():
    world = 300
    misfits = Misfits()
    assert sizes_of_whole(2 * world, 0, None, world, misfits, "x") == [2] * world
    sizes = [rank % 3 for rank in range(world)]
    for rank in (0, 255, 256, 299):
        assert own_sizes(rank % 3, 0, sizes, rank, world, misfits) == sizes
    misfits.raise_any()
    partition = Partition.even(70_001, world)
    held = [partition.segments(rank) for rank in range(world)]
    starts = [s.whole for s in itertools.chain(*held)]
    assert starts == sorted(set(starts))
    assert sum(s.length for s in itertools.chain(*held)) == 70_001
