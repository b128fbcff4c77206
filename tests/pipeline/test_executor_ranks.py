"""The executor with a process per rank: the same results as one process, whatever goes wrong.

Layers: every schedule on the backend "pyparallel" and some on gloo, all ranks checked; shapes that
change, values of any dtype; failures on one rank, which all raise while the group stays usable.
"""

import gc
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pyparallel.comm  # noqa: F401  registers the backend
from pyparallel.layers import ColumnParallelLinear, RowParallelLinear
from pyparallel.pipeline import PipelineError, PipelineExecutor, profile
from pyparallel.schedule import auto_schedule, generate, with_steps, with_transfers
from tests.launch import run_ranks
from tests.pipeline.executor_models import (
    WIDTH,
    data,
    grid,
    loss_fn,
    model,
    plan_of,
    reference,
    stages,
)


def start(rank, backend):
    torch.set_num_threads(1)
    dist.init_process_group(backend, store=rank.store(), rank=rank.rank, world_size=rank.world_size)
    return dist.group.WORLD


def own(plan, rank, whole):
    parts = stages(whole, plan.stages)
    return {stage: parts[stage] for stage in plan.held[rank]}


def given(plan, rank, inputs, targets):
    """What this rank passes: only what it needs."""
    held = plan.held[rank]
    return (inputs if 0 in held else None, targets if plan.stages - 1 in held else None)


def errors(plan, rank, whole, gradients):
    """The largest error of this rank's gradients, which are all there."""
    found = dict(whole.named_parameters())
    mine = [n for n in gradients if int(n.split(".")[0]) in plan.held[rank]]
    others = [n for n, p in found.items() if n not in mine and p.grad is not None]
    assert not others
    return max(float((found[n].grad - gradients[n]).abs().max()) for n in mine)


def every_schedule(rank, backend, cases):
    group = start(rank, backend)
    worst = 0.0
    for name, p, m, v in cases:
        plan = with_steps(plan_of(name, p, m, v))
        whole = model(plan.stages)
        inputs, targets = data(m, uneven=True)
        loss, gradients = reference(whole, inputs, targets)
        executor = PipelineExecutor(own(plan, rank.rank, whole), loss_fn, group=group)
        for _ in range(2):  # the second time no description travels
            whole.zero_grad()
            result = executor.step(plan, *given(plan, rank.rank, inputs, targets))
            worst = max(worst, abs(result.loss - loss), errors(plan, rank.rank, whole, gradients))
        evaluated = executor.evaluate(plan, *given(plan, rank.rank, inputs, targets))
        worst = max(worst, abs(evaluated.loss - loss))
        assert worst < 1e-12, (name, p, m, v)
    return worst


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_schedule_on_our_backend(ranks):
    """m up to 8, fewer than ranks too; REDUCE sums DualPipe's copies."""
    cases = grid((ranks,), (1, 2, 3, 8) if ranks < 3 else (1, 2, 5))
    run_ranks(every_schedule, ranks, "pyparallel", cases, timeout=100)


def test_schedules_on_gloo():
    names = ("1f1b", "interleaved-1f1b", "zb-v", "dualpipe", "dualpipev")
    cases = [case for case in grid((2,), (1, 5)) if case[0] in names]
    run_ranks(every_schedule, 2, "gloo", cases, timeout=100)


def fp32(rank):
    """|ours - ref| <= |one process - ref| + m eps32 sum |g_i|: the microbatches' gradients are
    the same numbers, added in another order."""
    group = start(rank, "pyparallel")
    shares = []
    for name, m in (("1f1b", 8), ("zb-h1", 8), ("interleaved-1f1b", 5)):
        plan = plan_of(name, 2, m)
        single = model(plan.stages, torch.float32)
        exact = model(plan.stages, torch.float32).double()
        inputs, targets = data(m, torch.float32)
        wide = [[t.double() for t in ts] for ts in (inputs, targets)]
        _, truth = reference(exact, *wide)
        _, stock = reference(single, inputs, targets)
        sizes = {n: torch.zeros_like(g) for n, g in stock.items()}
        for x, t in zip(inputs, targets, strict=True):
            for n, g in reference(single, [x], [t])[1].items():
                sizes[n] += g.abs() / m
        executor = PipelineExecutor(own(plan, rank.rank, single), loss_fn, group=group)
        executor.step(plan, *given(plan, rank.rank, inputs, targets))
        for n, p in single.named_parameters():
            if p.grad is None:
                continue
            eps = torch.finfo(torch.float32).eps
            limit = (stock[n] - truth[n]).abs() + m * eps * sizes[n]
            error = (p.grad - truth[n]).abs()
            shares.append(float((error / limit.clamp(min=1e-30)).max()))
            assert (error <= limit).all(), (name, n)
            assert ((truth[n] * (1 + 1e-3) - truth[n]).abs() > limit).any(), "the bound bites"
    return max(shares)


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
        executor = PipelineExecutor(parts, loss_fn, group=group)
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
                executor = PipelineExecutor(parts, loss_fn, group=group)
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
    with pytest.raises(ValueError, match=r"different plans.*3 microbatches.*different.*4 microb"):
        executor.step(plan if first else plan_of("1f1b", 2, 4), inputs if first else None, None)
    with pytest.raises(ValueError, match=r"different calls"):
        (executor.step if first else executor.evaluate)(plan, inputs, targets)
    with pytest.raises(ValueError, match=r"different weights"):
        executor.step(plan, inputs, targets, weights=[1.0, 2.0, 3.0] if first else None)
    with pytest.raises(ValueError, match=r"rank 0: 1f1b: the plan has 3 ranks, the group 2"):
        executor.step(plan_of("1f1b", 3, 3), inputs, targets)
    with pytest.raises(ValueError, match=r"with_transfers"):
        executor.step(generate("1f1b", 2, 3), inputs, targets)
    assert not ran


def norms(rank):
    """The norm over all stages is that of one process."""
    group = start(rank, "pyparallel")
    plan = with_transfers(generate("1f1b", 2, 2))
    whole = model(2)
    inputs, targets = data(2)
    _, gradients = reference(whole, inputs, targets)
    executor = PipelineExecutor(own(plan, rank.rank, whole), loss_fn, group=group)
    executor.step(plan, *given(plan, rank.rank, inputs, targets))
    square = sum(p.grad.square().sum() for p in whole.parameters() if p.grad is not None)
    dist.all_reduce(square)
    assert abs(square - sum(g.square().sum() for g in gradients.values())) < 1e-12


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


def profiled(rank, name):
    """Its costs are those of the passes, and lead the simulator near the measured step. How near is
    a matter of the machine's other work."""
    group = start(rank, "pyparallel")
    plan, slow = plan_of(name, 2, 6), 0.01
    whole = model(2)
    inputs, targets = data(6)
    whole[0].register_forward_pre_hook(lambda *_: time.sleep(slow))
    executor = PipelineExecutor(own(plan, rank.rank, whole), loss_fn, group=group)
    result = profile(executor, plan, lambda: executor.step(plan, inputs, targets), steps=3)
    assert result.costs.forward[0] >= slow > result.costs.forward[1]
    assert result.step_time >= 6 * slow
    assert 6 * slow <= result.simulated <= 3 * result.step_time
    assert f"simulated / measured {result.ratio:.2f}" in str(result)
    auto_schedule(2, 6, result.costs)
    with pytest.raises(ValueError, match="steps is 0"):
        profile(executor, plan, lambda: None, steps=0)
    with pytest.raises(ValueError, match="pass it a group"):
        profile(PipelineExecutor(stages(whole, 2)), plan, lambda: None)
    return result.costs, result.step_time


def with_replicas(rank, name):
    """Two pipelines of two ranks: each chunk's gradients are reduced once, after its last
    microbatch, while messages of the other groups go on; means, not sums."""
    start(rank, "pyparallel")
    pipe = [dist.new_group([2 * d, 2 * d + 1]) for d in range(2)][rank.rank // 2]
    replicas = [dist.new_group([s, s + 2]) for s in range(2)][rank.rank % 2]
    plan = with_steps(plan_of(name, 2, 3))
    whole = model(plan.stages)
    inputs, targets = data(6)
    loss, gradients = reference(whole, inputs, targets)
    mine = slice(3 * (rank.rank // 2), 3 * (rank.rank // 2) + 3)
    parts = own(plan, rank.rank % 2, whole)
    reduced = []

    def reduce(stage):
        reduced.append(stage)
        for parameter in parts[stage].parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG, group=replicas)

    executor = PipelineExecutor(parts, loss_fn, group=pipe, reduce=reduce)
    result = executor.step(plan, inputs[mine], targets[mine])
    assert sorted(reduced) == sorted(parts)
    assert errors(plan, rank.rank % 2, whole, gradients) < 1e-12
    both = torch.tensor(result.loss, dtype=torch.float64)
    dist.all_reduce(both, op=dist.ReduceOp.AVG, group=replicas)
    assert abs(both - loss) < 1e-12


class Sharded(nn.Module):
    """Two products, the first split by columns, the second by rows."""

    def __init__(self, group, up, down):
        super().__init__()
        self.up = ColumnParallelLinear(WIDTH, 8, group=group, bias=False, dtype=torch.float64)
        self.down = RowParallelLinear(8, WIDTH, group=group, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.up.weight.copy_(up.weight.chunk(2, 0)[group.rank()])
            self.down.weight.copy_(down.weight.chunk(2, 1)[group.rank()])

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Unsharded(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 8, bias=False)
        self.down = nn.Linear(8, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def with_tensor_parallel_stages(rank, name):
    """Two stages, each sharded over two ranks: both halves of a backward communicate inside."""
    start(rank, "pyparallel")
    pipe = [dist.new_group([t, t + 2]) for t in range(2)][rank.rank % 2]
    shards = [dist.new_group([2 * s, 2 * s + 1]) for s in range(2)][rank.rank // 2]
    torch.manual_seed(4)
    whole = nn.Sequential(Unsharded(), Unsharded()).double()
    inputs, targets = data(4)
    loss, gradients = reference(whole, inputs, targets)
    stage = rank.rank // 2
    mine = Sharded(shards, whole[stage].up, whole[stage].down)
    executor = PipelineExecutor({stage: mine}, loss_fn, group=pipe)
    result = executor.step(plan_of(name, 2, 4), inputs, targets)
    assert abs(result.loss - loss) < 1e-12
    for part, dim in (("up", 0), ("down", 1)):
        wanted = gradients[f"{stage}.{part}.weight"].chunk(2, dim)[shards.rank()]
        assert (getattr(mine, part).weight.grad - wanted).abs().max() < 1e-12


def several(rank, *jobs):
    """Many checks, one start; each makes its group anew."""
    results = []
    for number, (job, *args) in enumerate(jobs):
        rank_of_job = type(rank)(
            rank.rank, rank.world_size, f"{rank.rendezvous}.{number}", rank.timeout, rank._report
        )
        results.append(job(rank_of_job, *args))
        dist.destroy_process_group()
    return results


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
        (norms,),
        (outputs_are_freed, "pyparallel"),
        (outputs_are_freed, "gloo"),
        (profiled, "1f1b"),
        (profiled, "zb-h1"),
        timeout=100,
    )
    for index in (4, 5, 10, 11):  # failures and profiles: all ranks say the same
        assert results[0][index] == results[1][index]


def test_failures_in_the_middle_of_three_ranks():
    told = run_ranks(failures, 3, "pyparallel", timeout=100)
    assert told[0] == told[1] == told[2]


def test_replicas_and_tensor_parallel_stages():
    run_ranks(
        several,
        4,
        *((with_replicas, name) for name in ("1f1b", "zb-v", "dualpipe")),
        *((with_tensor_parallel_stages, name) for name in ("1f1b", "zb-h1")),
        timeout=100,
    )
