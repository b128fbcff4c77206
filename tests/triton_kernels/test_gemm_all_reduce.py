"""GEMM + all-reduce between processes: one shot, two shot, multimem's twin, RMSNorm, the choice.

Layers of proof: the choice of an algorithm, as a function (here); 1 to 4 interpreted processes over
symmetric memory, stragglers, one workspace for more than twenty calls of changing size (here); the
compiled kernels, read (tests/static/test_shipped.py). No GPU has run them: the switch of multimem
has never added, its interpreted twin has.

Every rank checks all of its result against float64 within the bound of slot_ranks.limit, and all
ranks hold the same bits. Slots, results and outputs are poisoned first.
"""

import hashlib

import pytest
import torch

from pyparallel.comm import Communicator
from pyparallel.triton_kernels import gemm_all_reduce as fused
from pyparallel.triton_kernels.gemm import TileConfig
from pyparallel.triton_kernels.gemm_all_reduce import (
    ALGORITHMS,
    MULTIMEM,
    ONE_SHOT,
    TWO_SHOT,
    Norm,
    choose_algorithm,
)
from pyparallel.triton_kernels.signals import read_failure
from pyparallel.triton_kernels.slots import even_sizes
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
OTHER = TileConfig(32, 16, 64, group_m=1, programs=2)
N, MOST = 68, 24


def _call(rank, workspace, number, m, dtype, algorithm, config=CONFIG, norm=None, **more):
    """One call with random operands: the result, the reference and its limit."""
    world = rank.world_size
    xs, ws = operands(number, world, m, N, [33 + 2 * r for r in range(world)], dtype)
    out = poisoned(m, N, dtype)
    straggle(number, rank.rank, world)
    fused.gemm_all_reduce(
        out,
        xs[rank.rank],
        ws[rank.rank],
        algorithm,
        fused.shards_of(algorithm, m, world, config),
        workspace,
        config,
        norm=norm,
        timeout_us=LONG_US,
        **more,
    )
    return out, reference(xs, ws), limit(xs, ws, dtype)


def _workspace(group, dtype):
    layout = fused.layout_of(group.world_size, MOST, N, [CONFIG, OTHER], result_dtype=dtype)
    return workspace_of(group, layout)


def _digest(out):
    return hashlib.sha256(out.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _calls(rank, count):
    """Algorithms, sizes and tiles change from call to call on one workspace for each dtype."""
    digests = []
    with Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size) as group:
        dtypes = (torch.float32, torch.bfloat16)
        places = [_workspace(group, dtype) for dtype in dtypes]
        for number in range(1, count + 1):
            dtype, (_, workspace) = dtypes[number % 2], places[number % 2]
            algorithm = ALGORITHMS[number % 3]
            m = MOST if number == count else (5 * number) % 17
            config = OTHER if number % 4 == 0 else CONFIG
            out, ref, most = _call(rank, workspace, number, m, dtype, algorithm, config)
            assert_within(out, ref, most, f"call {number}: {m} {dtype} {algorithm}")
            digests.append(_digest(out))
        for memory, workspace in places:
            assert read_failure(workspace.status) is None
            memory.barrier()
    return digests


def _epilogue(rank):
    """Bias and residual once, with and without RMSNorm, by every algorithm."""
    digests = []
    with Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size) as group:
        memory, workspace = _workspace(group, torch.float32)
        generator = torch.Generator().manual_seed(11)
        m = 18
        bias, weight = torch.randn(2, N, generator=generator) * 3
        residual = torch.randn(m, N, generator=generator)
        plain = {}
        for algorithm in ALGORITHMS:
            more = {"bias": bias, "residual": residual}
            out, ref, most = _call(rank, workspace, 1, m, torch.float32, algorithm, **more)
            right = ref + bias.double() + residual.double()
            most = most + 1e-6 * (bias.abs() + residual.abs())
            assert_within(out, right, most, algorithm)
            if rank.world_size > 1:
                per_rank = right + (rank.world_size - 1) * bias.double()
                assert worst_share(out, per_rank, most)[0] > 100  # caught: a bias once per rank
            plain[algorithm] = out
            hidden = poisoned(m, N, torch.float32)
            norm = Norm(hidden, weight, 1e-5)
            out, _, _ = _call(rank, workspace, 1, m, torch.float32, algorithm, norm=norm, **more)
            assert_within(hidden, right, most, f"{algorithm} before the norm")
            root = (right.pow(2).mean(1, keepdim=True) + 1e-5).rsqrt()
            # The norm of h + e differs by at most |e| root |w|, and by the change of root: as much
            # again as the mean of |e h| root^2.
            spread = (most * right.abs()).mean(1, keepdim=True) * root**2
            limit_norm = (most + right.abs() * (spread + 4e-7)) * root * weight.abs()
            assert_within(out, right * root * weight.double(), limit_norm, f"{algorithm} norm")
            digests += [_digest(plain[algorithm]), _digest(hidden), _digest(out)]
        # Rank order in fp32, rounded once: one shot and two shot give the same bits.
        assert torch.equal(plain[ONE_SHOT], plain[TWO_SHOT])
        memory.barrier()
    return digests


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_calls(world):
    first, *others = run_ranks(
        _calls, world, 22 if world == 2 else 4, timeout=DEADLINE, env=INTERPRETED
    )
    assert all(digests == first for digests in others)


@pytest.mark.parametrize("world", [1, 3])
def test_epilogue(world):
    first, *others = run_ranks(_epilogue, world, timeout=DEADLINE, env=INTERPRETED)
    assert all(digests == first for digests in others)


def test_choice_by_size():
    assert choose_algorithm(1, 4096, 8).name == ONE_SHOT
    assert choose_algorithm(16, 4096, 8).name == ONE_SHOT
    assert choose_algorithm(17, 4096, 8).name == TWO_SHOT
    assert choose_algorithm(17, 4096, 8, slot_dtype=torch.bfloat16).name == ONE_SHOT
    assert choose_algorithm(8192, 8192, 2).name == ONE_SHOT  # as much traffic, a meeting less
    found = choose_algorithm(8192, 8192, 8, multicast=True, any_order=True)
    assert found.name == MULTIMEM
    assert "268435456 bytes to each of 7 peers" in found.reason


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"multicast": False}, "no multicast address"),
        ({"n": 4098}, "N = 4098 is no multiple of 4"),
        ({"slot_dtype": torch.bfloat16}, "slots of torch.bfloat16, not fp32"),
        ({"any_order": False}, "sums must be in rank order"),
    ],
)
def test_what_multimem_lacks_costs_only_multimem(more, why):
    """A missing capability leads to the next best, with the reason, asked for or not."""
    facts = {"m": 4096, "n": 4096, "world": 8, "multicast": True, "any_order": True}
    assert choose_algorithm(**facts, asked=MULTIMEM).name == MULTIMEM
    for asked in (None, MULTIMEM):
        found = choose_algorithm(**facts | more, asked=asked)
        assert found.name == TWO_SHOT
        assert why in found.reason


def test_an_unknown_algorithm_is_refused():
    with pytest.raises(ValueError, match="'ring'; there are one_shot, two_shot, multimem"):
        choose_algorithm(1, 8, 2, asked="ring")


def test_even_sizes_are_whole_tiles_and_all_rows():
    for rows in (0, 1, 15, 16, 17, 100, 1000):
        for world in (1, 2, 3, 8):
            for block in (1, 16, 64):
                sizes = even_sizes(rows, world, block)
                assert len(sizes) == world
                assert sum(sizes) == rows
                starts = [sum(sizes[:r]) for r in range(world)]
                assert all(start % block == 0 or start == rows for start in starts)
                assert max(sizes) - min(sizes) <= 2 * block


def test_a_norm_of_longer_rows_is_refused_and_says_what_works():
    norm = Norm(torch.empty(1, 20000), torch.empty(20000), 1e-5)
    with pytest.raises(ValueError, match="RMSNorm of rows of 20000; up to 16384 fit"):
        fused._check_norm(norm, 20000)
