"""16-bit passes over float32 weights; float16's loss scale, one for all ranks.

Layers: one process; four ranks (test_step_on_ranks.py), one of whose gradients overflows. Bounds: a
weight's gradient is rounded once per microbatch, and their sum is float32's.
"""

import logging

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from pyparallel.training import LossScaler, ParallelConfig, Precision, build_mesh


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_microbatches_add_up_in_float32(name):
    """After n microbatches that give the same gradient g, rounded to 16 bits, the sum is n g but
    for float32's own rounding; summed in 16 bits it would stop growing at 2 / eps16 microbatches.
    """
    precision, n = Precision(name), 600
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False)
    before = model.weight.detach().clone()
    x, seed = torch.randn(1, 3), torch.randn(1, 2)
    for _ in range(n):
        with precision.forward():
            y = model(x)
        assert y.dtype is precision.dtype
        y.backward(seed.to(y.dtype))
    assert model.weight.grad.dtype is torch.float32
    wide = seed.to(precision.dtype).double().t() @ x.to(precision.dtype).double()
    eps16, eps32 = torch.finfo(precision.dtype).eps, torch.finfo(torch.float32).eps
    assert ((model.weight.grad - n * wide).abs() <= n * wide.abs() * (eps16 / 2 + n * eps32)).all()
    narrow = torch.zeros(2, 3, dtype=precision.dtype)
    for _ in range(n):
        narrow += wide.to(precision.dtype)
    worst = (narrow.double() - n * wide).abs() / (n * wide.abs())
    assert worst.max() > 10 * eps16, "a sum in 16 bits would be seen"

    # An update below half an ulp of the 16-bit weight is not lost: masters are float32.
    step = before.abs() * eps16 / 16
    for _ in range(32):
        with torch.no_grad():
            model.weight.add_(step)
    assert ((model.weight - before) / before.abs() > eps16).all()


def test_fp32_changes_nothing_and_misuse_is_told():
    precision = Precision()
    with precision.forward():
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.float32
    assert precision.scaler() is None
    assert precision.sharded_policy() is None
    assert Precision("bf16").scaler() is None
    with pytest.raises(ValueError, match="precision is 'half'; expected one of fp32, bf16, fp16"):
        Precision("half")
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2).bfloat16()})
    with pytest.raises(ValueError, match=r"2 are no float32: b.weight \(bfloat16\), b.bias"):
        Precision("bf16").check(model.named_parameters())
    model["b"].requires_grad_(False)
    Precision("bf16").check(model.named_parameters())


def test_scale_seeks_float16s_range(caplog):
    """Backs off at an overflow, grows after `interval` good steps; messages name step and scale."""
    scaler = LossScaler(initial=2.0**18, interval=3)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    taken, scales = [], []
    with caplog.at_level(logging.INFO, "pyparallel.training"):
        for _ in range(8):
            scales.append(scaler.scale_factor)
            optimizer.zero_grad()
            loss = (weight * 0.375).sum()
            scaled = scaler.scale(loss)
            assert torch.equal(scaled, loss), "the loss keeps its value"
            scaled.backward()
            weight.grad = weight.grad.half().float()  # what float16 does to it
            taken.append(scaler.step(optimizer))
            scaler.update()
    #        2^18 3/8 > 65504   2^17 3/8 fits, grows after 3, and so on
    assert taken == [False, True, True, True, False, True, True, True]
    assert scales == [2.0**n for n in (18, 17, 17, 17, 18, 17, 17, 17)]
    assert torch.equal(weight.detach(), torch.full((2,), 1 - 6 * 0.375)), "exact: powers of two"
    assert (scaler.steps, scaler.skipped) == (8, 2)
    assert len(caplog.messages) == 2
    for message, step in zip(caplog.messages, (1, 5), strict=True):
        assert message.startswith(f"step {step}: gradients at loss scale 262144 went past")
        assert "weights are unchanged, on all ranks, and the scale is 131072" in message
        assert not any(word in message.lower() for word in ("error", "fail", "warn", "invalid"))
    assert all(record.levelno == logging.INFO for record in caplog.records)

    twin = LossScaler()
    twin.load_state_dict(scaler.state_dict())
    assert twin.state_dict() == scaler.state_dict()


def test_what_no_scale_mends_is_an_error():
    scaler = LossScaler(initial=2.0, smallest=1.0)
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.tensor([float("nan")])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    assert not scaler.step(optimizer)
    assert not scaler.unscale_([weight]), "asked again, the same"
    scaler.update()
    assert not scaler.step(optimizer)
    with pytest.raises(FloatingPointError, match="step 2: gradients are not finite at loss"):
        scaler.update()
    with pytest.raises(RuntimeError, match="call unscale_ or step first"):
        scaler.update()
    with pytest.raises(ValueError, match="takes no closure"):
        scaler.step(optimizer, lambda: None)
    with pytest.raises(ValueError, match=r"growth=1.0: a number above 1 is expected; backoff=1.5"):
        LossScaler(growth=1.0, backoff=1.5)


def one_overflows():
    """One rank overflows: all leave the step out, also those that share no parameter with it; once
    it is over all take it."""
    mesh = build_mesh(ParallelConfig(tp=2, pp=2))
    scaler = LossScaler(mesh, initial=8.0)
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    decisions = []
    for bad in (None, 3, 0, None):
        weight.grad = torch.full((3,), scaler.scale_factor)
        if bad == mesh.rank:
            weight.grad[1] = float("inf")
        decisions.append(scaler.step(optimizer))
        scaler.update()
    idle = nn.Parameter(torch.ones(1))  # a stage whose parameters are all frozen meets the others
    decisions.append(scaler.unscale_([idle]))
    assert decisions == [True, False, False, True, True]
    assert weight.tolist() == [-1.0] * 3
    return scaler.state_dict()


def fully_sharded():
    """fully_shard with the policy: shards, and the sum of microbatches, are float32."""
    mesh = build_mesh(ParallelConfig(dp=4, zero=3))
    precision, n = Precision("bf16"), 600
    torch.manual_seed(0)
    model = nn.Linear(3, 8, bias=False)
    fully_shard(model, mesh=mesh.data_mesh(), mp_policy=precision.sharded_policy())
    x, seed = torch.randn(1, 3), torch.randn(1, 8)
    for microbatch in range(n):
        model.set_requires_gradient_sync(microbatch == n - 1)
        with precision.forward():
            y = model(x)
        y.backward(seed.to(y.dtype))
    grad = model.weight.grad.full_tensor().double()
    wide = seed.bfloat16().double().t() @ x.bfloat16().double()
    eps16, eps32 = 2.0**-7, 2.0**-23
    assert model.weight.to_local().dtype is model.weight.grad.dtype is torch.float32
    assert ((grad - n * wide).abs() <= n * wide.abs() * (eps16 / 2 + n * eps32)).all()
