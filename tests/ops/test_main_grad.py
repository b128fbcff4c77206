"""Weight gradients in a buffer of the caller's: added, in float32, and never rounded to 16 bits.

Layers of proof: N processes on a CPU, 16-bit operands. The reference is the float64 product of the
same 16-bit factors; the gradient that `.grad` would have got is shown to be out of the bound, so
that a rounded one would be seen. Other gradients are those of the call without a buffer, bit for
bit.
"""

import pytest
import torch

from tests.launch import run_ranks
from tests.ops.reference import EPS32, draw
from tests.ops.seats import make_groups

BF16 = torch.bfloat16
ROWS, K, N = 12, 5, 4


def whole_of(group, shard):
    from pyparallel import ops

    return ops.all_gather(shard.detach(), group)


def calls(ops, group, save):
    """name -> (the op of given leaves, results; dy [rows, N] and x [rows, K] of the gradient)"""

    def gathered(x, w, b, r, n, **options):
        return (ops.all_gather_matmul(x, w, group, bias=b, save_gathered=save, **options),)

    def scattered(x, w, b, r, n, **options):
        return (ops.matmul_reduce_scatter(x, w, group, 0, b, **options),)

    def reduced(x, w, b, r, n, **options):
        return (ops.matmul_all_reduce(x, w, group, b, **options),)

    def normed(x, w, b, r, n, **options):
        return ops.matmul_all_reduce_rms_norm(x, w, r, n, 1e-5, group, b, **options)

    return {
        "all_gather_matmul": (gathered, lambda dys, r: dys[0], lambda x: whole_of(group, x)),
        "matmul_reduce_scatter": (scattered, lambda dys, r: whole_of(group, dys[0]), lambda x: x),
        "matmul_all_reduce": (reduced, lambda dys, r: dys[0], lambda x: x),
        "matmul_all_reduce_rms_norm": (normed, lambda dys, r: r.grad, lambda x: x),
    }


def main_grads(rank):
    from pyparallel import ops

    torch.set_num_threads(1)
    (group,) = make_groups(rank, ("pyparallel",)).values()
    rows = ROWS * rank.world_size
    for save in (True, False):
        for name, (op, dy_of, x_of) in calls(ops, group, save).items():
            shapes = [(rows, K), (N, K), (N,), (rows, N), (N,)]
            values = draw(rank.rank, shapes[:2], BF16) + draw(7, shapes[2:], BF16)
            plain = [v.clone().requires_grad_() for v in values]
            ours = [v.clone().requires_grad_() for v in values]
            expected = op(*plain)
            buffer = torch.ones(N, K)
            ys = op(*ours, main_grad=buffer)
            ups = [draw(3 + i, [tuple(y.shape)], BF16)[0] for i, y in enumerate(ys)]
            for y, e in zip(ys, expected, strict=True):
                assert torch.equal(y, e), name
            torch.autograd.backward(expected, ups)
            torch.autograd.backward(ys, ups)
            for i, (mine, other) in enumerate(zip(ours, plain, strict=True)):
                if i != 1 and other.grad is not None:
                    assert torch.equal(mine.grad, other.grad), (name, i)
            assert ours[1].grad is None
            dy, x = dy_of(ups, ours[3]).double(), x_of(values[0]).double()
            ref = dy.t() @ x + 1
            limit = (dy.abs().t() @ x.abs() + 1) * EPS32 * x.shape[0] ** 0.5
            assert ((buffer.double() - ref).abs() <= limit).all(), name
            assert ((plain[1].grad.double() + 1 - ref).abs() > limit).any(), "the bound bites"
            with torch.no_grad():
                op(*ours, main_grad=buffer)
            op(ours[0], values[1], *ours[2:], main_grad=buffer)[0].sum().backward()
            assert ((buffer.double() - ref).abs() <= limit).all(), "a weight that is not trained"


@pytest.mark.parametrize("world", [1, 3])
def test_main_grad(world):
    run_ranks(main_grads, world)
