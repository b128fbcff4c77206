"""out= and the ops in place: the same bits as the plain form, and nothing else is written.

Layers of proof: N processes on a CPU; strided outputs inside poisoned memory.
"""

from functools import partial

import pytest
import torch

from tests.launch import run_ranks
from tests.ops.reference import draw
from tests.ops.seats import make_groups


def framed(*shape):
    """A strided tensor inside a larger one of NaN, and the larger one."""
    frame = torch.full([n + 2 for n in reversed(shape)], float("nan"))
    return frame[tuple(slice(1, -1) for _ in shape)].permute(*reversed(range(len(shape)))), frame


def written_only(frame, out, expected):
    assert torch.equal(out, expected)
    inside = torch.zeros_like(frame, dtype=torch.bool)
    inside[tuple(slice(1, -1) for _ in frame.shape)] = True
    assert frame[~inside].isnan().all()


def outputs(rank):
    from pyparallel import ops

    world = rank.world_size
    for group in make_groups(rank).values():
        seed = 5 + rank.rank
        x, w, v = draw(seed, [(3 * world, 4), (5, 4), (2, 4)], torch.float32)
        b, norm = draw(1, [(5,), (4,)], torch.float32)

        out, frame = framed(3 * world, 5)
        got = ops.matmul_all_reduce(x, w, group, b, out=out)
        assert got is out
        written_only(frame, out, ops.matmul_all_reduce(x, w, group, b))

        out, frame = framed(3, 5)
        assert ops.matmul_reduce_scatter(x, w, group, 0, b, out=out) is out
        written_only(frame, out, ops.matmul_reduce_scatter(x, w, group, 0, b))

        outs = [framed(3 * world * world, n) for n in (5, 2)]
        ops.all_gather_matmul(x, [w, v], group, bias=[b, None], out=[o for o, _ in outs])
        for (out, frame), expected in zip(
            outs, ops.all_gather_matmul(x, [w, v], group, bias=[b, None]), strict=True
        ):
            written_only(frame, out, expected)

        # The columns of one buffer are outputs of their own.
        both = torch.empty(3 * world * world, 7)
        ops.all_gather_matmul(x, [w, v], group, out=list(both.split([5, 2], dim=1)))
        assert torch.equal(both, torch.cat(ops.all_gather_matmul(x, [w, v], group), 1))

        # In place on a transpose (a reduction of something else's copy would go unseen).
        y, frame = framed(3 * world, 4)
        y.copy_(x)
        assert ops.all_reduce_(y, group) is y
        written_only(frame, y, ops.all_reduce(x, group))

        y, frame = framed(3 * world, 4)
        h, h_frame = framed(3 * world, 4)
        y.copy_(x)
        h.fill_(0.5)
        normed, total = ops.all_reduce_rms_norm(x, torch.full_like(x, 0.5), norm, 1e-5, group)
        assert ops.all_reduce_rms_norm_(y, h, norm, 1e-5, group) == (y, h)
        written_only(frame, y, normed)
        written_only(h_frame, h, total)

        # One rank's output is wrong: all raise, nothing is written.
        (square,) = draw(3, [(4, 4)], torch.float32)
        kept = square.clone()
        for call, text in wrong(ops, group, square):
            if rank.rank:
                call = partial(ops.matmul_all_reduce, kept, kept, group)
            with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is checked below
                call()
            assert text in str(caught.value), (text, caught.value)
            assert torch.equal(square, kept)
        assert ops.all_reduce(torch.ones(2), group).tolist() == [world] * 2


def wrong(ops, group, square):
    """Calls that cannot be, and what every rank reads."""
    grad = torch.empty(4, 4, requires_grad=True)
    other = square.clone()
    whole = torch.empty(4 * ops.groups.seat_of(group).world_size, 4)
    return [
        (lambda: ops.matmul_all_reduce(square, other, group, out=square),
         "out shares memory with x; pass one of its own"),
        (lambda: ops.matmul_all_reduce(square, other, group, out=torch.empty(3, 4)),
         "out has shape [3, 4]; expected [4, 4]"),
        (lambda: ops.matmul_all_reduce(square, square, group, out=grad), "out requires grad"),
        (lambda: ops.matmul_all_reduce(square, square, group, out=square.double()),
         "out is torch.float64 on cpu; expected torch.float32 on cpu"),
        (lambda: ops.matmul_all_reduce(square, square, group, out=torch.ones(1, 4).expand(4, 4)),
         "out has an element at two places (shape [4, 4], strides [0, 1])"),
        (lambda: ops.all_gather_matmul(square, [other, other], group, out=[whole, whole]),
         "out[0] shares memory with out[1]; pass one of its own"),
        (lambda: ops.all_reduce_rms_norm_(square, square, other[0], 1e-5, group),
         "x shares memory with residual"),
        (lambda: ops.all_reduce_(square[:1].expand(4, 4), group), "x has an element at two places"),
        (lambda: ops.all_gather_matmul(square, square, group, out=[other, grad.detach()]),
         "out has 2 tensors for 1 results"),
        (lambda: ops.all_gather_matmul(square, square, group, out=other, return_gathered=True),
         "out= does not take the gathered x"),
    ]  # fmt: skip


@pytest.mark.parametrize("world", [2, 3])
def test_outputs(world):
    run_ranks(outputs, world)
