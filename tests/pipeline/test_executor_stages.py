"""Stages of all kinds: outputs, weights used twice, recomputation, skips, keywords."""

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from pyparallel.pipeline import PipelineExecutor, partition_model, recompute
from tests.pipeline.executor_models import (
    WIDTH,
    data,
    largest_error,
    loss_fn,
    model,
    plan_of,
    reference,
    stages,
)


class Many(nn.Module):
    """Several outputs, plain values, integers, one that no gradient comes back for."""

    def __init__(self, first):
        super().__init__()
        self.first = first
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.shared = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x, extra=None):
        skip, flag = (x, {"scale": 2.0}) if self.first else (extra["skip"], extra["flag"])
        out = torch.tanh(self.linear(x * self.shared) * flag["scale"]) * self.shared
        out = nn.functional.linear(out, self.linear.weight) + self.linear.bias
        ids = torch.arange(3)
        unused = out.sum() * 3
        return out, {"skip": skip * 1, "flag": flag, "ids": [ids, None, unused, True, "a"]}


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, extra):
        assert extra["ids"][1:2] + extra["ids"][3:] == [None, True, "a"]
        assert extra["ids"][0].dtype == torch.int64
        return self.linear(x) + extra["skip"]


def many_stages():
    torch.manual_seed(3)
    return nn.ModuleList([Many(True), Many(False), Many(False), Last()]).double()


def many_reference(parts, inputs, targets):
    def whole(x):
        value = parts[0](x)
        for part in list(parts)[1:]:
            value = part(*value)
        return value

    loss = sum(loss_fn(whole(x), t) for x, t in zip(inputs, targets, strict=True)) / len(inputs)
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in parts.named_parameters()}
    parts.zero_grad()
    return loss.item(), gradients


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_outputs_of_any_kind_and_weights_used_twice(name):
    """`shared` and `linear` are used by several operations on one path: a half that ran the path
    once more would count them twice."""
    parts = many_stages()
    inputs, targets = data(4)
    loss, gradients = many_reference(parts, inputs, targets)
    executor = PipelineExecutor(dict(enumerate(parts)), loss_fn)
    result = executor.step(plan_of(name, 4, 4), inputs, targets)
    assert abs(result.loss - loss) < 1e-12
    assert largest_error(parts, gradients) < 1e-12


def test_halves_recompute_nothing():
    """Each operation's gradients are computed once: for the input in the one half, for the weight
    in the other."""
    calls = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            calls.append("forward")
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx, gradient):
            x, w = ctx.saved_tensors
            calls.append("backward")
            return gradient @ w.t(), x.t() @ gradient

    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))

        def forward(self, x):
            return Product.apply(x, self.w)

    inputs, targets = data(3)
    parts = nn.Sequential(Stage(), Stage())
    executor = PipelineExecutor({0: parts[0], 1: parts[1]}, loss_fn, dry_run=False)
    executor.step(plan_of("zb-h1", 2, 3), inputs, targets)
    assert calls.count("forward") == 6
    # Stage 0 has no half for its input; stage 1 runs the node in each half.
    assert calls.count("backward") == 3 + 6


class Recomputed(nn.Module):
    def __init__(self, inner, by):
        super().__init__()
        self.inner, self.by, self.runs = inner, by, 0
        self.dropout = nn.Dropout(0.5)

    def _count(self, x):
        self.runs += 1
        return self.dropout(self.inner(x))

    def forward(self, x):
        if self.by == "kept":
            return self._count(x)
        if self.by == "torch":
            return torch.utils.checkpoint.checkpoint(self._count, x, use_reentrant=False)
        return recompute(self._count, x)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_activations_are_recomputed_once_whatever_the_halves(name):
    """Dropout drops the same the second time: gradients equal those of kept activations."""
    found = {}
    plan = plan_of(name, 2, 4)
    for by in ("kept", "torch", "ours"):
        whole = model(plan.stages)
        inputs, targets = data(4)
        parts = {i: Recomputed(stage, by) for i, stage in stages(whole, plan.stages).items()}
        torch.manual_seed(11)
        result = PipelineExecutor(parts, loss_fn, dry_run=False).step(plan, inputs, targets)
        found[by] = (result.loss, {n: p.grad for n, p in whole.named_parameters()})
        runs = [part.runs for part in parts.values()]
        if by != "torch":
            assert runs == [8 if by == "ours" else 4] * plan.stages
        elif name == "1f1b":
            assert runs == [8, 8]
    assert found["ours"][0] == found["torch"][0] == found["kept"][0]
    assert largest_difference(found["ours"][1], found["kept"][1]) < 1e-12
    assert largest_difference(found["torch"][1], found["kept"][1]) < 1e-12


def largest_difference(one, other):
    assert one.keys() == other.keys()
    return max(float((one[n] - other[n]).abs().max()) for n in one)


def test_recomputing_outside_of_a_pipeline():
    """Nested, with keywords, under autocast, twice over a retained graph, freed with the graph."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    x = torch.randn(4, WIDTH, requires_grad=True)

    def inner(value, *, scale):
        return torch.tanh(layers[1](value)) * scale

    def outer(value):
        dropped = nn.functional.dropout(torch.tanh(layers[0](value)))
        return layers[2](
            recompute(inner, dropped, scale=2.0) if again else inner(dropped, scale=2.0)
        )

    found = []
    for again in (False, True):
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = recompute(outer, x) if again else outer(x)
        leaves = [x, *layers.parameters()]
        first = torch.autograd.grad(y.float().sum(), leaves, retain_graph=True)
        second = torch.autograd.grad(y.float().sum(), leaves)
        assert all(map(torch.equal, first, second))
        found.append(first)
    assert all(map(torch.equal, *found))
    with torch.no_grad():
        assert recompute(outer, x).grad_fn is None

    calls = []

    def fickle(value):
        calls.append(1)
        return torch.tanh(value if len(calls) == 1 else value[:2])

    with pytest.raises(
        RuntimeError, match=r"fickle saved 1 .* again; number 0 was \(24, 1\).*\(2, 1\)"
    ):
        recompute(fickle, x.view(-1, 1) * 1).sum().backward()


class Skipping(nn.Module):
    """Its first activation is used by the last layer again, and its input by the third."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        first = self.a(x)
        value = self.relu(self.b(first))
        value = self.c(value) * x
        return self.d(value) + first


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_skip_connections_to_later_stages(name):
    torch.manual_seed(0)
    whole = Skipping().double()
    inputs, targets = data(3)
    loss, gradients = reference(whole, inputs, targets)
    partition = partition_model(whole, counts=[1] * 4, split_points=["b", "relu", "d"])
    executor = PipelineExecutor({i: partition.stage(i) for i in range(4)}, loss_fn)
    result = executor.step(plan_of(name, 4, 3), inputs, targets)
    assert abs(result.loss - loss) < 1e-12
    assert largest_error(whole, gradients) < 1e-12


def test_keywords_go_to_every_stage():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH).double()

        def forward(self, x, scale):
            return self.linear(x) * scale

    parts = nn.ModuleList([Scaled(), Scaled()])
    inputs, targets = data(3)
    scales = [0.5, 2.0, 3.0]
    value = sum(
        loss_fn(parts[1](parts[0](x, s), s), t)
        for x, t, s in zip(inputs, targets, scales, strict=True)
    )
    (value / 3).backward()
    gradients = {n: p.grad for n, p in parts.named_parameters()}
    parts.zero_grad()
    executor = PipelineExecutor(dict(enumerate(parts)), loss_fn)
    keywords = [{"scale": s} for s in scales]
    executor.step(plan_of("zb-h1", 2, 3), inputs, targets, keywords=keywords)
    assert largest_error(parts, gradients) < 1e-12


def test_a_stage_without_layers_passes_on():
    whole = model(2)
    inputs, targets = data(3)
    loss, gradients = reference(whole, inputs, targets)
    partition = partition_model(whole, counts=[0, 1, 0, 1])
    for name in ("1f1b", "zb-h1", "gpipe"):
        whole.zero_grad()
        executor = PipelineExecutor({i: partition.stage(i) for i in range(4)}, loss_fn)
        result = executor.step(plan_of(name, 4, 3), inputs, targets)
        assert abs(result.loss - loss) < 1e-12
        assert largest_error(whole, gradients) < 1e-12


def test_a_stage_may_begin_by_changing_its_input_in_place():
    """The trial before the step, too, gives it what may be changed, not a leaf."""
    whole = model(3)
    whole[1] = nn.ReLU(inplace=True)
    inputs, targets = data(3)
    loss, gradients = reference(whole, inputs, targets)
    for name in ("1f1b", "zb-h1"):
        whole.zero_grad()
        executor = PipelineExecutor(dict(enumerate(whole)), loss_fn)
        result = executor.step(plan_of(name, 3, 3), inputs, targets)
        assert abs(result.loss - loss) < 1e-12
        assert largest_error(whole, gradients) < 1e-12
