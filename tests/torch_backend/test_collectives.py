"""Every collective of torch.distributed on the backend, against references and against gloo.

Layers: processes as ranks (tests/launch.py); reductions against the documented arithmetic of
tests/comm/reference.py, bit for bit (every rank computes every rank's inputs from seeds); movement
of data against gloo, which must be equal. All of it runs in CI.
"""

import pytest
import torch
import torch.distributed as dist

from tests.comm.reference import (
    DTYPES,
    LAYOUTS,
    assert_same_bits,
    data,
    defined_ops,
    exact,
    factor_of,
    poisoned,
)
from tests.launch import Rank, run_ranks
from tests.torch_backend.groups import gloo_beside, process_group

WORLDS = [1, 2, 3]
SHAPE = (4, 3)

OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


def named(op: str, rank: int) -> dist.ReduceOp:
    return dist._make_nccl_premul_sum(factor_of(rank)) if op == "premul_sum" else OPS[op]


def everyone(shape, dtype, world, *seed) -> list[torch.Tensor]:
    return [data(shape, dtype, rank, *seed) for rank in range(world)]


# --- reductions


def reductions(rank: Rank) -> None:
    me, world = rank.rank, rank.world_size
    with process_group(rank):
        for dtype in DTYPES:
            for op in defined_ops(dtype):
                inputs = everyone(SHAPE, dtype, world, op)
                expected = exact(inputs, op)
                for layout, lay in LAYOUTS.items():
                    what = (op, dtype, layout)
                    x = lay(inputs[me])
                    dist.all_reduce(x, named(op, me))
                    assert_same_bits(x, expected, ("all_reduce", *what))
                    root = world - 1
                    x = lay(inputs[me])
                    dist.reduce(x, root, named(op, me))
                    assert_same_bits(x, expected if me == root else inputs[me], ("reduce", *what))

                shards = everyone((world, 5, 2), dtype, world, op, "shards")
                mine = exact(shards, op)[me]
                out = poisoned((5, 2), dtype)
                dist.reduce_scatter_tensor(out, shards[me].reshape(-1, 2), named(op, me))
                assert_same_bits(out, mine, ("reduce_scatter_tensor", op, dtype))
                out = poisoned((2, 5), dtype).t()
                dist.reduce_scatter(
                    out, [x.t().contiguous().t() for x in shards[me]], named(op, me)
                )
                assert_same_bits(out, mine, ("reduce_scatter", op, dtype))


@pytest.mark.parametrize("world", WORLDS)
def test_reductions_follow_the_documented_arithmetic(world):
    run_ranks(reductions, world)


def coalesced_reductions(rank: Rank) -> None:
    me, world = rank.rank, rank.world_size
    with process_group(rank):
        for sizes in ([3, 0, 7], [200_000, 1, 130_000]):  # packed into one call, and not
            everything = [everyone((n,), torch.bfloat16, world, n) for n in sizes]
            mine = [inputs[me].clone() for inputs in everything]
            dist.all_reduce_coalesced(mine)
            for x, inputs in zip(mine, everything, strict=True):
                assert_same_bits(x, exact(inputs, "sum"), ("all_reduce_coalesced", x.shape))
        everything = [everyone((world * n, 3), torch.float32, world, n) for n in (1, 4)]
        with dist._coalescing_manager(async_ops=True) as manager:
            outs = []
            for inputs in everything:
                outs.append(poisoned((inputs[me].shape[0] // world, 3), torch.float32))
                dist.reduce_scatter_tensor(outs[-1], inputs[me])
        manager.wait()
        for out, inputs in zip(outs, everything, strict=True):
            assert_same_bits(out, exact(inputs, "sum").chunk(world)[me], "reduce_scatter coalesced")


def test_coalesced_reductions():
    run_ranks(coalesced_reductions, 2)


def uneven_reduce_scatter(rank: Rank) -> None:
    me, world = rank.rank, rank.world_size
    with process_group(rank):
        rows = [5, 3, 0][:world]
        shards = [everyone((n, 2), torch.float32, world, n) for n in rows]  # [shard][rank]
        out = poisoned((rows[me], 2), torch.float32)
        dist.reduce_scatter(out, [shard[me] for shard in shards])
        assert_same_bits(out, exact(shards[me], "sum"), "uneven reduce_scatter")


def test_uneven_reduce_scatter():
    run_ranks(uneven_reduce_scatter, 3)


def complex_numbers(rank: Rank) -> None:
    me, world = rank.rank, rank.world_size
    with process_group(rank):
        for dtype, real in ((torch.complex64, torch.float32), (torch.complex128, torch.float64)):
            inputs = everyone((6, 2), real, world)
            expected = torch.view_as_complex(exact(inputs, "sum")).to(dtype)
            x = torch.view_as_complex(inputs[me].clone())
            dist.all_reduce(x)
            assert torch.equal(x, expected)
            lazily = torch.view_as_complex(inputs[me].clone()).conj()
            options = dist.AllreduceOptions()
            backend = dist.group.WORLD._get_backend(torch.device("cpu"))
            backend.allreduce([lazily], options).wait()
            assert torch.equal(lazily, expected.conj())
            options.reduceOp = dist.ReduceOp.PRODUCT
            with pytest.raises(ValueError, match="product"):
                backend.allreduce([x], options)


def test_complex_numbers_are_summed_as_pairs_and_never_multiplied():
    run_ranks(complex_numbers, 2)


def sparse(rank: Rank) -> None:
    me, world = rank.rank, rank.world_size
    with process_group(rank):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            inputs = []
            for r in range(world):
                cells = torch.tensor([[r, 3, r, 0], [1, 2, 1, 0]])  # one twice, some shared by all
                values = data((4, 2), dtype, r)
                if not dtype.is_floating_point:
                    values = values // 8
                inputs.append(torch.sparse_coo_tensor(cells, values, (4, 3, 2)).coalesce())
            x = inputs[me].clone()
            dist.all_reduce(x)
            dense = exact([i.to_dense() for i in inputs], "sum")
            assert_same_bits(x.to_dense(), dense, ("sparse", dtype))
            assert x.is_coalesced()
        other = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (5 + me,))
        with pytest.raises(ValueError, match="another shape"):
            dist.all_reduce(other)
        dist.barrier()  # the group goes on


def test_sparse_all_reduce():
    run_ranks(sparse, 2)


# --- movement


def moves(rank: Rank) -> None:
    """Each call on both backends with the same inputs; outputs poisoned first."""
    with process_group(rank):
        gloo = gloo_beside()
        for dtype in (*DTYPES, torch.complex64, torch.float8_e4m3fn, torch.uint16):
            known = dtype in DTYPES
            shape = (3, 16)
            mine = data(shape, dtype if known else torch.uint8, rank.rank)
            whole = data((2 * rank.world_size, 16), mine.dtype, rank.rank, "whole")
            # gloo knows neither all types nor all layouts: it gets contiguous bytes.
            expected = move_all(mine, whole, lambda x: x.contiguous().view(torch.uint8), rank, gloo)
            for layout, lay in LAYOUTS.items():
                place = lay if known else lambda x, dtype=dtype: x.clone().view(dtype)
                for i, (x, y) in enumerate(
                    zip(move_all(mine, whole, place, rank, None), expected, strict=True)
                ):
                    assert_same_bits(x, y, ("output", i, dtype, layout))


def move_all(mine, whole, place, rank: Rank, group) -> list[torch.Tensor]:
    """The outputs of all calls as bytes; `place` puts a tensor where and as what it shall be."""
    me, world = rank.rank, rank.world_size

    def out(like):
        return place(poisoned(like.shape, like.dtype))

    got = [place(mine)]
    dist.broadcast(got[0], world - 1, group=group)
    parts = [out(mine) for _ in range(world)]
    dist.all_gather(parts, place(mine), group=group)
    got += parts
    got.append(out(torch.cat([mine] * world)))
    dist.all_gather_into_tensor(got[-1], place(mine), group=group)
    parts = [out(mine) for _ in range(world)] if me == 0 else []
    dist.gather(place(mine), parts or None, 0, group=group)
    got += parts
    chunks = [place(x) for x in whole.chunk(world)]
    got.append(out(whole[:2]))
    dist.scatter(got[-1], chunks if me == 0 else None, 0, group=group)
    got.append(out(whole))
    dist.all_to_all_single(got[-1], place(whole), group=group)
    return [x.contiguous().view(torch.uint8) for x in got]


@pytest.mark.parametrize("world", WORLDS)
def test_movement_equals_gloo(world):
    run_ranks(moves, world)


def uneven_moves(rank: Rank) -> None:
    me, world = rank.rank, rank.world_size
    with process_group(rank):
        rows = [5, 3, 0][:world]
        blocks = [data((n, 2), torch.float32, r) for r, n in enumerate(rows)]
        out = [poisoned((n, 2), torch.float32) for n in rows]
        dist.all_gather(out, blocks[me])
        for x, expected in zip(out, blocks, strict=True):
            assert_same_bits(x, expected, "uneven all_gather")

        sent = [[(s + 2 * d) % 4 for d in range(world)] for s in range(world)]  # zeros among them
        pieces = [
            [data((n, 2), torch.float32, s, d) for d, n in enumerate(sent[s])] for s in range(world)
        ]
        out = poisoned((sum(sent[s][me] for s in range(world)), 2), torch.float32)
        dist.all_to_all_single(
            out, torch.cat(pieces[me]), [sent[s][me] for s in range(world)], sent[me]
        )
        assert_same_bits(out, torch.cat([pieces[s][me] for s in range(world)]), "uneven all_to_all")
        parts = [poisoned((sent[s][me], 2), torch.float32) for s in range(world)]
        dist.all_to_all(parts, pieces[me])
        for s in range(world):
            assert_same_bits(parts[s], pieces[s][me], "all_to_all")


def test_uneven_moves():
    run_ranks(uneven_moves, 3)


def in_place(rank: Rank) -> None:
    """What FSDP does: the shard is a piece of the gathered buffer."""
    me, world = rank.rank, rank.world_size
    with process_group(rank):
        for n in (4, 100_000):
            inputs = everyone((n,), torch.float32, world)
            whole = poisoned((n * world,), torch.float32)
            whole.chunk(world)[me].copy_(inputs[me])
            dist.all_gather_into_tensor(whole, whole.chunk(world)[me])
            assert_same_bits(whole, torch.cat(inputs), "all_gather in place")
            inputs = everyone((n * world,), torch.float32, world)
            whole = inputs[me].clone()
            dist.reduce_scatter_tensor(whole.chunk(world)[me], whole)
            expected = exact(inputs, "sum").chunk(world)[me]
            assert_same_bits(whole.chunk(world)[me], expected, "reduce_scatter in place")


def test_shards_inside_the_whole_buffer():
    run_ranks(in_place, 3)


def overlapping(rank: Rank) -> None:
    """Inputs that lie in the output, but not where this rank's part goes."""
    with process_group(rank):
        me, world = rank.rank, rank.world_size
        for n in (4, 50_000):
            shards = [torch.arange(float(n)) + 1000 * r for r in range(world)]
            out = torch.zeros(world * n)
            out[1 : n + 1] = shards[me]
            dist.all_gather_into_tensor(out, out[1 : n + 1])
            assert torch.equal(out, torch.cat(shards)), ("all_gather_into_tensor", n)

            outs = [torch.zeros(n) for _ in range(world)]
            outs[(me + 1) % world].copy_(shards[me])
            dist.all_gather(outs, outs[(me + 1) % world])
            assert all(map(torch.equal, outs, shards)), ("all_gather", n)

            whole = torch.arange(float(world * n)) + me
            sums = (torch.arange(float(world * n)) * world + sum(range(world))).split(n)[me]
            start = min(me * n + 1, (world - 1) * n)
            dist.reduce_scatter_tensor(whole[start : start + n], whole)
            assert torch.equal(whole[start : start + n], sums), ("reduce_scatter_tensor", n)

            # Rank r gets r + 1 parts of everybody: pieces go out and come in at other places.
            sent = [(r + 1) * n for r in range(world)]
            received = [(me + 1) * n] * world
            space = torch.zeros(max(sum(sent), sum(received)))
            space[: sum(sent)] = torch.arange(float(sum(sent))) + 1000 * me
            dist.all_to_all_single(space[: sum(received)], space[: sum(sent)], received, sent)
            expected = [
                (torch.arange(float(sum(sent))) + 1000 * r).split(sent)[me] for r in range(world)
            ]
            assert torch.equal(space[: sum(received)], torch.cat(expected)), ("all_to_all", n)


def test_inputs_that_overlap_the_output_elsewhere():
    run_ranks(overlapping, 3)


def coalesced_moves(rank: Rank) -> None:
    me, world = rank.rank, rank.world_size
    with process_group(rank) as group:
        inputs = [everyone((n, 2), torch.float32, world) for n in (3, 0, 5)]
        lists = [[poisoned(x[r].shape, torch.float32) for x in inputs] for r in range(world)]
        backend = group._get_backend(torch.device("cpu"))
        backend.allgather_coalesced(lists, [x[me] for x in inputs]).wait()
        for r in range(world):
            for x, got in zip(inputs, lists[r], strict=True):
                assert_same_bits(got, x[r], "allgather_coalesced")
        with dist._coalescing_manager():
            outs = [poisoned((len(x[me]) * world, 2), torch.float32) for x in inputs]
            for out, x in zip(outs, inputs, strict=True):
                dist.all_gather_into_tensor(out, x[me])
        for out, x in zip(outs, inputs, strict=True):
            assert_same_bits(out, torch.cat(x), "all_gather_into_tensor coalesced")


def test_coalesced_moves():
    run_ranks(coalesced_moves, 2)


def objects(rank: Rank) -> None:
    me, world = rank.rank, rank.world_size
    with process_group(rank):
        got = [None] * world
        dist.all_gather_object(got, {"rank": me})
        assert got == [{"rank": r} for r in range(world)]
        box = [f"from {me}"]
        dist.broadcast_object_list(box, src=1)
        assert box == ["from 1"]
        received: list[object] = [None]
        dist.scatter_object_list(received, [f"to {r}" for r in range(world)] if me == 0 else None)
        assert received == [f"to {me}"]


def test_objects():
    run_ranks(objects, 2)
