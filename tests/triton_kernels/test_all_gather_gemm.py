"""All-gather + GEMM between processes: every rank's result, and what happens when ranks disagree.

Layers of proof: layout and plan as pure functions (test_all_gather_plan.py); 1 to 4 and 8
interpreted processes over one workspace, against float64 (here); the compiled kernels, read
(test_compiled_all_gather.py). No GPU has run it.

Close within the bound of bounds.py: outs. Exact: the gathered rows, and outs of ranks that hold the
same weight.
"""

import random
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch

from pyparallel.comm import Communicator, SymmetricMemory
from pyparallel.triton_kernels import all_gather_plan as plans
from pyparallel.triton_kernels.all_gather_gemm import WAITS, all_gather_gemm
from pyparallel.triton_kernels.all_gather_plan import AllGatherLayout, AllGatherPlan, Shards
from pyparallel.triton_kernels.gemm import TileConfig
from pyparallel.triton_kernels.signals import DeviceWaitError, raise_failure
from pyparallel.triton_kernels.workspace import Workspace
from tests.launch import run_ranks
from tests.triton_kernels.bounds import INTERPRETED, assert_within, limit_of

FP8 = torch.float8_e4m3fn
TILES = TileConfig(64, 64, 64, group_m=2, programs=2)
SMALL_TILES = TileConfig(16, 64, 32, group_m=3, programs=3)  # few in most calls: they are slow
BY_DESCRIPTOR = TileConfig(32, 32, 64, group_m=2, programs=2, descriptors=True)

# sizes of shards (the first `world` of them), columns of each weight, K, dtype, tiles, chunk rows,
# pullers: one workspace for all of them, in this order.
CALLS = [
    ((7, 7, 7, 7), (40,), 48, torch.float32, TILES, 32, 0),
    ((64, 64, 64, 64), (33,), 48, torch.float32, TILES, 32, 1),
    ((13, 13, 13, 13), (20,), 40, torch.float16, TILES, 16, 0),
    ((0, 33, 64, 5), (33, 17), 40, torch.bfloat16, TILES, 32, 2),
    ((40, 1, 0, 9), (20, 8, 8), 64, torch.float16, BY_DESCRIPTOR, 32, 0),
    ((40, 1, 0, 9), (20, 8), 64, FP8, BY_DESCRIPTOR, 32, 2),
    ((0, 0, 0, 3), (16,), 17, torch.float32, SMALL_TILES, 48, 0),
    ((3, 0, 0, 0), (16,), 17, torch.float16, SMALL_TILES, 48, 1),
    ((0, 0, 0, 0), (16,), 17, torch.float32, TILES, 32, 0),
    ((50, 50, 50, 50), (0, 0), 33, torch.float32, TILES, 32, 0),
    ((50, 50, 50, 50), (0,), 33, torch.float32, TILES, 32, 2),
    ((50, 33, 17, 49), (33,), 33, torch.float16, SMALL_TILES, 24, 0),
    ((50, 33, 17, 49), (9,), 33, torch.bfloat16, TILES, 24, 2),
    ((20, 20, 20, 20), (24,), 0, torch.float32, TILES, 32, 0),
]
ROUNDS = {1: 1, 2: 2, 3: 1, 4: 2}  # by world size: of a round 13 or 14 calls communicate
TIMEOUT = 200.0  # interpreted ranks share the machine's cores

pytestmark = pytest.mark.timeout(300)


class _Run:
    """One rank over one workspace: makes a call and checks all of it."""

    def __init__(self, group, layout):
        self.rank, self.world = group.rank, group.world_size
        self.memory = SymmetricMemory(group, layout.nbytes)
        self.workspace = Workspace.make(self.memory, layout)

    def rows(self, sizes, depth, dtype, seed):
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(m, depth, generator=generator).to(dtype) for m in sizes]

    def call(self, sizes, columns, depth, dtype, tiles, chunk_rows, pullers, seed, timeout_s=120.0):
        """Gathers and multiplies; gives the outs, checked against float64."""
        sizes = sizes[: self.world]
        shards = Shards(sizes, "cpu")
        parts = self.rows(sizes, depth, dtype, seed)
        full = torch.cat(parts)
        generator = torch.Generator().manual_seed(seed + 1)
        weights = [torch.randn(n, depth, generator=generator).to(dtype) for n in columns]
        if seed % 2 and dtype is not FP8 and not tiles.descriptors:
            weights = [weight.T.contiguous().T for weight in weights]  # stored as [K, N]
        out_dtype = torch.bfloat16 if dtype is FP8 else dtype
        biases = [torch.randn(n, generator=generator) if n % 2 == 0 else None for n in columns]
        all_scales = torch.rand(shards.rows, generator=generator) if dtype is FP8 else None
        column_scales = [torch.rand(n, generator=generator) for n in columns]
        own = slice(shards.starts[self.rank], shards.starts[self.rank + 1])
        x = parts[self.rank]
        if seed % 3 == 0:
            x = x.T.contiguous().T
        outs = [torch.full((shards.rows, n), float("nan"), dtype=out_dtype) for n in columns]
        gathered = all_gather_gemm(
            outs,
            x,
            weights,
            self.workspace,
            shards,
            AllGatherPlan(tiles, chunk_rows, pullers),
            biases=biases,
            x_scale=None if all_scales is None else all_scales[own],
            column_scales=None if all_scales is None else column_scales,
            timeout_s=timeout_s,
        )
        raise_failure(self.workspace.status, "all_gather_matmul", "tp", WAITS)
        what = f"{sizes} {columns} {depth} {dtype} {pullers} rank {self.rank}"
        assert torch.equal(gathered.view(torch.uint8), full.view(torch.uint8)), what
        for out, weight, bias, scale in zip(outs, weights, biases, column_scales, strict=True):
            a, b = (full.bfloat16(), weight.bfloat16()) if dtype is FP8 else (full, weight)
            factor = all_scales[:, None].double() * scale if dtype is FP8 else 1.0
            shift = 0.0 if bias is None else bias.double()
            ref = a.double() @ b.double().T * factor + shift
            stock = ((a.double() @ b.double().T).float() * factor + shift).to(out_dtype)
            if dtype is not FP8:
                stock = (a @ b.T).to(out_dtype) + (0 if bias is None else bias.to(out_dtype))
            limit = limit_of(a, b, stock - shift, factor) + (stock.double() - ref).abs()
            limit += 2 * torch.finfo(out_dtype).eps * ref.abs()  # stock rounds twice: sum, bias
            assert_within(out, ref, limit, what)
        return outs


def _many_calls(rank):
    """All of CALLS in one workspace, with a straggler in each, and tiles that differ by rank."""
    with Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size) as group:
        run = _Run(group, AllGatherLayout(group.world_size, row_bytes=1 << 16, max_rows=512))
        digests = []
        calls = CALLS * ROUNDS[group.world_size]
        for number, (*sizes, tiles, chunk_rows, pullers) in enumerate(calls):
            if random.Random(number).randrange(group.world_size) == group.rank:
                time.sleep(0.03)
            if _has_other_tiles(number, group.rank):
                tiles = replace(tiles, block_m=32, group_m=1)
            outs = run.call(*sizes, tiles, chunk_rows, pullers, seed=number)
            digests.append([out.float().numpy().tobytes() for out in outs])
        empty = sum(sum(call[0][: group.world_size]) == 0 for call in CALLS)
        assert run.workspace.turn == (len(CALLS) - empty) * ROUNDS[group.world_size]
        return digests


def _has_other_tiles(number, rank):
    return (number + rank) % 4 == 3


def _slow_reader(rank, pullers):
    """With one buffer, a fast rank's next call must not overwrite what a slow one still reads."""
    with Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size) as group:
        layout = AllGatherLayout(group.world_size, row_bytes=1 << 14, max_rows=64, buffers=1)
        run = _Run(group, layout)
        columns = (96,) if rank.rank == 0 else (1,)
        for number in range(6):
            run.call((16, 16), columns, 32, torch.float32, TILES, 32, pullers, seed=number)


def _chunk_by_chunk(rank):
    """Rank 1 pushes a chunk only when rank 0 has written the product of the chunk before: a tile
    waits for the chunk that it reads, and for no other."""
    from pyparallel.triton_kernels import all_gather_gemm as module

    with Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size) as group:
        run = _Run(group, AllGatherLayout(2, row_bytes=1 << 16, max_rows=128))
        sizes, chunk_rows = (5, 70), 32
        shared = SymmetricMemory(group, 75 * 8 * 4)  # so that rank 1 sees what rank 0 has written
        out = shared.empty((75, 8))
        out.fill_(float("nan"))
        run.memory.barrier()
        theirs = shared.peer(0, out)
        shards = Shards(sizes, "cpu")

        def push_in_steps(workspace, _shards, _chunk_rows, row_bytes, buffer, _scaled):
            layout = workspace.layout
            for number, (first, end) in enumerate(shards.chunks(1, chunk_rows)):
                time.sleep(0.05)
                part = slice(layout.rows(buffer) + first * row_bytes, None)
                nbytes = (end - first) * row_bytes
                workspace.peers[0][part][:nbytes] = workspace.memory[part][:nbytes]
                word = workspace.word(1, layout.control + 8 * plans.WORD.value)
                workspace.word(0, layout.pushed(1, number)).copy_(word)
                deadline = time.monotonic() + 60
                while theirs[first:end].isnan().any():
                    assert time.monotonic() < deadline, f"no product of chunk {number}"
                    time.sleep(0.01)

        parts = run.rows(sizes, 32, torch.float32, 1)
        weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(2))
        plan = AllGatherPlan(TileConfig(32, 64, 32, programs=1), chunk_rows)
        own = out if group.rank == 0 else torch.empty(75, 8)
        push = push_in_steps if group.rank == 1 else module.push
        with mock.patch.object(module, "push", push):
            all_gather_gemm([own], parts[group.rank], [weight], run.workspace, shards, plan)
        raise_failure(run.workspace.status, "all_gather_matmul", "tp", WAITS)
        full = torch.cat(parts)
        ref = full.double() @ weight.double().T
        assert_within(own, ref, limit_of(full, weight, full @ weight.T))
        run.memory.barrier()


def _eight(rank):
    with Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size) as group:
        run = _Run(group, AllGatherLayout(8, row_bytes=1 << 16, max_rows=64))
        sizes = (3, 0, 5, 1, 8, 2, 4, 7)
        for pullers in (0, 1):
            run.call(sizes, (16,), 32, torch.float16, SMALL_TILES, 8, pullers, seed=pullers)


def _disagreements(rank):
    """Chunks, sizes, K or dtype differ on one rank: every rank is told, none hangs or reads."""
    with Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size) as group:
        texts = []
        fine = ((16, 16, 16), (8,), 32, torch.float32, TILES, 16, 0)
        for position, value in ((5, 8), (0, (16, 15, 16)), (2, 31), (3, torch.float16)):
            for pullers in (0, 1):
                run = _Run(group, AllGatherLayout(3, row_bytes=1 << 14, max_rows=64))
                arguments = [*fine[:6], pullers]
                run.call(*arguments, seed=1)
                if group.rank == 1:
                    arguments[position] = value
                started = time.monotonic()
                with pytest.raises(DeviceWaitError) as caught:
                    run.call(*arguments, seed=2, timeout_s=90.0)
                assert time.monotonic() - started < 80  # found, not waited for
                texts.append((caught.value.failure.state, str(caught.value)))
        return texts


def _absent(rank):
    """Rank 1 makes no second call: rank 0 is told of it, and its third call does not begin."""
    with Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size) as group:
        run = _Run(group, AllGatherLayout(2, row_bytes=1 << 14, max_rows=64))
        texts = []
        for pullers in (0, 1):
            run = _Run(group, AllGatherLayout(2, row_bytes=1 << 14, max_rows=64))
            arguments = ((16, 16), (8,), 32, torch.float32, TILES, 16, pullers)
            run.call(*arguments, seed=1)
            if group.rank == 0:
                for _ in range(2):
                    with pytest.raises(DeviceWaitError) as caught:
                        run.call(*arguments, seed=2, timeout_s=0.2)
                    texts.append(str(caught.value))
            run.memory.barrier()
        return texts


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_many_calls_on_one_workspace(world):
    results = run_ranks(_many_calls, world, env=INTERPRETED, timeout=TIMEOUT)
    for number, call in enumerate(CALLS * ROUNDS[world]):  # the interpreter adds by tiles
        same = [rank for rank in range(world) if not _has_other_tiles(number, rank)]
        assert len({tuple(results[rank][number]) for rank in same}) <= 1, call


@pytest.mark.parametrize("pullers", [0, 1])
def test_a_slow_reader_is_waited_for(pullers):
    run_ranks(_slow_reader, 2, pullers, env=INTERPRETED, timeout=TIMEOUT)


def test_a_tile_waits_for_the_chunk_it_reads():
    run_ranks(_chunk_by_chunk, 2, env=INTERPRETED, timeout=TIMEOUT)


def test_eight_ranks():
    run_ranks(_eight, 8, env=INTERPRETED, timeout=TIMEOUT)


def test_ranks_that_disagree_are_told():
    for texts in run_ranks(_disagreements, 3, env=INTERPRETED, timeout=TIMEOUT):
        assert len(texts) == 8
        for state, text in texts:
            assert text.startswith("all_gather_matmul #2, group tp: wait for rows"), text
            assert state == "mismatched"
            assert "with other sizes, dtype or chunks" in text


def test_an_absent_rank_is_named():
    texts, _ = run_ranks(_absent, 2, env=INTERPRETED, timeout=TIMEOUT)
    assert len(texts) == 4
    for text, wait in zip(texts, ("rows", "rows", "rows to pull", "rows to pull"), strict=True):
        assert text.startswith(f"all_gather_matmul #2, group tp: wait for {wait}: rank 1 absent")
        assert text.endswith("(expected call 2, seen 1)")


def test_what_does_not_fit_is_refused():
    """Before anything is launched, and alike on all ranks: more rows, bytes or flags than there
    are (a flag array for one tile size must not be overrun by a smaller one)."""
    layout = AllGatherLayout(2, row_bytes=4096, max_rows=64, max_chunks=2)
    workspace = Workspace(
        layout,
        0,
        tuple(torch.zeros(layout.nbytes, dtype=torch.uint8) for _ in range(2)),
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(16, dtype=torch.int64),
    )
    for sizes, depth, chunk_rows, text in (
        ((32, 32), 16, 8, "chunks of 8 rows; .* flags for 2 of a shard, so chunks of 16 rows"),
        ((32, 32), 17, 32, "64 rows of 68 bytes; the workspace holds 64 rows and 4096 bytes"),
        ((32, 33), 8, 64, "65 rows of 32 bytes"),
        ((32,), 8, 64, "1 shards for 2 ranks"),
        ((32, 32), 16, 0, "chunks of 0 rows"),
    ):
        with pytest.raises(ValueError, match=text):
            all_gather_gemm(
                [torch.zeros(sum(sizes), 8)],
                torch.zeros(sizes[0], depth),
                [torch.zeros(8, depth)],
                workspace,
                Shards(sizes, "cpu"),
                AllGatherPlan(TILES, chunk_rows),
            )
    assert workspace.turn == 0
