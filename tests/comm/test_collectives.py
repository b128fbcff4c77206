"""Every collective x dtype x layout x group size, all ranks checked, bit for bit.

Layers: processes as ranks (tests/launch.py), each case against references computed in one process
(reference.py). Each rank computes every rank's inputs from seeds, so it can check what it got; the
starter compares the ranks' results with one another. Needs no GPU; all of it runs in CI.
"""

import pytest
import torch

from pyparallel.comm import Communicator, premul_sum
from tests.comm.reference import (
    DTYPES,
    LAYOUTS,
    assert_same_bits,
    assert_within,
    data,
    defined_ops,
    digest,
    exact,
    factor_of,
    float64,
    poisoned,
)
from tests.launch import Rank, run_ranks

WORLDS = [1, 2, 3, 4, 8]
SHAPE = (5, 4, 3)
# Beyond what one slot of shared memory holds, and no round number.
LARGE = 1_500_001


def joined(rank: Rank) -> Communicator:
    return Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size, timeout=40)


def named(op: str, rank: int):
    return premul_sum(factor_of(rank)) if op == "premul_sum" else op


def everyone(shape, dtype, world_size, *seed) -> list[torch.Tensor]:
    return [data(shape, dtype, rank, *seed) for rank in range(world_size)]


def all_equal(results: list[list[int]]) -> None:
    assert all(result == results[0] for result in results), "ranks hold different bits"


# --- reductions


def reductions(rank: Rank) -> list[int]:
    """all_reduce and reduce: in place and not, every op, dtype, layout and root."""
    digests = []
    with joined(rank) as comm:
        me, world = comm.rank, comm.world_size
        for dtype in DTYPES:
            for op in defined_ops(dtype):
                inputs = everyone(SHAPE, dtype, world, op)
                expected = exact(inputs, op)
                for layout, lay in LAYOUTS.items():
                    what = (op, dtype, layout, world, me)
                    x = lay(inputs[me])
                    assert comm.all_reduce(x, named(op, me)) is x
                    assert_same_bits(x, expected, what)

                    x, out = lay(inputs[me]), lay(poisoned(SHAPE, dtype))
                    assert comm.all_reduce(x, named(op, me), out=out) is out
                    assert_same_bits(out, expected, what)
                    assert_same_bits(x, inputs[me], what)  # untouched

                    root = (len(layout) + len(op)) % world
                    x = lay(inputs[me])
                    assert comm.reduce(x, named(op, me), root=root) is x
                    assert_same_bits(x, expected if me == root else inputs[me], what)

                    x, out = lay(inputs[me]), lay(poisoned(SHAPE, dtype))
                    comm.reduce(x, named(op, me), root=root, out=out)
                    assert_same_bits(out, expected if me == root else poisoned(SHAPE, dtype), what)
                if dtype.is_floating_point:
                    assert_within(expected, *float64(inputs, op), (op, dtype, world))
                digests.append(digest(expected))
    return digests


def reduced_scattered(rank: Rank) -> list[int]:
    """reduce_scatter: every op, dtype, layout, dim; even, uneven, lists."""
    with joined(rank) as comm:
        me, world = comm.rank, comm.world_size
        sizes = [(r * 2) % 5 for r in range(world)]  # with a zero
        for dtype in DTYPES:
            for op in defined_ops(dtype):
                for dim, layout in enumerate(LAYOUTS):
                    dim, lay = dim % 3 - (dim % 2) * 3, LAYOUTS[layout]  # negative ones too
                    what = ("reduce_scatter", op, dtype, layout, dim, world, me)
                    for given in (None, sizes):
                        shape = list(SHAPE)
                        shape[dim] = sum(sizes) if given else 2 * world
                        inputs = everyone(shape, dtype, world, op, dim)
                        shards = exact(inputs, op).split(given or 2, dim)
                        x = lay(inputs[me])
                        ours = comm.reduce_scatter(x, named(op, me), dim=dim, sizes=given)
                        assert_same_bits(ours, shards[me], what)
                        out = lay(poisoned(shards[me].shape, dtype))
                        got = comm.reduce_scatter(x, named(op, me), dim=dim, sizes=given, out=out)
                        assert got is out
                        assert_same_bits(out, shards[me], what)
                        pieces = [lay(piece) for piece in inputs[me].split(given or 2, dim)]
                        ours = comm.reduce_scatter(pieces, named(op, me))
                        assert_same_bits(ours, shards[me], what)
    return []


@pytest.mark.parametrize("world", WORLDS)
def test_reductions(world):
    all_equal(run_ranks(reductions, world, timeout=100))


@pytest.mark.parametrize("world", WORLDS)
def test_reduce_scatter(world):
    run_ranks(reduced_scattered, world, timeout=100)


# --- moves


def gathered(rank: Rank) -> None:
    """all_gather and gather: dtype, layout, dim; even, uneven, lists; every root."""
    with joined(rank) as comm:
        me, world = comm.rank, comm.world_size
        sizes = [(r * 2 + 1) % 4 for r in range(world)]
        for dtype in DTYPES:
            for number, (layout, lay) in enumerate(LAYOUTS.items()):
                dim, root = number % 3 - 3 * (number % 2), number % world
                for given in (None, sizes):
                    what = ("gather", dtype, layout, dim, given, world, me)
                    inputs = []
                    for r in range(world):
                        shape = list(SHAPE)
                        shape[dim] = given[r] if given else 2
                        inputs.append(data(shape, dtype, r, layout))
                    expected = torch.cat(inputs, dim)
                    x = lay(inputs[me])
                    ours = comm.all_gather(x, dim=dim, sizes=given)
                    assert_same_bits(ours, expected, what)
                    out = lay(poisoned(expected.shape, dtype))
                    assert comm.all_gather(x, dim=dim, sizes=given, out=out) is out
                    assert_same_bits(out, expected, what)
                    outs = [lay(poisoned(t.shape, dtype)) for t in inputs]
                    assert comm.all_gather(x, out=outs) is outs
                    for r in range(world):
                        assert_same_bits(outs[r], inputs[r], (what, r))

                    ours = comm.gather(x, root=root, dim=dim, sizes=given)
                    if me == root:
                        assert_same_bits(ours, expected, what)
                    else:
                        assert ours.numel() == 0
                        assert ours.dim() == 3
                    outs = [lay(poisoned(t.shape, dtype)) for t in inputs]
                    comm.gather(x, root=root, out=outs if me == root else None)
                    for r in range(world if me == root else 0):
                        assert_same_bits(outs[r], inputs[r], (what, r))
        one = comm.all_gather(torch.tensor(float(me)))
        assert one.tolist() == list(range(world))


def sent_from_root(rank: Rank) -> None:
    """broadcast and scatter: dtype, layout, dim, root; even, uneven, lists."""
    with joined(rank) as comm:
        me, world = comm.rank, comm.world_size
        sizes = [(r * 3) % 4 for r in range(world)]
        for dtype in DTYPES:
            for number, (layout, lay) in enumerate(LAYOUTS.items()):
                dim, root = number % 3 - 3 * (number % 2), number % world
                what = ("from root", dtype, layout, dim, world, me)
                value = data(SHAPE, dtype, layout)
                x = lay(value if me == root else poisoned(SHAPE, dtype))
                assert comm.broadcast(x, root) is x
                assert_same_bits(x, value, what)
                for given in (None, sizes):
                    shape = list(SHAPE)
                    shape[dim] = sum(sizes) if given else 2 * world
                    whole = data(shape, dtype, layout)
                    shards = whole.split(given or 2, dim)
                    out = lay(poisoned(shards[me].shape, dtype))
                    x = lay(whole) if me == root else None
                    args = {"root": root, "dim": dim}
                    if me == root:
                        args["sizes"] = given
                    assert comm.scatter(x, out, **args) is out
                    assert_same_bits(out, shards[me], what)
                    out = lay(poisoned(shards[me].shape, dtype))
                    comm.scatter([lay(s) for s in shards] if me == root else None, out, root=root)
                    assert_same_bits(out, shards[me], what)


def exchanged(rank: Rank) -> None:
    """all_to_all: dtype, layout, dim; even, uneven, lists."""
    with joined(rank) as comm:
        me, world = comm.rank, comm.world_size
        table = [[(a + 2 * b) % 4 for b in range(world)] for a in range(world)]  # from a to b
        for dtype in DTYPES:
            for number, (layout, lay) in enumerate(LAYOUTS.items()):
                dim = number % 3 - 3 * (number % 2)
                for uneven in (False, True):
                    what = ("all_to_all", dtype, layout, dim, uneven, world, me)
                    sends = table if uneven else [[2] * world] * world
                    wholes = []
                    for r in range(world):
                        shape = list(SHAPE)
                        shape[dim] = sum(sends[r])
                        wholes.append(data(shape, dtype, r, layout))
                    pieces = [w.split(sends[r], dim) for r, w in enumerate(wholes)]
                    expected = torch.cat([pieces[r][me] for r in range(world)], dim)
                    args = {"dim": dim}
                    if uneven:
                        args["in_sizes"] = sends[me]
                        args["out_sizes"] = [sends[r][me] for r in range(world)]
                    ours = comm.all_to_all(lay(wholes[me]), **args)
                    assert_same_bits(ours, expected, what)
                    out = lay(poisoned(expected.shape, dtype))
                    assert comm.all_to_all(lay(wholes[me]), out=out, **args) is out
                    assert_same_bits(out, expected, what)
                    outs = [lay(poisoned(pieces[r][me].shape, dtype)) for r in range(world)]
                    comm.all_to_all([lay(p) for p in pieces[me]], out=outs)
                    for r in range(world):
                        assert_same_bits(outs[r], pieces[r][me], (what, r))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("cases", [gathered, sent_from_root, exchanged])
def test_moves(cases, world):
    run_ranks(cases, world, timeout=100)


# --- sizes: from nothing to more than fits in a slot


def sized(rank: Rank, count: int) -> list[int]:
    digests = []
    with joined(rank) as comm:
        me, world = comm.rank, comm.world_size
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            inputs = everyone((count,), dtype, world)
            expected = exact(inputs, "sum")
            for _ in range(2):  # the same bits again
                ours = comm.all_reduce(inputs[me].clone())
                assert_same_bits(ours, expected, ("all_reduce", dtype, count))
                digests.append(digest(ours))
            ours = comm.reduce(inputs[me].clone(), root=world - 1)
            if me == world - 1:
                assert_same_bits(ours, expected, ("reduce", dtype, count))
            sizes = [count // world] * (world - 1)
            sizes.append(count - sum(sizes))
            shards = expected.split(sizes)
            mine = comm.reduce_scatter(inputs[me], sizes=sizes)
            assert_same_bits(mine, shards[me], ("reduce_scatter", dtype, count))
            whole = comm.all_gather(mine, sizes=sizes)
            assert_same_bits(whole, expected, ("all_gather", dtype, count))
            x = inputs[0].clone() if me == 0 else poisoned((count,), dtype)
            assert_same_bits(comm.broadcast(x), inputs[0], ("broadcast", dtype, count))
            back = [shard.shape[0] for shard in shards]
            swapped = comm.all_to_all(inputs[me], in_sizes=back, out_sizes=[back[me]] * world)
            want = torch.cat([inputs[r].split(back)[me] for r in range(world)])
            assert_same_bits(swapped, want, ("all_to_all", dtype, count))
            out = poisoned((back[me],), dtype)
            root = world // 2
            comm.scatter(
                inputs[root] if me == root else None,
                out,
                root=root,
                **({"sizes": back} if me == root else {}),
            )
            assert_same_bits(out, inputs[root].split(back)[me], ("scatter", dtype, count))
            whole = comm.gather(out, root=root, sizes=back)
            if me == root:
                assert_same_bits(whole, inputs[root], ("gather", dtype, count))
    return digests


@pytest.mark.parametrize("count", [0, 1, 7, 1023, 40_000, LARGE])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_sizes(world, count):
    all_equal(run_ranks(sized, world, count, timeout=100))


def test_int8_wraps_as_documented():
    """120 + 100 is -36: modulo 2^8, as torch adds the same dtype."""
    assert run_ranks(wrapped, 2) == [-36, -36]


def wrapped(rank: Rank) -> int:
    with joined(rank) as comm:
        x = torch.tensor([120 if comm.rank == 0 else 100], dtype=torch.int8)
        return int(comm.all_reduce(x))


def test_nan_and_infinity_propagate():
    run_ranks(special, 3)


def special(rank: Rank) -> None:
    nan, inf = float("nan"), float("inf")
    with joined(rank) as comm:
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            for bad in range(3):
                x = torch.full((40,), float(comm.rank)).to(dtype)
                x[comm.rank :: 3] = nan if comm.rank == bad else x[0].item()
                for op in ("min", "max", "sum"):
                    ours = comm.all_reduce(x.clone(), op)
                    assert ours[bad::3].isnan().all(), (dtype, op, bad)
                    assert not ours[(bad + 1) % 3 :: 3].isnan().any(), (dtype, op, bad)
            x = torch.tensor([inf if comm.rank == 1 else 1.0]).to(dtype)
            assert comm.all_reduce(x.clone(), "max").item() == inf
            assert comm.all_reduce(x.clone()).item() == inf


def test_a_reference_that_is_off_would_be_caught():
    """The bound bites: one input counted twice is far outside."""
    inputs = everyone((100,), torch.bfloat16, 3)
    good, limit = float64(inputs, "sum")
    bad = exact([*inputs, inputs[1]], "sum")
    with pytest.raises(AssertionError, match="beyond the bound"):
        assert_within(bad, good, limit, "sum")
