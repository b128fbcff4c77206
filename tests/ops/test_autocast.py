"""Ops under torch.autocast, and with forward-mode tangents.

Layers of proof: two processes on a CPU. Under autocast each product has the bits, and the
gradients, of one whose operands the caller has cast, whatever algorithm runs; a tangent, which no
op carries on, is an error and not a derivative of zero.
"""

import pytest
import torch
from torch.autograd import forward_ad

from tests.launch import run_ranks
from tests.ops.seats import make_groups

BF16 = torch.bfloat16


def products(ops, group, algorithm):
    """name -> (op of its operands, their shapes: x, weights, biases...)."""
    named = {"algorithm": algorithm}
    return {
        "all_gather_matmul": (
            lambda x, w, v, b: ops.all_gather_matmul(x, [w, v], group, bias=[b, None], **named),
            [(4, 3), (5, 3), (2, 3), (5,)],
        ),
        "matmul_reduce_scatter": (
            lambda x, w, b: ops.matmul_reduce_scatter(x, w, group, bias=b, **named),
            [(4, 3), (5, 3), (5,)],
        ),
        "matmul_all_reduce": (
            lambda x, w, b: ops.matmul_all_reduce(x, w, group, b, **named),
            [(4, 3), (5, 3), (5,)],
        ),
        "matmul_all_reduce_rms_norm": (
            lambda x, w, r, n: ops.matmul_all_reduce_rms_norm(x, w, r, n, 1e-5, group, **named),
            [(4, 3), (5, 3), (4, 5), (5,)],
        ),
    }


def listed(y):
    return [y] if isinstance(y, torch.Tensor) else list(y)


def autocast_is_a_cast(rank):
    from pyparallel import ops

    torch.set_num_threads(1)
    torch.manual_seed(rank.rank)
    groups = make_groups(rank, ("communicator", "gloo"))
    for kind, algorithm in [
        ("communicator", "plain"),
        ("communicator", "symmetric"),
        ("communicator", "chunked"),
        ("gloo", None),
    ]:
        for op, shapes in products(ops, groups[kind], algorithm).values():
            for grad in (False, True):
                given = [torch.randn(s).requires_grad_(grad) for s in shapes]
                cast = [t.detach().to(BF16).requires_grad_(grad) for t in given]
                with torch.autocast("cpu", BF16):
                    ys = listed(op(*given))
                expected = listed(op(*cast))
                for y, e in zip(ys, expected, strict=True):
                    assert y.dtype is BF16
                    assert torch.equal(y, e)
                if grad:
                    sum(y.sum() for y in ys).backward()
                    sum(e.sum() for e in expected).backward()
                    for t, c in zip(given, cast, strict=True):
                        assert torch.equal(t.grad, c.grad.float())
            with torch.autocast("cpu", BF16):  # as torch's own linear leaves it
                doubles = listed(op(*(torch.randn(s, dtype=torch.float64) for s in shapes)))
            assert all(y.dtype is torch.float64 for y in doubles)
    group = groups["communicator"]
    x, weight, buffer = torch.randn(4, 3), torch.randn(5, 3).requires_grad_(), torch.zeros(5, 3)
    out = torch.empty(4, 5, dtype=BF16)
    with torch.autocast("cpu", BF16):
        ops.matmul_all_reduce(x, weight, group, main_grad=buffer).sum().backward()
        with torch.no_grad():
            ops.matmul_all_reduce(x, weight, group, out=out)
    assert weight.grad is None
    summed = x.to(BF16).float().sum(0)  # of 16-bit factors, but never rounded to 16 bits
    assert torch.equal(buffer, summed.expand(5, 3))
    assert torch.equal(out, ops.matmul_all_reduce(x.to(BF16), weight.detach().to(BF16), group))


def test_autocast_is_a_cast():
    run_ranks(autocast_is_a_cast, 2)


def tangents_are_refused(rank):
    from pyparallel import ops

    (group,) = make_groups(rank, ("communicator",)).values()
    w, one = torch.ones(5, 3), torch.ones(4, 3)
    calls = {
        "all_gather": lambda x: ops.all_gather(x, group),
        "reduce_scatter": lambda x: ops.reduce_scatter(x, group),
        "all_reduce": lambda x: ops.all_reduce(x, group),
        "all_gather_matmul": lambda x: ops.all_gather_matmul(x, w, group),
        "matmul_reduce_scatter": lambda x: ops.matmul_reduce_scatter(x, w, group),
        "matmul_all_reduce": lambda x: ops.matmul_all_reduce(x, w, group),
    }
    for call in calls.values():
        with forward_ad.dual_level():
            call(one)  # of what has no tangent
            dual = forward_ad.make_dual(one, one)
            with pytest.raises(NotImplementedError, match="forward-mode tangent"):
                call(dual)
        with pytest.raises(NotImplementedError, match="forward-mode tangent"):
            torch.func.jvp(call, (one,), (one,))


def test_tangents_are_refused():
    run_ranks(tangents_are_refused, 2)
