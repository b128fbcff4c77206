"""GEMM + reduce-scatter between processes, and what its workspace refuses.

Layers of proof: the layout, as integers (here); 1 to 4 interpreted processes over symmetric memory,
uneven and empty shards, stragglers, one workspace for more than twenty calls of changing size
(here); the compiled kernels, read (tests/static/test_shipped.py). No GPU has run them.

Every rank checks its part against float64 within the bound of slot_ranks.limit; slots and outputs
are poisoned first. A bias added once per rank, and a rank that cuts otherwise, are the controls.
"""

from itertools import pairwise

import pytest
import torch

from pyparallel.comm import Communicator
from pyparallel.triton_kernels import gemm_reduce_scatter as fused
from pyparallel.triton_kernels.all_gather_plan import Shards
from pyparallel.triton_kernels.gemm import TileConfig
from pyparallel.triton_kernels.signals import DeviceWaitError, raise_failure, read_failure
from pyparallel.triton_kernels.slots import STEPS, SlotLayout, tiles_of
from tests.launch import run_ranks
from tests.triton_kernels.bounds import INTERPRETED, assert_within, worst_share
from tests.triton_kernels.slot_ranks import (
    LONG_US,
    limit,
    operands,
    poisoned,
    reference,
    straggle,
    workspace_of,
)

pytestmark = pytest.mark.timeout(320)  # interpreted kernels on a busy machine
DEADLINE = 300.0
CONFIG = TileConfig(16, 32, 32, group_m=2, programs=3)
OTHER = TileConfig(32, 16, 64, group_m=1, programs=2, halves=True)
BY_DESCRIPTOR = TileConfig(16, 32, 32, group_m=2, programs=2, descriptors=True)
N, MOST = 70, 24  # columns; rows of one rank


def _call(rank, workspace, number, sizes, dtype, config=CONFIG, depth=33, **more):
    """One call with random operands: everything a test wants to know of it."""
    world, m = rank.world_size, sum(sizes)
    depths = [depth + 8 * ((number + r) % 2) for r in range(world)]  # K may differ between ranks
    xs, ws = operands(number, world, m, N, depths, dtype)
    out = poisoned(sizes[rank.rank], N, dtype)
    straggle(number, rank.rank, world)
    shards = Shards(sizes, "cpu")
    x, w = xs[rank.rank], ws[rank.rank]
    fused.gemm_reduce_scatter(out, x, w, shards, workspace, config, timeout_us=LONG_US, **more)
    own = slice(shards.starts[rank.rank], shards.starts[rank.rank + 1])
    slot_dtype = workspace.layout.slot_dtype
    return out, reference(xs, ws)[own], limit(xs, ws, dtype, slot_dtype)[own]


def _calls(rank, count, slot_dtype):
    """`count` calls on one workspace: sizes, dtypes, tiles change; ranks come late in turn."""
    with Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size) as group:
        world = rank.world_size
        layout = fused.layout_of(world, MOST, N, [CONFIG, OTHER], slot_dtype)
        memory, workspace = workspace_of(group, layout)
        for number in range(1, count + 1):
            dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
            sizes = [(7 * number + 11 * r) % 17 * ((number + r) % 4 > 0) for r in range(world)]
            if number == count:
                sizes = [MOST - r for r in range(world)]  # as large as the workspace, uneven
            config = (CONFIG, OTHER, BY_DESCRIPTOR)[number % 3 if number % 5 else 0]
            depth = 32 if config.descriptors else 33
            out, ref, most = _call(rank, workspace, number, sizes, dtype, config, depth)
            assert_within(out, ref, most, f"call {number} {sizes} {dtype} {config}")
        assert read_failure(workspace.status) is None
        memory.barrier()


def _epilogue(rank):
    """Bias, activation and residual come in once; scales of operands before the sum; same bits."""
    with Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size) as group:
        layout = fused.layout_of(rank.world_size, MOST, N, [CONFIG])
        memory, workspace = workspace_of(group, layout)
        sizes = [5, 18, 0][: rank.world_size]
        generator = torch.Generator().manual_seed(5)
        bias = torch.randn(N, generator=generator) * 4
        residual = torch.randn(max(sizes), N, generator=generator)[: sizes[rank.rank]]
        plain, ref, most = _call(rank, workspace, 1, sizes, torch.float32)
        again, _, _ = _call(rank, workspace, 1, sizes, torch.float32)
        assert torch.equal(plain.view(torch.int32), again.view(torch.int32))  # exact: rank order
        out, _, _ = _call(rank, workspace, 1, sizes, torch.float32, bias=bias)
        assert_within(out, ref + bias.double(), most + 1e-6 * bias.abs())
        if out.numel():
            per_rank = ref + rank.world_size * bias.double()
            assert worst_share(out, per_rank, most)[0] > 100  # a bias once per rank is caught
        out, _, _ = _call(
            *(rank, workspace, 1, sizes, torch.float32),
            bias=bias,
            residual=residual,
            activation="relu",
        )
        right = (ref + bias.double()).relu() + residual.double()
        assert_within(out, right, most + 1e-6 * (bias.abs() + residual.abs()))
        scale = torch.rand(sum(sizes), generator=generator) + 0.5
        two = torch.tensor([2.0])
        out, _, _ = _call(
            *(rank, workspace, 1, sizes, torch.float32), row_scale=scale, column_scale=two
        )
        own = scale[sum(sizes[: rank.rank]) :][: sizes[rank.rank], None].double() * 2
        assert_within(out, ref * own, most * own)
        memory.barrier()


def _misfit(rank):
    """A rank that cuts otherwise is found out, and named; so is one that never comes."""
    with Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size) as group:
        layout = fused.layout_of(rank.world_size, MOST, N, [CONFIG, OTHER])
        told = []
        for config in (CONFIG if rank.rank else OTHER, CONFIG):
            memory, workspace = workspace_of(group, layout)
            if len(told) == 1 and rank.rank:
                told.append("")  # rank 1 stays away from the second call
            else:
                sizes = [20] * rank.world_size
                timeout = 200_000 if told else LONG_US
                xs, ws = operands(1, rank.world_size, 40, N, [8, 8], torch.float32)
                out = poisoned(20, N, torch.float32)
                fused.gemm_reduce_scatter(
                    *(out, xs[rank.rank], ws[rank.rank], Shards(sizes, "cpu"), workspace, config),
                    timeout_us=timeout,
                )
                with pytest.raises(DeviceWaitError) as caught:
                    raise_failure(workspace.status, fused.OP, "tp", STEPS)
                told.append(str(caught.value))
            memory.barrier()
        return told


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_calls(world):
    run_ranks(
        _calls, world, 22 if world == 2 else 4, torch.float32, timeout=DEADLINE, env=INTERPRETED
    )


def test_slots_of_16_bits():
    run_ranks(_calls, 2, 6, torch.bfloat16, timeout=DEADLINE, env=INTERPRETED)


def test_epilogue():
    run_ranks(_epilogue, 3, timeout=DEADLINE, env=INTERPRETED)


def test_ranks_that_disagree_or_stay_away_are_named():
    first, second = run_ranks(_misfit, 2, timeout=DEADLINE, env=INTERPRETED)
    assert (
        "gemm_reduce_scatter #1, group tp: partial sums: rank 1 runs call 1 with other" in first[0]
    )
    assert "rank 0 runs call 1 with other sizes" in second[0]
    assert "partial sums: rank 1 absent after " in first[1]


def test_a_call_that_does_not_fit_is_refused():
    """Rows, columns, and tiles smaller than those the flags were counted for."""
    layout = fused.layout_of(4, 1000, 576, [TileConfig(64, 64, 64)])
    layout.check("op", 1000, 576, tiles_of(1000, 576, 64, 64))
    with pytest.raises(ValueError, match="op: rows 1001, the workspace has 1000: make a larger"):
        layout.check("op", 1001, 576, 1)
    with pytest.raises(ValueError, match="op: n 575, the workspace is for 576"):
        layout.check("op", 8, 575, 1)
    small = tiles_of(1000, 576, 32, 64)
    with pytest.raises(ValueError, match=f"tiles {small}, the workspace has {layout.tiles}"):
        layout.check("op", 1000, 576, small)


def test_fields_of_the_layout_do_not_overlap():
    for world in (1, 3, 8):
        for rows, n, results in ((0, 1, 0), (7, 5, 0), (4096, 53248, 32768)):
            layout = SlotLayout(world, rows, n, 9, torch.bfloat16, results)
            ends = [
                (layout.started, world * 128),
                (layout.pushed, world * 9 * 128),
                (layout.ready, world * 9 * 128 if results else 0),
                (layout.slots, 2 * world * layout.slot_bytes),
                (layout.results, 2 * layout.result_bytes),
                (layout.nbytes, 0),
            ]
            for (start, size), (following, _) in pairwise(ends):
                assert start % 128 == 0
                assert start + size == following
            assert layout.slot_bytes >= rows * n * 2
