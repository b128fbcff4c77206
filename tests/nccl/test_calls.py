"""Every data call through the whole binding, against float64.

Layers: ranks as threads over the stand-in (here); ranks as processes (test_processes.py). No GPU
and no real NCCL: what NCCL computes is NCCL's, what it is asked is ours.
Bounds: the stand-in sums in double and rounds once, so |ours - ref| <= eps/2 |ref| + the subnormal
spacing; moved data are equal bit for bit.
"""

import numpy as np
import pytest

from pyparallel.comm import nccl, premul_sum
from pyparallel.comm.reductions import Reduction
from pyparallel.errors import InvalidArgument
from tests.nccl.harness import Array, Seat, Standin, raw, run_ranks

WORLDS = [1, 2, 3, 4]
OPS = ["sum", "avg", "min", "max", "product"]
PLAIN = ["float64", "float32", "float16", "int8", "uint8", "int32", "uint32", "int64", "uint64"]


def data(rank: int, count: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """Small values, so that integers do not wrap and products stay in range."""
    random = np.random.default_rng([seed, rank, count])
    if np.dtype(dtype).kind in "iu":
        low = 0 if np.dtype(dtype).kind == "u" else -3
        return random.integers(low, 4, count).astype(dtype)
    return random.uniform(-2, 2, count).astype(dtype)


def reference(inputs: list[np.ndarray], op: str) -> np.ndarray:
    wide = np.stack([x.astype(np.float64) for x in inputs])
    if op == "avg":
        return wide.mean(axis=0)
    return {"sum": wide.sum, "product": wide.prod, "min": wide.min, "max": wide.max}[op](axis=0)


def assert_close(ours: np.ndarray, ref: np.ndarray) -> None:
    if ours.dtype.kind in "iu":
        assert np.array_equal(ours, np.trunc(ref).astype(ours.dtype))
        return
    info = np.finfo(ours.dtype)
    limit = info.eps / 2 * np.abs(ref) * 1.001 + float(info.smallest_subnormal)
    assert (np.abs(ours.astype(np.float64) - ref) <= limit).all()


def poison(count: int, dtype: str = "float32") -> np.ndarray:
    return np.full(count, 77, dtype)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("op", OPS)
def test_reductions(standin: Standin, world: int, op: str) -> None:
    """all_reduce, reduce and reduce_scatter of every plain type, in place and not."""

    def body(seat: Seat) -> None:
        for dtype in PLAIN:
            if op == "avg" and np.dtype(dtype).kind in "iu":
                continue
            n = 5
            inputs = [data(r, n * world, dtype) for r in range(world)]
            ref = reference(inputs, op)
            root = world - 1
            mine = inputs[seat.rank]
            out, in_place, reduced, part = (
                poison(n * world, dtype),
                mine.copy(),
                poison(n * world, dtype),
                poison(n, dtype),
            )
            result = Array(out)
            args = {"op": op, "stream": seat.stream}
            assert seat.comm.all_reduce(Array(mine), out=result, **args) is result
            seat.comm.all_reduce(Array(in_place), **args)
            returned = seat.comm.reduce(Array(mine), root, out=Array(reduced), **args)
            assert (returned is None) == (seat.rank != root)
            seat.comm.reduce_scatter(Array(mine), Array(part), **args)
            seat.wait()
            assert_close(out, ref)
            assert_close(in_place, ref)
            assert_close(part, ref[n * seat.rank : n * (seat.rank + 1)])
            if seat.rank == root:
                assert_close(reduced, ref)
            else:
                assert (reduced == 77).all()

    run_ranks(standin, world, body)


# (bits of the pattern, value of a pattern) of the types that numpy lacks
SMALL = {
    "bfloat16": (np.uint16, 8, 7),
    "float8_e4m3fn": (np.uint8, 4, 3),
    "float8_e5m2": (np.uint8, 5, 2),
}


def decode(codes: np.ndarray, exponent: int, mantissa: int) -> np.ndarray:
    codes = codes.astype(np.int64)
    sign = np.where(codes >> (exponent + mantissa), -1.0, 1.0)
    e = (codes >> mantissa) & ((1 << exponent) - 1)
    m = (codes & ((1 << mantissa) - 1)) / (1 << mantissa)
    bias = (1 << (exponent - 1)) - 1
    return sign * np.where(e == 0, m * 2.0 ** (1 - bias), (1 + m) * 2.0 ** (e.astype(float) - bias))


@pytest.mark.parametrize("dtype", SMALL)
def test_small_floats(standin: Standin, dtype: str) -> None:
    bits, exponent, mantissa = SMALL[dtype]
    bias = (1 << (exponent - 1)) - 1
    low, high = (bias - 2) << mantissa, (bias + 2) << mantissa  # 0.25 to 4

    def body(seat: Seat) -> None:
        codes = [
            np.random.default_rng(r).integers(low, high, 64).astype(bits) for r in range(seat.size)
        ]
        ref = sum(decode(c, exponent, mantissa) for c in codes)
        mine = codes[seat.rank].copy()
        seat.comm.all_reduce(raw(mine, dtype), stream=seat.stream)
        seat.wait()
        ours = decode(mine, exponent, mantissa)
        assert (np.abs(ours - ref) <= 2.0 ** -(mantissa + 1) * np.abs(ref)).all()
        assert not np.array_equal(ours, ref + 2.0**-mantissa * np.abs(ref))  # the bound bites

    run_ranks(standin, 3, body)


@pytest.mark.parametrize("world", WORLDS)
def test_premul_sum(standin: Standin, world: int) -> None:
    """Each rank's own factor. Product and sum are rounded once each."""

    def body(seat: Seat) -> None:
        for dtype in ("float64", "float32", "float16"):
            inputs = [data(r, 9, dtype) for r in range(world)]
            factors = [0.5 + r for r in range(world)]
            scaled = [f * x.astype(np.float64) for f, x in zip(factors, inputs, strict=True)]
            mine = inputs[seat.rank].copy()
            seat.comm.all_reduce(Array(mine), premul_sum(factors[seat.rank]), stream=seat.stream)
            seat.wait()
            limit = np.finfo(dtype).eps * (np.abs(scaled).sum(axis=0) + 1e-6)
            assert (np.abs(mine.astype(np.float64) - sum(scaled)) <= limit).all()

    run_ranks(standin, world, body)
    calls = standin.log()
    # Each op is destroyed by the next call, or at the end.
    assert calls.count("RedOpCreatePreMulSum") == calls.count("RedOpDestroy") == 3 * world


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_factor_is_rounded_to_nearest_even(standin: Standin, dtype: str) -> None:
    """The factor in the array's type, against the table of the type's values."""
    bits, exponent, mantissa = SMALL.get(dtype, (np.uint16, 5, 10))
    finite_only = dtype == "float8_e4m3fn"
    top = (1 << (exponent + mantissa)) - 1 if finite_only else ((1 << exponent) - 1) << mantissa
    table = decode(np.arange(top), exponent, mantissa)
    one = bits(((1 << (exponent - 1)) - 1) << mantissa)
    random = np.random.default_rng(3)
    picks = random.integers(1, top, 40)
    factors = [
        *table[picks],
        *((table[picks] + table[picks - 1]) / 2),  # halfway: to the even code
        *(table[picks] * random.uniform(0.97, 1.03, 40)),
    ]

    def body(seat: Seat) -> None:
        for factor in factors:
            value = np.array([one])
            seat.comm.all_reduce(raw(value, dtype), premul_sum(float(factor)), stream=seat.stream)
            seat.wait()
            distance = np.abs(table - factor)
            nearest = np.flatnonzero(distance == distance.min())
            expected = next((c for c in nearest if c % 2 == 0), nearest[0])
            if factor <= table[-1]:
                assert value[0] == expected, (factor, value[0], expected)

    run_ranks(standin, 1, body)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("version", [23203, 22703])
def test_movement(libraries, world: int, version: int) -> None:
    """Equal and uneven. Before 2.28.3 all_to_all, gather and scatter are grouped sends."""
    standin = Standin(libraries.build(version), libraries.cuda)
    standin.log()
    sizes = [(3 * r + 2) % 5 for r in range(world)]  # a zero among them from three ranks on

    def body(seat: Seat) -> None:
        comm, me, stream = seat.comm, seat.rank, {"stream": seat.stream}
        n, root = 7, world // 2
        inputs = [data(r, n, seed=1) for r in range(world)]
        wide = [data(r, n * world, seed=2) for r in range(world)]
        uneven = [data(r, sizes[r], seed=3) for r in range(world)]

        x = inputs[me].copy()
        comm.broadcast(Array(x), root, **stream)
        y = poison(n)
        comm.broadcast(Array(inputs[me]), root, out=Array(y), **stream)
        gathered = poison(n * world)
        comm.all_gather(Array(inputs[me]), Array(gathered), **stream)
        gathered_uneven = poison(sum(sizes))
        comm.all_gather(Array(uneven[me]), Array(gathered_uneven), sizes=sizes, **stream)
        swapped = poison(n * world)
        comm.all_to_all(Array(wide[me]), Array(swapped), **stream)
        to_root, to_root_uneven = poison(n * world), poison(sum(sizes))
        comm.gather(Array(inputs[me]), root, Array(to_root), **stream)
        comm.gather(Array(uneven[me]), root, Array(to_root_uneven), sizes=sizes, **stream)
        part, part_uneven = poison(n), poison(sizes[me])
        comm.scatter(Array(wide[me]), root, Array(part), **stream)
        whole = np.concatenate(uneven)
        comm.scatter(
            Array(whole) if me == root else None, root, Array(part_uneven), sizes=sizes, **stream
        )
        seat.wait()

        assert np.array_equal(x, inputs[root])
        assert np.array_equal(y, inputs[root])
        assert np.array_equal(gathered, np.concatenate(inputs))
        assert np.array_equal(gathered_uneven, np.concatenate(uneven))
        mine = slice(n * me, n * (me + 1))
        assert np.array_equal(swapped, np.concatenate([w[mine] for w in wide]))
        assert np.array_equal(part, wide[root][mine])
        assert np.array_equal(part_uneven, uneven[me])
        if me == root:
            assert np.array_equal(to_root, np.concatenate(inputs))
            assert np.array_equal(to_root_uneven, np.concatenate(uneven))
        else:
            assert (to_root == 77).all()
            assert (to_root_uneven == 77).all()

    run_ranks(standin, world, body)
    assert ("AlltoAll" in standin.log()) == (version == 23203)


@pytest.mark.parametrize("world", WORLDS)
def test_uneven(standin: Standin, world: int) -> None:
    """reduce_scatter and all_to_all with a size of its own for each rank, or pair of ranks."""
    sizes = [(2 * r + 3) % 4 for r in range(world)]

    def pair(source: int, target: int) -> int:
        return (source + 2 * target) % 4

    def body(seat: Seat) -> None:
        comm, me = seat.comm, seat.rank
        wide = [data(r, sum(sizes), "float64") for r in range(world)]
        part = poison(sizes[me], "float64")
        comm.reduce_scatter(Array(wide[me]), Array(part), sizes=sizes, stream=seat.stream)
        in_sizes = [pair(me, r) for r in range(world)]
        out_sizes = [pair(r, me) for r in range(world)]
        blocks = [
            [data(10 * s + t, pair(s, t), seed=5) for t in range(world)] for s in range(world)
        ]
        out, mine = poison(sum(out_sizes)), np.concatenate(blocks[me])
        comm.all_to_all(
            Array(mine),
            Array(out),
            in_sizes=in_sizes,
            out_sizes=out_sizes,
            stream=seat.stream,
        )
        seat.wait()
        start = sum(sizes[:me])
        assert_close(part, np.sum(wide, axis=0)[start : start + sizes[me]])
        assert np.array_equal(out, np.concatenate([blocks[r][me] for r in range(world)]))

    run_ranks(standin, world, body)


def test_in_place_parts(standin: Standin) -> None:
    """The smaller array as this rank's part of the larger one."""

    def body(seat: Seat) -> None:
        comm, me, n = seat.comm, seat.rank, 4
        mine = slice(n * me, n * (me + 1))
        wide = [data(r, n * seat.size) for r in range(seat.size)]
        scattered = wide[me].copy()
        comm.reduce_scatter(Array(scattered), Array(scattered[mine]), stream=seat.stream)
        gathered = wide[me].copy()
        comm.all_gather(Array(gathered[mine]), Array(gathered), stream=seat.stream)
        seat.wait()
        assert_close(scattered[mine], np.sum([w.astype(np.float64) for w in wide], axis=0)[mine])
        own = [w[n * r : n * (r + 1)] for r, w in enumerate(wide)]
        assert np.array_equal(gathered, np.concatenate(own))

    run_ranks(standin, 3, body)


def test_send_recv_in_both_directions(standin: Standin) -> None:
    """More bytes than the stand-in's mailboxes hold: outside a group this would wait for ever."""
    count = 5000

    def body(seat: Seat) -> None:
        right, left = (seat.rank + 1) % seat.size, (seat.rank - 1) % seat.size
        mine, out = data(seat.rank, count), poison(count)
        with nccl.group():
            seat.comm.send(Array(mine), right, stream=seat.stream)
            seat.comm.recv(Array(out), left, stream=seat.stream)
        seat.wait()
        assert np.array_equal(out, data(left, count))

    for world in (1, 2, 3):
        run_ranks(standin, world, body)


def test_zero_elements(standin: Standin) -> None:
    def body(seat: Seat) -> None:
        empty = Array(np.empty(0, np.float32))
        args = {"stream": seat.stream}
        seat.comm.all_reduce(empty, **args)
        seat.comm.all_gather(empty, Array(np.empty(0, np.float32)), **args)
        seat.comm.reduce_scatter(empty, Array(np.empty(0, np.float32)), **args)
        seat.comm.all_to_all(empty, Array(np.empty(0, np.float32)), **args)
        seat.comm.all_gather(empty, Array(np.empty(0, np.float32)), sizes=[0] * seat.size, **args)

    run_ranks(standin, 2, body)


def test_types_that_are_only_moved(standin: Standin) -> None:
    """As bytes; bool is reduced as OR and AND."""

    def body(seat: Seat) -> None:
        other = (seat.rank + 1) % 2
        for dtype in (np.int16, np.uint16, np.complex64, np.complex128, np.bool_):
            values = [(np.arange(5) * (r + 1) % 3).astype(dtype) for r in range(2)]
            out = np.empty(5, dtype)
            with nccl.group():
                seat.comm.send(Array(values[seat.rank]), other, stream=seat.stream)
                seat.comm.recv(Array(out), other, stream=seat.stream)
            seat.wait()
            assert np.array_equal(out, values[other])
        with pytest.raises(InvalidArgument, match="sum of int16: NCCL moves this type"):
            seat.comm.all_reduce(Array(np.zeros(3, np.int16)), stream=seat.stream)
        bits = [np.array([0, 0, 1, 1], bool), np.array([0, 1, 0, 1], bool)]
        for op, expected in (
            ("sum", [0, 1, 1, 1]),
            ("product", [0, 0, 0, 1]),
            ("max", [0, 1, 1, 1]),
        ):
            x = bits[seat.rank].copy()
            seat.comm.all_reduce(Array(x), op, stream=seat.stream)
            seat.wait()
            assert x.astype(int).tolist() == expected
        with pytest.raises(InvalidArgument, match="avg is not defined on bool"):
            seat.comm.all_reduce(Array(bits[0].copy()), "avg", stream=seat.stream)

    run_ranks(standin, 2, body)


def test_unknown_reductions(standin: Standin) -> None:
    def body(seat: Seat) -> None:
        x = Array(np.zeros(4, np.int32))
        with pytest.raises(InvalidArgument, match="no reduction band on int32; it has sum"):
            seat.comm.all_reduce(x, "band", stream=seat.stream)
        with pytest.raises(InvalidArgument, match="reduction 'mean'; known are sum"):
            seat.comm.all_reduce(x, "mean", stream=seat.stream)
        with pytest.raises(InvalidArgument, match="floating types, not int32"):
            seat.comm.all_reduce(x, premul_sum(2.0), stream=seat.stream)
        with pytest.raises(InvalidArgument, match="reduction"):
            seat.comm.all_reduce(x, Reduction("sum", 99), stream=seat.stream)

    run_ranks(standin, 1, body)
