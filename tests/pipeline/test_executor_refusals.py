"""What the executor refuses before anything runs, and what it leaves to the run."""

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from pyparallel.pipeline import PipelineError, PipelineExecutor
from pyparallel.schedule import Kind, Schedule, generate
from tests.pipeline.executor_models import (
    WIDTH,
    data,
    loss_fn,
    model,
    plan_of,
    stages,
)


class Reshaping(nn.Module):
    """Has what a run changes: a count, a table made at the first call, running statistics."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
        self.linear = nn.Linear(width, WIDTH).double()
        self.calls, self.table = 0, None

    def forward(self, x):
        self.calls += 1
        if self.table is None:
            self.table = torch.arange(WIDTH, dtype=torch.float64)
        return self.linear(self.norm(x) + self.table)


def test_stages_that_do_not_fit_are_refused_before_anything_runs():
    """Each stage is tried without numbers; what that leaves behind is nothing."""
    inputs, targets = data(3)
    plan = plan_of("1f1b", 3, 3)
    fits, other = Reshaping(WIDTH), Reshaping(WIDTH + 1)
    before = {n: t.clone() for n, t in fits.state_dict().items()}
    executor = PipelineExecutor({0: fits, 1: other, 2: Reshaping(WIDTH)}, loss_fn)
    for _ in range(2):
        with pytest.raises(
            ValueError,
            match=r"1f1b: stage 1 on rank 1 does not take what stage 0 gives, \(float64\[2, 6\]\) "
            r"\(microbatch 0\): RuntimeError: .*6.*7.*nothing has run.*dry_run=False",
        ):
            executor.step(plan, inputs, targets)
    assert fits.calls == other.calls == 0
    assert fits.table is None
    assert all(torch.equal(t, before[n]) for n, t in fits.state_dict().items())
    assert all(p.grad is None for p in fits.parameters())

    class Two(nn.Module):
        def forward(self, x, y):
            return x + y

    three = {0: Reshaping(WIDTH), 1: Two(), 2: Reshaping(WIDTH)}
    with pytest.raises(ValueError, match=r"stage 1 .*TypeError: .*missing 1 required.*'y'"):
        PipelineExecutor(three, loss_fn).step(plan, inputs, targets)
    with pytest.raises(ValueError, match=r"stage 0 on rank 0 does not take what it is given"):
        executor.evaluate(plan, [torch.zeros(2, 5, dtype=torch.float64)] * 3)
    # Where all fits, and each kind of microbatch once.
    three = {s: Reshaping(WIDTH) for s in range(3)}
    executor = PipelineExecutor(three, loss_fn)
    executor.step(plan, inputs, targets)
    assert [part.calls for part in three.values()] == [3, 3, 3]
    with pytest.raises(ValueError, match=r"float64\[4, 7\]"):
        executor.step(plan, [*inputs[:2], torch.zeros(4, 7, dtype=torch.float64)], targets)
    assert [part.calls for part in three.values()] == [3, 3, 3]


class Leaves(nn.Module):
    """Leaves torch in a way that a fake tensor cannot follow."""

    def __init__(self, way):
        super().__init__()
        self.way, self.linear = way, nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x):
        x = self.linear(x)
        if self.way == "numpy":
            return x + torch.from_numpy(x.detach().numpy().copy())
        if self.way == "address":
            return x + (x.data_ptr() == 0)
        if self.way == "number":
            return x[: int(x[0, 0].item() * 0) + 1]
        return x[x[:, 0] > -1e9]


@pytest.mark.parametrize("way", ["numpy", "address", "number", "mask", "hook"])
def test_what_only_numbers_can_tell_is_left_to_the_run(way):
    inputs, targets = data(2)
    if way == "number":
        targets = [t[:1] for t in targets]
    first = Leaves(way)
    if way == "hook":
        first.way = "mask"
        first.register_forward_hook(lambda module, given, out: out[:1])
        targets = [t[:1] for t in targets]
    parts = {0: first, 1: nn.Linear(WIDTH, WIDTH).double()}
    PipelineExecutor(parts, loss_fn).step(plan_of("1f1b", 2, 2), inputs, targets)
    parts[1] = nn.Linear(WIDTH + 1, WIDTH).double()
    with pytest.raises(PipelineError, match="1F0"):
        PipelineExecutor(parts, loss_fn).step(plan_of("1f1b", 2, 2), inputs, targets)


def test_a_loss_and_its_targets_fit():
    inputs, targets = data(2)
    plan = plan_of("1f1b", 2, 2)
    whole = model(2)
    for loss in (loss_fn, nn.MSELoss()):
        with pytest.raises(ValueError, match=r"targets are missing.*loss_fn\(.*target"):
            PipelineExecutor(stages(whole, 2), loss).step(plan, inputs)
    PipelineExecutor(stages(whole, 2), lambda y: y.sum()).step(plan, inputs)
    with pytest.raises(ValueError, match=r"takes no target.*leave them out"):
        PipelineExecutor(stages(whole, 2), lambda y: y.sum()).step(plan, inputs, targets)


def wrong_plan():
    plan = plan_of("1f1b", 2, 3)
    rows = list(plan.rows)
    at = next(i for i, a in enumerate(rows[0]) if a.kind is Kind.BACKWARD)
    rows[0] = (*rows[0][:at], *rows[0][at + 1 :])
    return Schedule(plan.name, tuple(rows), plan.stages, plan.microbatches, plan.held)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": generate("1f1b", 2, 3)}, "0F0 is used on rank 1.*with_transfers"),
        ({"plan": wrong_plan()}, "0I0.*is missing"),
        ({"plan": plan_of("1f1b", 3, 3)}, r"stages here are \[0, 1\], in the plan \[0, 1, 2\]"),
        ({"inputs": data(4)[0]}, r"inputs has 4 microbatches, the plan 3.*microbatches=4"),
        ({"targets": data(2)[1]}, r"targets has 2 microbatches, the plan 3.*microbatches=2"),
        ({"inputs": None}, r"inputs are missing: microbatches \[0, 1, 2\]"),
        ({"inputs": [1.0] * 3}, r"inputs\[0\] has no tensor"),
        ({"inputs": [object()] * 3}, r"inputs\[0\]: the value is a object"),
        ({"weights": [1.0, -2.0, 1.0]}, r"weights \[-2.0\]"),
        ({"weights": [0.0, 0.0, 0.0]}, r"total is 0.0"),
        ({"total": float("nan")}, r"total is nan"),
        ({"keywords": [{}]}, r"keywords has 1 microbatches"),
        ({"targets": None}, r"targets are missing: microbatches \[0, 1, 2\] end.*\(output"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(change, message):
    whole = model(2)
    ran = []
    whole[0].register_forward_pre_hook(lambda *_: ran.append(1))
    executor = PipelineExecutor(stages(whole, 2), loss_fn)
    inputs, targets = data(3)
    given = {"plan": plan_of("1f1b", 2, 3), "inputs": inputs, "targets": targets, **change}
    with pytest.raises(ValueError, match=f"(?s){message}"):
        executor.step(**given)
    assert not ran
    with pytest.raises(ValueError, match="loss_fn is missing"):
        PipelineExecutor(stages(whole, 2)).step(plan_of("1f1b", 2, 3), inputs, targets)
    with pytest.raises(ValueError, match="no stages"):
        PipelineExecutor({}, loss_fn)
    with torch.no_grad(), pytest.raises(ValueError, match="evaluate"):
        executor.step(plan_of("1f1b", 2, 3), inputs, targets)
