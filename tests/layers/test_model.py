"""A whole model of layers against the unsharded one: logits, loss, every gradient, every rank.

Layers of proof: N processes on a CPU, world sizes 1 to 4, with and without sequence parallelism,
padded and not, over a communicator. Float64 proves the algebra (1e-12 of a tensor's size). In fp32
and bf16 the errors against float64, of all gradients together and of the logits, may be twice stock
torch's own in that dtype, in the root mean square: a row-parallel sum rounds each rank's part once
more before it adds them, which makes an error of e at most sqrt(2) e. The loss is that of the very
logits, to fp32 arithmetic. Each layer by itself, element by element: the other files of this
folder. All of it runs in CI.
"""

from functools import lru_cache

import pytest
import torch

from tests.launch import run_ranks
from tests.layers.whole import Sharded, batch_of, loss_of, whole_model

WORLDS = [1, 2, 3, 4]
SMOOTHING, Z = 0.1, 1e-2


def run(model, batch, loss):
    logits = model(batch.ids)
    value = loss(logits, batch.target, SMOOTHING, Z)
    value.backward()
    return logits.detach(), value.detach()


def batches():
    return [batch_of(1), batch_of(2, size=1, length=11)]


@lru_cache
def whole_run(dtype, tied, exact):
    """Logits and losses of each batch, and the gradients of all, by name.

    exact: in float64, of the values rounded to the dtype, which both models hold.
    """
    model = whole_model(0, dtype, tied)
    model = model.double() if exact else model
    results = [run(model, batch, loss_of) for batch in batches()]
    return results, {n: p.grad for n, p in model.named_parameters()}


def gradients(model):
    """The whole's gradients, put together of all ranks' (as state, so that copies are compared)."""
    from copy import deepcopy

    from pyparallel.layers import full_state_dict

    twin = deepcopy(model)
    for (_, p), (_, q) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        q.data = p.grad
    return full_state_dict(twin)


def close64(ours, ref, what):
    error = (ours - ref).abs().max().item()
    assert error <= 1e-12 * max(1.0, ref.abs().max().item()), (what, error)


def rms(x):
    return x.double().square().mean().sqrt()


def within_twice(ours, stock, ref, what):
    """Lists of tensors, each measured in units of its own reference."""
    errors = [
        rms(
            torch.cat([((x.double() - y) / rms(y)).flatten() for x, y in zip(xs, ref, strict=True)])
        )
        for xs in (ours, stock)
    ]
    assert errors[0] <= 2 * errors[1] + torch.finfo(torch.float32).eps, (what, errors)


def models(rank, cases):
    from pyparallel.comm import Communicator
    from pyparallel.layers import gradient_norm

    found = []
    with Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size) as group:
        for dtype, parallel, multiple_of, tied in cases:
            model = Sharded(
                whole_model(0, dtype, tied), group, parallel=parallel, multiple_of=multiple_of
            )
            results = [run(model, batch, model.loss) for batch in batches()]
            grads = gradients(model)
            norm = gradient_norm(model)
            for parameter in model.parameters():
                parameter.grad = None
            local = [results[0][0], *(loss for _, loss in results)]
            found.append((local, grads, norm, model.head.partition.runs[rank.rank][0]))
    return found


CASES = [
    (torch.float64, False, 1, False),
    (torch.float64, True, 1, False),
    (torch.float64, True, 8, True),
    (torch.float32, True, 1, False),
    (torch.bfloat16, False, 1, False),
    (torch.bfloat16, True, 1, False),
]


@pytest.mark.parametrize("world", WORLDS)
def test_model_equals_the_whole(world):
    ranks = run_ranks(models, world, CASES)
    for i, (dtype, parallel, multiple_of, tied) in enumerate(CASES):
        what = (dtype, parallel, multiple_of, tied)
        stock, stock_grads = whole_run(dtype, tied, False)
        ref, ref_grads = whole_run(dtype, tied, True)
        exact = dtype is torch.float64

        logits = torch.cat([own(found[i]) for found in ranks], -1)
        (_, *losses), grads, norm, _ = ranks[0][i]
        names = {n: "embed.weight" if tied and n == "head.weight" else n for n in grads}
        assert set(names.values()) == set(ref_grads)
        ours, theirs, true = (
            list(grads.values()),
            [stock_grads[n] for n in names.values()],
            [ref_grads[n] for n in names.values()],
        )
        if exact:
            close64(logits, ref[0][0], (*what, "logits"))
            for name, x, y in zip(names, ours, true, strict=True):
                close64(x, y, (*what, name))
            for n, loss in enumerate(losses):
                close64(loss, ref[n][1], (*what, "loss"))
        else:
            within_twice([logits], [stock[0][0]], [ref[0][0]], (*what, "logits"))
            within_twice(ours, theirs, true, (*what, "gradients"))
            # lse and the picked logits are sums of numbers no larger than these, in fp32.
            size = logits.abs().max().double() + 10
            error = losses[0] - loss_of(logits.double(), batches()[0].target, SMOOTHING, Z)
            assert abs(error) <= 8 * torch.finfo(torch.float32).eps * size
        unique = {names[name]: grad for name, grad in grads.items()}.values()
        whole_norm = torch.stack([grad.double().norm() for grad in unique]).norm()
        assert abs(norm - whole_norm) <= 1e-12 * whole_norm
        for found in ranks:  # alike bit for bit: losses, norm, all that is replicated
            for x, y in zip(found[i][0][1:], losses, strict=True):
                assert torch.equal(x, y)
            assert torch.equal(found[i][2], norm)
            for name in grads:
                assert torch.equal(found[i][1][name], grads[name]), (*what, name)


def own(found):
    """A rank's logits without the padding, which is zero."""
    (logits, *_), _, _, run_of_head = found
    assert logits[..., run_of_head.length :].count_nonzero() == 0
    return logits[..., : run_of_head.length]
