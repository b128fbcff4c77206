"""Weight gradients multiplied into those of earlier microbatches: equal to autograd's, and only
where nobody could tell."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pyparallel.pipeline import PipelineExecutor, recompute
from tests.pipeline.executor_models import loss_fn, plan_of

WIDTH = 520  # a weight of 1 MiB and more
M = 3


class Products(TorchDispatchMode):
    """Counts products that are added to a weight's gradient."""

    def __init__(self):
        super().__init__()
        self.added = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.added += func is torch.ops.aten.addmm_.default
        return result


class Twice(nn.Module):
    """One layer used twice, the second time with fewer dims."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.stack([self.layer(row) for row in torch.tanh(self.layer(x))])


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x):
        return recompute(self.inner, x)


class Asks(nn.Module):
    """Its forward takes a gradient of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        y = self.layer(x)
        (gradient,) = torch.autograd.grad(y.sum(), self.layer.weight, retain_graph=True)
        return y + gradient.mean()


def _data():
    torch.manual_seed(3)
    return [[torch.randn(9, WIDTH) for _ in range(M)] for _ in range(2)]


def _step(kind, change=lambda stage: None):
    """Compares the gradients of a step with autograd's; gives how many products were added."""
    torch.manual_seed(1)
    whole = nn.Sequential(nn.Linear(WIDTH, WIDTH), kind())
    twin = copy.deepcopy(whole)
    change(whole[1])
    inputs, targets = _data()
    executor = PipelineExecutor({0: whole[0], 1: whole[1]}, loss_fn, dry_run=False)
    with Products() as products:
        executor.step(plan_of("1f1b", 2, M, 1), inputs, targets)
    for x, t in zip(inputs, targets, strict=True):
        (loss_fn(twin(x), t) / M).backward()
    assert not any("forward" in vars(module) for module in whole.modules())
    for (name, found), want in zip(whole.named_parameters(), twin.parameters(), strict=True):
        # Sums of 9 rows and 3 microbatches, in another order.
        bound = 64 * torch.finfo(torch.float32).eps * want.grad.abs().max()
        assert (found.grad - want.grad).abs().max() <= bound, name
    return products.added


@pytest.mark.parametrize(
    ("kind", "products"),
    [(Twice, 1 + 9), (Recomputed, 1), (Asks, 1)],
    ids=["twice", "recomputed", "asks"],
)
def test_gradients_are_those_of_autograd(kind, products):
    """Those of the first microbatch become `.grad`, all others are multiplied into it."""
    assert _step(kind) == (M - 1) * (1 + products)


def test_a_weight_with_hooks_goes_through_autograd():
    seen = []
    added = _step(
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda stage: stage.weight.register_hook(lambda gradient: seen.append(gradient.shape)),
    )
    assert len(seen) == M
    assert added == M - 1, "of the other stage"


def test_frozen_weights_halves_and_autocast_are_left_alone():
    torch.manual_seed(1)
    stages = {0: nn.Linear(WIDTH, WIDTH), 1: nn.Linear(WIDTH, WIDTH)}
    stages[0].weight.requires_grad_(False)
    inputs, targets = _data()
    executor = PipelineExecutor(stages, loss_fn, dry_run=False)
    with Products() as products:
        executor.step(plan_of("zb-h1", 2, M, 1), inputs, targets)
        with torch.autocast("cpu", torch.bfloat16):
            executor.step(plan_of("1f1b", 2, M, 1), inputs, targets)
    assert products.added == 0
    assert stages[0].weight.grad is None
