"""Every op, dtype and algorithm of the CPU within the derived bound, on all ranks.

Layers of proof: N processes on a CPU, each rank against float64 over the whole tensors (bound in
reference.py); what is alike on all ranks has the same bits there; a control that a bias added once
per rank would be caught. One group serves all calls, so its workspace is used with M that goes up
and down.
"""

from itertools import accumulate

import pytest
import torch

from tests.launch import run_ranks
from tests.ops.reference import assert_within, draw, limit_of, sum_of

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ALGORITHMS = ("plain", "symmetric", "chunked", None)
# rows (odd, none, few, more than a chunk), columns, inner size, rows of a second dim (1: 2-D x)
SHAPES = [(7, 33, 17, 1), (0, 5, 8, 1), (64, 130, 64, 1), (13, 576, 48, 3), (1, 16, 1, 1),
          (40, 8192, 8, 1), (5, 1, 3, 2), (12, 8, 0, 1), (3, 12, 8191, 1)]  # fmt: skip


def sizes_of(rows, world):
    """Shards of so many rows: the first rank has most, the second none."""
    sizes = [0] * world
    sizes[0] = rows - rows // 3 if world > 1 else rows
    sizes[-1] += rows - sizes[0]
    return sizes


def with_inner(x, inner):
    return x if inner == 1 else x.unflatten(0, (-1, inner))


def check(rank, group, number, shape, dtype, algorithm):
    from pyparallel import ops

    world, me = rank.world_size, rank.rank
    m, n, k, inner = shape
    seed = 10 * number
    xs = draw(seed, [(m * inner, k)] * world, dtype)
    ws = draw(seed + 1, [(n, k)] * world, dtype)
    (bias,) = draw(seed + 2, [(n,)], dtype)
    residual, norm = draw(seed + 3, [(m * inner, n), (n,)], dtype)
    a, b = torch.cat(xs, 1), torch.cat(ws, 1)
    ref = a.double() @ b.double().t()
    stock = sum_of([x @ w.t() for x, w in zip(xs, ws, strict=True)])
    biased = ref + bias.double()
    limit = limit_of(stock + bias, biased, a, b)
    what = f"{shape} {dtype} {algorithm}"

    x, w = with_inner(xs[me], inner), ws[me]
    strided = torch.stack([w, w], 1)[:, 0]  # of twice the row stride
    y = ops.matmul_all_reduce(x, strided, group, bias, algorithm=algorithm)
    assert_within(y.flatten(0, -2), biased, limit, f"all_reduce {what}")
    if n > 100 and m and k and world > 1:
        wrong = (biased + (world - 1) * bias.double()).to(dtype)
        with pytest.raises(AssertionError, match="of what is allowed"):
            assert_within(wrong, biased, limit, "a bias once per rank")

    sizes = sizes_of(m, world)
    start = [0, *accumulate(sizes)][me]
    own = slice(start * inner, (start + sizes[me]) * inner)
    # The other layout in memory; in it torch rounds other elements of 16-bit parts.
    turned = w.t().contiguous().t() if dtype.itemsize > 2 else w
    shard = ops.matmul_reduce_scatter(x, turned, group, 0, bias, sizes, algorithm=algorithm)
    assert shard.is_contiguous()
    assert_within(shard.flatten(0, -2), biased[own], limit[own], f"reduce_scatter {what}")

    whole = xs[0]
    ref_own = whole.double() @ w.double().t()
    stock_own = whole @ w.t() + bias
    limit_own = limit_of(stock_own, ref_own + bias.double(), whole, w)
    mine = torch.stack([with_inner(whole, inner)] * 2, -1)[start : start + sizes[me], ..., 0]
    (p, q), gathered = ops.all_gather_matmul(
        mine, [w, w[: n // 2]], group, 0, [bias, None], sizes, True, algorithm=algorithm
    )
    assert torch.equal(gathered.flatten(0, -2), whole), f"all_gather {what}"
    assert_within(p.flatten(0, -2), ref_own + bias.double(), limit_own, f"all_gather {what}")
    limit_half = limit_of(whole @ w[: n // 2].t(), ref_own[:, : n // 2], whole, w[: n // 2])
    assert_within(q.flatten(0, -2), ref_own[:, : n // 2], limit_half, f"all_gather {what}")

    residual = with_inner(residual, inner)
    normed, h = ops.matmul_all_reduce_rms_norm(
        x, w, residual, norm, 1e-5, group, bias, algorithm=algorithm
    )
    h_ref = biased + residual.flatten(0, -2).double()
    h_stock = stock + bias + residual.flatten(0, -2)
    assert_within(h.flatten(0, -2), h_ref, limit_of(h_stock, h_ref, a, b), f"h {what}")
    of_h = torch.nn.functional.rms_norm(h.double(), (n,), norm.double(), 1e-5)
    of_stock = torch.nn.functional.rms_norm(h, (n,), norm, 1e-5)
    eps = torch.finfo(dtype).eps
    allowed = (of_stock.double() - of_h).abs() + 2 * eps * of_h.abs() + 1e-300
    assert_within(normed, of_h, allowed, f"norm {what}")
    separate, h2 = ops.all_reduce_rms_norm(x @ w.t(), residual + bias, norm, 1e-5, group)
    assert h2.shape == separate.shape == h.shape
    return [t.contiguous().view(torch.uint8).numpy().tobytes() for t in (y, gathered, normed, h)]


def all_shapes(rank):
    from pyparallel.comm import Communicator
    from pyparallel.ops.groups import seat_of

    torch.set_num_threads(1)
    with Communicator.from_store(rank.store(), rank.rank, rank.world_size) as group:
        bits = []
        for number, shape in enumerate(SHAPES):
            for dtype in DTYPES:
                for algorithm in ALGORITHMS[: None if dtype is torch.float32 else -1]:
                    bits.append(check(rank, group, number, shape, dtype, algorithm))
        path = seat_of(group).engine.host_path
        assert path.nbytes > 2 << 20, "it has grown"
        return bits


@pytest.mark.parametrize("world", [2, 3, 4])
def test_all_shapes(world):
    bits = run_ranks(all_shapes, world)
    assert all(of_rank == bits[0] for of_rank in bits[1:]), "ranks differ in some bit"


def alone(rank):
    from pyparallel import ops
    from pyparallel.comm import Communicator

    with Communicator.from_store(rank.store(), 0, 1) as group:
        for algorithm in ALGORITHMS:
            x, w, b = draw(1, [(3, 4), (5, 4), (5,)], torch.float32)
            y = torch.nn.functional.linear(x, w, b)
            for op in (ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.matmul_all_reduce):
                torch.testing.assert_close(op(x, w, group, bias=b, algorithm=algorithm), y)
        with pytest.raises(ValueError, match=r"algorithm is 'fast'; .* has plain, symmetric"):
            ops.matmul_all_reduce(x, w, group, algorithm="fast")
        with pytest.raises(ValueError, match=r"weight has shape \[5, 3\]"):
            ops.matmul_all_reduce(x, w[:, :3], group)


def test_one_rank():
    run_ranks(alone, 1)
