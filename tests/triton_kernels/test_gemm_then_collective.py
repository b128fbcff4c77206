"""GEMM in groups, each followed by an ordinary collective: what crosses ranks is not ours here.

Layers of proof: groups as integers (here); 1 to 3 processes, kernels interpreted, the collectives
of `Communicator`, one scratch for calls of changing size (here); the compiled kernels, read
(tests/static/test_shipped.py). No GPU has run them, so the overlap itself is not shown.

Every rank checks its part against float64 within the bound of slot_ranks.limit (partial sums are
rounded to the dtype, as stock does) and poisons what is written; ranks hold the same bits of a sum.
"""

import pytest
import torch

from pyparallel.comm import Communicator
from pyparallel.triton_kernels import gemm_then_collective as fused
from pyparallel.triton_kernels.all_gather_plan import Shards
from pyparallel.triton_kernels.gemm import TileConfig
from pyparallel.triton_kernels.signals import read_failure
from tests.launch import run_ranks
from tests.triton_kernels.bounds import INTERPRETED, assert_within, worst_share
from tests.triton_kernels.slot_ranks import limit, operands, poisoned, reference, straggle

pytestmark = pytest.mark.timeout(320)  # interpreted kernels on a busy machine
DEADLINE = 300.0
CONFIG = TileConfig(16, 32, 32, group_m=2, programs=3)
N = 70


def _calls(rank, count):
    with Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size) as group:
        world, me = rank.world_size, rank.rank
        generator = torch.Generator().manual_seed(3)
        bias = torch.randn(N, generator=generator) * 4
        rows = 4 * world * 16
        scratch = fused.Scratch.make(4, "cpu", rows=rows, chunk=16, n=N, dtype=torch.float32)
        scratch_all = fused.Scratch.make(4, "cpu")
        sums = []

        def scatter(received, sent):
            group.reduce_scatter(sent, out=received)

        def reduce(band):
            sums.append(group.all_reduce(band))

        for number in range(1, count + 1):
            sizes = [(13 * number + 29 * r) % 41 * ((number + r) % 3 > 0) for r in range(world)]
            shards = Shards(sizes, "cpu")
            xs, ws = operands(
                number, world, shards.rows, N, [33 + r for r in range(world)], torch.float32
            )
            ref, most = reference(xs, ws) + bias.double(), limit(xs, ws, torch.float32)
            most = most + 1e-6 * bias.abs()
            scratch.buffer.fill_(float("nan"))
            out = poisoned(sizes[me], N, torch.float32)
            straggle(number, me, world)
            groups = fused.groups_of(sizes, CONFIG)
            args = (shards, groups, scratch, CONFIG, me)
            fused.gemm_then_reduce_scatter(out, xs[me], ws[me], *args, scatter, bias=bias)
            own = slice(shards.starts[me], shards.starts[me + 1])
            assert_within(out, ref[own], most[own], f"call {number} {sizes}")
            if world > 1 and out.numel():
                wrong = ref[own] + (world - 1) * bias.double()
                assert worst_share(out, wrong, most[own])[0] > 100  # a bias once per rank: caught
            whole = Shards([shards.rows], "cpu")
            out = poisoned(shards.rows, N, torch.float32)
            groups = fused.groups_of(whole.sizes, CONFIG, 2 + number % 3)
            args = (whole, groups, scratch_all, CONFIG, me)
            fused.gemm_then_all_reduce(out, xs[me], ws[me], *args, reduce, bias=bias)
            assert_within(out, ref, most, f"call {number}, all of {shards.rows}")
            sums.append(out.double().sum().item())
        assert read_failure(scratch.status) is None
        return [value for value in sums if isinstance(value, float)]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_calls(world):
    first, *others = run_ranks(
        _calls, world, 4 if world == 2 else 2, timeout=DEADLINE, env=INTERPRETED
    )
    assert all(sums == first for sums in others)


def _absent(rank):
    """A wait whose group nobody multiplies ends with the record of it."""
    scratch = fused.Scratch.make(2, "cpu")
    fused.wait_for_group(scratch, 1, 0, timeout_us=50_000)
    found = read_failure(scratch.status)
    return found.text(fused.OP, "tp", fused.STEPS)


def test_a_group_that_never_comes():
    (said,) = run_ranks(_absent, 1, timeout=DEADLINE, env=INTERPRETED)
    assert "gemm_then_collective #1, group tp: tiles of a group: rank 0 absent after " in said


def test_groups_are_whole_tiles_and_cover_all_rows():
    for largest in (0, 1, 15, 16, 17, 63, 64, 65, 1000):
        for at_most in (1, 2, 4, 7):
            groups = fused.groups_of([largest, 3], CONFIG, at_most)
            assert groups.chunk % CONFIG.block_m == 0
            assert groups.count <= at_most
            assert (
                groups.count * groups.chunk >= max(largest, 3) > (groups.count - 1) * groups.chunk
            )


def test_a_scratch_that_is_too_small_is_refused():
    shards, tensor = Shards([40, 8], "cpu"), torch.empty(48, 8)
    small = fused.Scratch.make(1, "cpu", rows=32, chunk=16, n=8)
    args = (tensor[:40], tensor, tensor[:8], shards, fused.groups_of(shards.sizes, CONFIG))
    with pytest.raises(ValueError, match="96 rows of buffer, the scratch has 32"):
        fused.gemm_then_reduce_scatter(*args, small, CONFIG, 0, lambda *_: None)
    with pytest.raises(ValueError, match="3 groups of 16 rows, the scratch is for 1 of 16"):
        fused.gemm_then_all_reduce(*args, small, CONFIG, 0, lambda *_: None)
