"""Values and gradients of every op against the whole computation, in float64.

Layers of proof: N processes on a CPU. Every rank compares its own part with one process's autograd
over the unsharded tensors, for world sizes 1 to 4, even and uneven shards, and each kind of group.
Replicated outputs have replicated gradients; shards' gradients are the shards of the whole's.
"""

from itertools import accumulate

import pytest
import torch

from tests.launch import run_ranks
from tests.ops.reference import assert_close64, draw
from tests.ops.seats import make_groups

F64 = torch.float64


def uneven(total: int, world: int) -> list[int]:
    """Sizes that differ; from three ranks on, one of them empty."""
    sizes = [total // world + (1 if r == 0 else 0) for r in range(world)]
    if world > 2:
        sizes[1] = 0
    sizes[-1] += total - sum(sizes)
    return sizes


def pieces(x, sizes, dim):
    return list(x.split(sizes, dim))


def leaf(x):
    return x.detach().clone().requires_grad_()


def check_all_gather_matmul(rank, group, dim, sizes, seed, save):
    from pyparallel import ops

    world, me = rank.world_size, rank.rank
    shape = [3, 2, 5]
    even = sizes is None
    sizes = sizes or [shape[dim]] * world
    shape[dim] = sum(sizes)
    k = shape[-1]
    whole, *rest = draw(seed, [shape, *[(n, k) for n in (4, 1) for _ in range(world)]], F64)
    ws, us = rest[:world], rest[world:]
    biases = draw(seed + 1, [(4,)] * world, F64)
    upstream = draw(seed + 2, [(*shape[:-1], n) for n in (4, 1) for _ in range(world)], F64)
    up_gathered = draw(seed + 3, [shape] * world, F64)

    x_ref = leaf(whole)
    mine = [leaf(ws[me]), leaf(us[me]), leaf(biases[me])]
    loss = 0
    for r in range(world):
        w, u, b = mine if r == me else (ws[r], us[r], biases[r])
        loss = loss + ((x_ref @ w.t() + b) * upstream[r]).sum()
        loss = loss + ((x_ref @ u.t()) * upstream[world + r]).sum() + (x_ref * up_gathered[r]).sum()
    loss.backward()

    x = leaf(pieces(whole, sizes, dim)[me])
    w, u, b = leaf(ws[me]), leaf(us[me]), leaf(biases[me])
    main_grad = torch.ones(4, k)
    (y, z), gathered = ops.all_gather_matmul(
        x,
        [w, u],
        group,
        dim - 3,
        [b, None],
        None if even else sizes,
        True,
        save_gathered=save,
        main_grad=[main_grad, None],
    )
    assert torch.equal(gathered, whole)
    assert_close64(y, whole @ ws[me].t() + biases[me])
    assert_close64(z, whole @ us[me].t())
    grads = [upstream[me], upstream[world + me], up_gathered[me]]
    torch.autograd.backward([y, z, gathered], grads)
    assert_close64(x.grad, pieces(x_ref.grad, sizes, dim)[me], "dx")
    assert_close64(u.grad, mine[1].grad, "dw")
    assert_close64(b.grad, mine[2].grad, "db")
    assert w.grad is None
    assert (main_grad - 1 - mine[0].grad).abs().max() < 1e-5
    plain = ops.all_gather_matmul(x.detach(), w.detach(), group, dim, b.detach(), sizes)
    assert torch.equal(plain, y)


def check_matmul_reduce_scatter(rank, group, dim, sizes, seed):
    from pyparallel import ops

    world, me = rank.world_size, rank.rank
    shape = [2, 3, 4]
    even = sizes is None
    sizes = sizes or [2] * world
    shape[dim] = sum(sizes)
    n = shape[-1]
    ks = [3 + r for r in range(world)]
    xs = draw(seed, [(*shape[:-1], k) for k in ks], F64)
    ws = draw(seed + 1, [(n, k) for k in ks], F64)
    (bias, upstream) = draw(seed + 2, [(n,), shape], F64)
    x_ref, w_ref, b_ref = leaf(xs[me]), leaf(ws[me]), leaf(bias)
    y_ref = b_ref + x_ref @ w_ref.t()
    y_ref = y_ref + sum(xs[r] @ ws[r].t() for r in range(world) if r != me)
    (y_ref * upstream).sum().backward()

    x, w, b = leaf(xs[me]), leaf(ws[me]), leaf(bias)
    y = ops.matmul_reduce_scatter(x, w, group, dim - 3, b, None if even else sizes)
    assert_close64(y, pieces(y_ref.detach(), sizes, dim)[me], "y")
    y.backward(pieces(upstream, sizes, dim)[me])
    for ours, ref in ((x, x_ref), (w, w_ref), (b, b_ref)):
        assert_close64(ours.grad, ref.grad)
    plain = ops.matmul_reduce_scatter(x.detach(), w.detach(), group, dim, b.detach(), sizes)
    assert torch.equal(plain, y)


def check_matmul_all_reduce(rank, group, seed):
    from pyparallel import ops

    world, me = rank.world_size, rank.rank
    ks = [3 + r for r in range(world)]
    xs = draw(seed, [(2, 3, k) for k in ks], F64)
    ws = draw(seed + 1, [(4, k) for k in ks], F64)
    bias, norm, residual, up_y, up_h = draw(
        seed + 2, [(4,), (4,), (2, 3, 4), (2, 3, 4), (2, 3, 4)], F64
    )
    others = sum(
        (xs[r] @ ws[r].t() for r in range(world) if r != me), torch.zeros(2, 3, 4).double()
    )

    refs = [leaf(t) for t in (xs[me], ws[me], bias, residual, norm)]
    ours = [leaf(t) for t in (xs[me], ws[me], bias, residual, norm)]
    x_ref, w_ref, b_ref, res_ref, norm_ref = refs
    x, w, b, res, nw = ours
    y_ref = x_ref @ w_ref.t() + others + b_ref
    y = ops.matmul_all_reduce(x, w, group, b)
    assert_close64(y.detach(), y_ref.detach())
    (y_ref * up_y).sum().backward()
    y.backward(up_y)
    for a, c in zip(ours[:3], refs[:3], strict=True):
        assert_close64(a.grad, c.grad)
        a.grad = c.grad = None

    h_ref = x_ref @ w_ref.t() + others + b_ref + res_ref
    n_ref = torch.nn.functional.rms_norm(h_ref, (4,), norm_ref, 1e-5)
    ((n_ref * up_y).sum() + (h_ref * up_h).sum()).backward()
    normed, h = ops.matmul_all_reduce_rms_norm(x, w, res, nw, 1e-5, group, b)
    assert_close64(normed.detach(), n_ref.detach())
    assert_close64(h.detach(), h_ref.detach())
    torch.autograd.backward([normed, h], [up_y, up_h])
    for a, c in zip(ours, refs, strict=True):
        assert_close64(a.grad, c.grad)
        a.grad = None

    partial = leaf(xs[me] @ ws[me].t())
    normed, h = ops.all_reduce_rms_norm(partial, res, nw, 1e-5, group)
    h_ref = leaf(partial.detach() + others + res.detach())
    n_ref = torch.nn.functional.rms_norm(h_ref, (4,), norm.requires_grad_(), 1e-5)
    assert_close64(normed.detach(), n_ref.detach())
    normed.backward(up_y)
    n_ref.backward(up_y)
    assert_close64(partial.grad, h_ref.grad)
    assert_close64(res.grad, h_ref.grad)
    assert_close64(nw.grad, norm.grad)


def check_collectives(rank, group, dim, sizes, seed):
    from pyparallel import ops

    world, me = rank.world_size, rank.rank
    even = sizes is None
    sizes = sizes or [2] * world
    shape = [3, 4, 2]
    shape[dim] = sum(sizes)
    given = None if even else sizes
    wholes = draw(seed, [shape] * world, F64)
    ups = draw(seed + 1, [shape] * world, F64)
    start = [0, *accumulate(sizes)][me]
    own = wholes[0].narrow(dim, start, sizes[me])

    x = leaf(own)
    y = ops.all_gather(x, group, dim, given)
    assert torch.equal(y, wholes[0])
    y.backward(ups[me])
    assert_close64(x.grad, sum(ups).narrow(dim, start, sizes[me]))

    x = leaf(own)
    y = ops.gather(x, group, dim - 3, given)
    assert torch.equal(y, wholes[0])
    y.backward(ups[0])
    assert torch.equal(x.grad, ups[0].narrow(dim, start, sizes[me]))

    x = leaf(wholes[0])
    y = ops.split(x, group, dim, given)
    assert torch.equal(y, own)
    y.backward(ups[0].narrow(dim, start, sizes[me]))
    assert torch.equal(x.grad, ups[0])

    x = leaf(wholes[me])
    y = ops.reduce_scatter(x, group, dim - 3, given)
    assert_close64(y.detach(), sum(wholes).narrow(dim, start, sizes[me]))
    y.backward(ups[0].narrow(dim, start, sizes[me]))
    assert torch.equal(x.grad, ups[0])

    x = leaf(wholes[me])
    y = ops.all_reduce(x, group)
    assert_close64(y.detach(), sum(wholes))
    y.backward(ups[0])
    assert torch.equal(x.grad, ups[0])
    most = ops.all_reduce(x, group, "max")
    assert not most.requires_grad
    assert torch.equal(most, torch.stack(wholes).amax(0))

    x = leaf(wholes[0])
    y = ops.replicate(x, group)
    assert torch.equal(y, x)
    y.backward(ups[me])
    assert_close64(x.grad, sum(ups))


def everything(rank):
    torch.set_num_threads(1)
    groups = make_groups(rank)
    world = rank.world_size
    for number, group in enumerate(groups.values()):
        for dim in range(3):
            for sizes in (None, uneven(2 * world + 1, world)):
                seed = 1000 * number + 100 * dim + (7 if sizes else 0)
                check_all_gather_matmul(rank, group, dim, sizes, seed, save=dim != 1)
                check_matmul_reduce_scatter(rank, group, dim, sizes, seed)
                check_collectives(rank, group, dim, sizes, seed)
        check_matmul_all_reduce(rank, group, number)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_values_and_gradients(world):
    run_ranks(everything, world)
