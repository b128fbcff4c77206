"""The executor in one process: gradients of every schedule, what it keeps, what it calls.

Layers: every schedule against one process, to 1e-12 of float64; graphs alive counted by themselves.
What stages may be: test_executor_stages.py; bad input: test_executor_refusals.py; ranks in
processes: test_executor_ranks.py.
"""

import gc

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from pyparallel.pipeline import PipelineError, PipelineExecutor
from pyparallel.schedule import validate, with_steps
from tests.pipeline.executor_models import (
    WIDTH,
    Counter,
    data,
    fp32_limits,
    grid,
    largest_error,
    loss_fn,
    model,
    plan_of,
    reference,
    stages,
)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_schedule_gives_the_gradients_of_one_process(ranks):
    """Sums of at most 8 terms of size 1, in another order: 1e-12 is thousands of roundings."""
    known = {}
    for name, p, m, v in grid((ranks,), (1, 2, 3, 4, 5, 6, 7, 8)):
        plan = plan_of(name, p, m, v)
        whole = model(plan.stages)
        inputs, targets = data(m)
        if (plan.stages, m) not in known:
            known[plan.stages, m] = reference(whole, inputs, targets)
        loss, gradients = known[plan.stages, m]
        executor = PipelineExecutor(stages(whole, plan.stages), loss_fn, dry_run=False)
        result = executor.step(plan, inputs, targets)
        assert abs(result.loss - loss) < 1e-12, (name, p, m, v)
        assert largest_error(whole, gradients) < 1e-12, (name, p, m, v)


def test_every_schedule_keeps_to_the_bound_of_fp32():
    """|ours - ref| <= |one process - ref| + m eps32 sum |g_i|, ref in float64: the microbatches'
    gradients are the same numbers, added in another order."""
    cases = [c for c in grid((1, 2, 3, 4), (1, 3, 8)) if c[2] != 3 or c[1] in (2, 3)]
    known = {}
    for name, p, m, v in cases:
        plan = plan_of(name, p, m, v)
        key = (plan.stages, m)
        if key not in known:
            known[key] = fp32_limits(*key)
        truth, limits = known[key]
        whole = model(plan.stages, torch.float32)
        executor = PipelineExecutor(stages(whole, plan.stages), loss_fn, dry_run=False)
        executor.step(plan, *data(m, torch.float32))
        for n, parameter in whole.named_parameters():
            assert ((parameter.grad - truth[n]).abs() <= limits[n]).all(), (name, p, m, v, n)
    assert all(
        ((truth[n] * 1e-3).abs() > limits[n]).any()
        for truth, limits in known.values()
        for n in truth
    ), "the bound bites"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_graphs_alive_are_those_the_validator_counts(ranks):
    """Of copied stages (DualPipe) a process per rank counts: test_executor_ranks.py."""
    for name, p, m, v in grid((ranks,), (1, 3, 8)):
        plan = plan_of(name, p, m, v)
        inputs, targets = data(m)
        parts = stages(model(plan.stages), plan.stages)
        counters = [Counter() for _ in range(p)]
        for rank, held in enumerate(plan.held):
            for stage in held:
                parts[stage][0].counter = counters[rank]
        executor = PipelineExecutor(parts, loss_fn, dry_run=False)
        gc.disable()  # what is freed is freed by its last reference, or it is not free yet
        try:
            executor.step(plan, inputs, targets)
            alive = [counter.now for counter in counters]
        finally:
            gc.enable()
        assert alive == [0] * p, (name, p, m, v)
        if sum(len(held) for held in plan.held) == plan.stages:
            most = tuple(counter.most for counter in counters)
            assert most == validate(plan).peak_bytes, (name, p, m, v)


def test_two_steps_add_up_and_microbatches_may_change():
    """training.md 26, 29: the sum is not scaled again, nor are gradients zeroed; m may change."""
    whole = model(2)
    executor = PipelineExecutor(stages(whole, 2), loss_fn)
    expected = {}
    for m in (4, 1, 6):
        inputs, targets = data(m, uneven=True)
        _, gradients = reference(whole, inputs, targets)
        expected = {n: expected.get(n, 0) + g for n, g in gradients.items()}
        executor.step(plan_of("zb-h1", 2, m), inputs, targets)
    assert largest_error(whole, expected) < 1e-12


def test_uneven_microbatches_weigh_what_their_tokens_are():
    whole = model(4)
    inputs, targets = data(5, uneven=True)
    tokens = [float(len(x)) for x in inputs]
    loss, gradients = reference(whole, inputs, targets, weights=tokens)
    executor = PipelineExecutor(stages(whole, 4), loss_fn)
    result = executor.step(plan_of("zb-v", 2, 5), inputs, targets, weights=tokens)
    assert abs(result.loss - loss) < 1e-12
    assert largest_error(whole, gradients) < 1e-12
    # Sums over tokens, divided once by their number, are the same.
    whole.zero_grad()
    summed = PipelineExecutor(stages(whole, 4), lambda y, t: ((y - t) ** 2).sum() / WIDTH)
    summed.step(plan_of("zb-v", 2, 5), inputs, targets, total=sum(tokens))
    assert largest_error(whole, gradients) < 1e-12


def test_evaluation_keeps_nothing_and_gives_outputs():
    whole = model(4)
    inputs, targets = data(5)
    loss, _ = reference(whole, inputs, targets)
    counter = Counter()
    for layer in whole:
        layer.counter = counter
    executor = PipelineExecutor(stages(whole, 4), loss_fn)
    for name in ("interleaved-1f1b", "zb-v", "dualpipev"):
        result = executor.evaluate(plan_of(name, 2, 5), inputs, targets)
        assert abs(result.loss - loss) < 1e-12
        for m, x in enumerate(inputs):
            assert torch.equal(result.outputs[m], whole(x).detach())
            assert not result.outputs[m].requires_grad
    assert executor.evaluate(plan_of("zb-v", 2, 5), inputs).loss is None
    assert all(p.grad is None for p in whole.parameters())
    assert counter.now == 0


def test_reductions_and_steps_of_a_plan_are_called_once_each():
    inputs, targets = data(4)
    called = []
    for name in ("zb-v", "dualpipe"):
        plan = with_steps(plan_of(name, 2, 4))
        whole = model(plan.stages)
        parts = stages(whole, plan.stages)
        executor = PipelineExecutor(
            parts,
            loss_fn,
            reduce=lambda stage: called.append(("reduce", stage)),
            optimizer_step=lambda stage: called.append(("step", stage)),
        )
        called.clear()
        executor.step(plan, inputs, targets)
        wanted = [(what, s) for what in ("reduce", "step") for s in range(plan.stages)]
        assert sorted(called) == wanted
        steps = [i for i, (what, _) in enumerate(called) if what == "step"]
        assert min(steps) >= plan.stages


def test_what_fails_in_a_stage_is_named():
    whole = model(2)
    inputs, targets = data(3)
    parts = stages(whole, 2)
    parts[1] = nn.Linear(WIDTH + 1, WIDTH).double()
    executor = PipelineExecutor(parts, loss_fn, dry_run=False)
    with pytest.raises(
        PipelineError, match=r"1F0 of \(float64\[2, 6\]\): RuntimeError: .*6.*7"
    ) as caught:
        executor.step(plan_of("1f1b", 2, 3), inputs, targets)
    assert isinstance(caught.value.__cause__, RuntimeError)
    vector = PipelineExecutor(stages(whole, 2), lambda y, t: y)
    with pytest.raises(PipelineError, match=r"a tensor of one element"):
        vector.step(plan_of("1f1b", 2, 3), inputs, targets)
    made = PipelineExecutor({0: nn.Module(), 1: parts[1]}, loss_fn)
    with pytest.raises(PipelineError, match=r"0F0 of .*: NotImplementedError"):
        made.step(plan_of("1f1b", 2, 3), inputs, targets)


@pytest.mark.parametrize("way", ["function", "method"])
def test_compiled_stages(way):
    """A compiled backward is one piece: fine where backwards are whole; in halves it runs twice, if
    its buffers allow it, and is refused before anything runs if they do not."""
    whole = model(2)
    inputs, targets = data(3)
    loss, gradients = reference(whole, inputs, targets)
    parts = stages(whole, 2)
    for number, part in parts.items():
        if way == "method":
            part.compile(backend="aot_eager")
        else:
            parts[number] = torch.compile(part, backend="aot_eager")
    torch._dynamo.reset()
    result = PipelineExecutor(parts, loss_fn).step(plan_of("1f1b", 2, 3), inputs, targets)
    assert abs(result.loss - loss) < 1e-12
    assert largest_error(whole, gradients) < 1e-12
    whole.zero_grad()
    halves = plan_of("zb-h1", 2, 3)
    with pytest.raises(ValueError, match=r"halves, and stages \[1\] are compiled.*donated_buffer"):
        PipelineExecutor(parts, loss_fn).step(halves, inputs, targets)
    assert all(p.grad is None for p in whole.parameters())
    torch._dynamo.reset()
    with torch._functorch.config.patch(donated_buffer=False):
        PipelineExecutor(parts, loss_fn).step(halves, inputs, targets)
    assert largest_error(whole, gradients) < 1e-12
