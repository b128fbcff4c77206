"""The executor with a process per rank: the same results as one process, whatever goes wrong.

Layers: every schedule on the backend "pyparallel" and some on gloo, all ranks checked; shapes that
change, values of any dtype; failures on one rank, which all raise while the group stays usable.
"""

import gc
import weakref

import pytest
import torch
from torch import nn

import pyparallel.comm  # noqa: F401  registers the backend
from pyparallel.pipeline import (
    PipelineError,
    PipelineExecutor,
)
from pyparallel.pipeline.transports import GroupTransport
from pyparallel.schedule import generate, validate, with_steps
from tests.launch import run_ranks
from tests.pipeline.executor_models import (
    WIDTH,
    Counter,
    data,
    errors,
    fp32_limits,
    given,
    grid,
    loss_fn,
    model,
    own,
    plan_of,
    reference,
    several,
    start,
)


def every_schedule(rank, backend, cases):
    group = start(rank, backend)
    worst = 0.0
    for name, p, m, v in cases:
        plan = with_steps(plan_of(name, p, m, v))
        whole = model(plan.stages)
        inputs, targets = data(m, uneven=True)
        loss, gradients = reference(whole, inputs, targets)
        parts = own(plan, rank.rank, whole)
        counter = Counter()
        for part in parts.values():
            part[0].counter = counter
        executor = PipelineExecutor(parts, loss_fn, group=group, dry_run=False)
        gc.disable()  # what is freed is freed by its last reference, or it counts
        for _ in range(2):  # the second time no description travels
            whole.zero_grad()
            result = executor.step(plan, *given(plan, rank.rank, inputs, targets))
            worst = max(worst, abs(result.loss - loss), errors(plan, rank.rank, whole, gradients))
            assert counter.now == 0
        gc.enable()
        assert counter.most == validate(plan).peak_bytes[rank.rank], (name, p, m, v)
        evaluated = executor.evaluate(plan, *given(plan, rank.rank, inputs, targets))
        worst = max(worst, abs(evaluated.loss - loss))
        assert worst < 1e-12, (name, p, m, v)
    return worst


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_schedule_on_our_backend(ranks):
    """m up to 8, fewer than ranks too; REDUCE sums copies (DualPipe). As many graphs are alive on a
    rank as the validator says, exactly."""
    cases = grid((ranks,), (1, 2, 3, 8) if ranks < 3 else (1, 2, 5))
    run_ranks(every_schedule, ranks, "pyparallel", cases, timeout=100)


def in_batches(rank, backend, cases):
    """A meeting as one batch, as on CUDA."""
    plain = GroupTransport.__init__

    def batching(self, *args):
        plain(self, *args)
        assert not self.batched
        self.batched = True

    GroupTransport.__init__ = batching
    try:
        return every_schedule(rank, backend, cases)
    finally:
        GroupTransport.__init__ = plain


def test_schedules_on_gloo_and_in_batches():
    names = ("1f1b", "interleaved-1f1b", "zb-v", "dualpipe", "dualpipev")
    cases = [case for case in grid((2,), (1, 5)) if case[0] in names]
    jobs = [(every_schedule, "gloo", cases), (in_batches, "gloo", cases)]
    run_ranks(several, 2, *jobs, (in_batches, "pyparallel", cases), timeout=100)


def fp32(rank):
    """Every schedule within the bound of fp32, as in one process (test_executor.py)."""
    group = start(rank, "pyparallel")
    for name, p, m, v in grid((2,), (5,)):
        plan = with_steps(plan_of(name, p, m, v))
        whole = model(plan.stages, torch.float32)
        truth, limits = fp32_limits(plan.stages, m)
        executor = PipelineExecutor(own(plan, rank.rank, whole), loss_fn, group=group)
        executor.step(plan, *given(plan, rank.rank, *data(m, torch.float32)))
        for n, weight in whole.named_parameters():
            if int(n.split(".")[0]) in plan.held[rank.rank]:
                assert ((weight.grad - truth[n]).abs() <= limits[n]).all(), (name, m, v, n)


class Strange(nn.Module):
    """Gives all dtypes, no elements, one element, and a shape of its own for each call."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        base = self.linear(x)
        return (
            base,
            {
                "half": base.bfloat16(),
                "single": base.float().t(),  # not contiguous
                "complex": torch.complex(base, -base).conj(),
                "bool": base > 0,
                "ids": torch.arange(len(x), dtype=torch.uint8),
                "empty": base[:0],
                "one": base.sum(),
                "fp8": base.detach().to(torch.float8_e4m3fn),
                "call": self.calls,
            },
        )


class Judge(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.calls = 0

    def forward(self, base, rest):
        self.calls += 1
        assert rest["call"] == self.calls
        assert rest["half"].dtype == torch.bfloat16
        assert torch.equal(rest["bool"], base > 0)
        assert torch.equal(rest["ids"].long(), torch.arange(len(base)))
        assert rest["empty"].shape == (0, WIDTH)
        assert torch.equal(rest["fp8"].float(), base.detach().to(torch.float8_e4m3fn).float())
        out = base + rest["half"].double() + rest["single"].t().double() + rest["one"]
        return self.weight * (out + rest["complex"].imag)


def strange(rank, fixed):
    group = start(rank, "pyparallel")
    plan = plan_of("1f1b", 2, 4)
    torch.manual_seed(5)
    parts = [Strange(), Judge()]
    inputs, targets = data(4, uneven=True)
    twins = [Strange(), Judge()]
    twins[0].load_state_dict(parts[0].state_dict())
    loss = sum(loss_fn(twins[1](*twins[0](x)), t) for x, t in zip(inputs, targets, strict=True)) / 4
    loss.backward()
    mine = parts[rank.rank]
    executor = PipelineExecutor({rank.rank: mine}, loss_fn, group=group, fixed_shapes=fixed)
    result = executor.step(plan, inputs, targets)
    assert abs(result.loss - loss.item()) < 1e-12
    for ours, theirs in zip(mine.parameters(), twins[rank.rank].parameters(), strict=True):
        assert (ours.grad - theirs.grad).abs().max() < 1e-12


class DataDependent(nn.Module):
    """As many rows as its first number says, whatever the input's shape."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x):
        return self.linear(x)[: int(x[0, 0].item())]


def data_dependent(rank):
    group = start(rank, "pyparallel")
    plan = plan_of("1f1b", 2, 3)
    torch.manual_seed(5)
    inputs = [torch.full((4, WIDTH), float(n), dtype=torch.float64) for n in (1, 3, 2)]
    mine = DataDependent() if rank.rank == 0 else nn.Linear(WIDTH, WIDTH).double()

    def loss(y):
        return y.sum()

    free = PipelineExecutor({rank.rank: mine}, loss, group=group, fixed_shapes=False)
    free.step(plan, inputs)
    executor = PipelineExecutor({rank.rank: mine}, loss, group=group)
    with pytest.raises(PipelineError, match=r"rank 0:.*0SEND_F1.*\[3, 6\].*fixed_shapes=False"):
        executor.step(plan, inputs)
    executor.step(plan, [inputs[0]] * 3)  # the group is usable


def failures(rank, backend):
    group = start(rank, backend)
    told = []
    for name in ("1f1b", "zb-h1", "interleaved-1f1b", "dualpipev", "gpipe"):
        plan = plan_of(name, rank.world_size, 5)
        whole = model(plan.stages)
        parts = own(plan, rank.rank, whole)
        inputs, targets = data(5)
        executor = PipelineExecutor(parts, loss_fn, group=group, dry_run=False)
        for at, way in ((1, "forward"), (4, "forward"), (2, "backward")):
            for known in (False, True):
                if known:  # shapes have travelled: messages are of a known size
                    executor.step(plan, *given(plan, rank.rank, inputs, targets))
                count = [0]

                def fault(*_, count=count, at=at):
                    count[0] += 1
                    if count[0] == at:
                        raise OverflowError("a fault of this stage")

                last = max(parts)
                hook = (
                    parts[last].register_forward_pre_hook(fault)
                    if way == "forward"
                    else parts[last].register_full_backward_hook(fault)
                )
                if rank.rank != 1:
                    hook.remove()
                with pytest.raises(PipelineError, match=r"rank 1: .*OverflowError: a fault") as e:
                    executor.step(plan, *given(plan, rank.rank, inputs, targets))
                assert (e.value.__cause__ is not None) == (rank.rank == 1)
                told.append(str(e.value))
                hook.remove()
                executor = PipelineExecutor(parts, loss_fn, group=group, dry_run=False)
        whole.zero_grad()
        loss, gradients = reference(whole, inputs, targets)
        result = executor.step(plan, *given(plan, rank.rank, inputs, targets))
        assert abs(result.loss - loss) < 1e-12
        assert errors(plan, rank.rank, whole, gradients) < 1e-12
    return told


def refusals(rank):
    """What only one rank can see is raised on both, before anything runs."""
    group = start(rank, "pyparallel")
    plan = plan_of("1f1b", 2, 3)
    whole = model(2)
    ran = []
    whole[rank.rank].register_forward_pre_hook(lambda *_: ran.append(1))
    executor = PipelineExecutor(own(plan, rank.rank, whole), loss_fn, group=group)
    inputs, targets = data(3)
    first = rank.rank == 0
    with pytest.raises(ValueError, match=r"rank 0: inputs are missing"):
        executor.step(plan, None, targets)
    with pytest.raises(ValueError, match=r"rank 1: targets has 2 microbatches.*microbatches=2"):
        executor.step(plan, inputs, targets if first else targets[:2])
    with pytest.raises(ValueError, match=r"rank 1: targets are missing: .*loss_fn\(output"):
        executor.step(plan, inputs)
    mine = (plan, inputs, None) if first else (plan_of("1f1b", 2, 4), None, data(4)[1])
    with pytest.raises(ValueError, match=r"different plans.*3 microbatches.*different.*4 microb"):
        executor.step(*mine)
    with pytest.raises(ValueError, match=r"different calls"):
        (executor.step if first else executor.evaluate)(plan, inputs, targets)
    with pytest.raises(ValueError, match=r"different weights"):
        executor.step(plan, inputs, targets, weights=[1.0, 2.0, 3.0] if first else None)
    with pytest.raises(ValueError, match=r"rank 0: 1f1b: the plan has 3 ranks, the group 2"):
        executor.step(plan_of("1f1b", 3, 3), inputs, targets)
    with pytest.raises(ValueError, match=r"with_transfers"):
        executor.step(generate("1f1b", 2, 3), inputs, targets)
    assert not ran
    # A stage that does not take what the other gives, found out on tensors without numbers.
    widths = (WIDTH, WIDTH) if first else (WIDTH + 1, WIDTH)
    misfit = PipelineExecutor({rank.rank: nn.Linear(*widths).double()}, loss_fn, group=group)
    with pytest.raises(ValueError, match=r"stage 1 on rank 1 does not take what stage 0 gives"):
        misfit.step(plan, *given(plan, rank.rank, inputs, targets))
    fits = PipelineExecutor(own(plan, rank.rank, model(2)), loss_fn, group=group)
    fits.step(plan, *given(plan, rank.rank, inputs, targets))


class Fresh(torch.autograd.Function):
    """An output in memory whose end can be seen, which autograd does not keep."""

    @staticmethod
    def forward(ctx, value, alive):
        array = value.detach().numpy().copy()
        alive[0] += 1
        alive[1] = max(alive)
        weakref.finalize(array, lambda: alive.__setitem__(0, alive[0] - 1))
        return torch.from_numpy(array)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Giver(nn.Module):
    def __init__(self, alive):
        super().__init__()
        self.linear, self.alive = nn.Linear(WIDTH, WIDTH).double(), alive

    def forward(self, x):
        return Fresh.apply(self.linear(x), self.alive)


def outputs_are_freed(rank, backend):
    """GPipe keeps all microbatches' graphs; not their outputs, once these have been sent."""
    group = start(rank, backend)
    plan = plan_of("gpipe", 2, 40)
    alive = [0, 0]
    mine = Giver(alive) if rank.rank == 0 else nn.Linear(WIDTH, WIDTH).double()
    inputs, targets = data(40)
    executor = PipelineExecutor({rank.rank: mine}, loss_fn, group=group)
    gc.disable()
    try:
        executor.step(plan, inputs, targets)
    finally:
        gc.enable()
    assert alive[0] == 0
    assert alive[1] <= (8 + 2 if rank.rank == 0 else 0)  # those under way, and the one at hand


def test_two_ranks():
    results = run_ranks(
        several,
        2,
        (fp32,),
        (strange, True),
        (strange, False),
        (data_dependent,),
        (failures, "pyparallel"),
        (failures, "gloo"),
        (refusals,),
        (outputs_are_freed, "pyparallel"),
        (outputs_are_freed, "gloo"),
        timeout=100,
    )
    for index in (4, 5):  # failures: all ranks say the same
        assert results[0][index] == results[1][index]


def test_failures_in_the_middle_of_three_ranks():
    told = run_ranks(failures, 3, "pyparallel", timeout=100)
    assert told[0] == told[1] == told[2]
